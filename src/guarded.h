// SPDX-License-Identifier: Apache-2.0
// The border of the C ABI: what is thrown inside becomes a status code, and its text the last error
// of the calling thread.
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "cuattn/c_api.h"
#include "cuattn/error.h"
#include "cuattn/plan.h"

namespace cuattn {

// What cuattn_last_error() returns on this thread.
std::string& last_error();

inline cuattn_status failed(cuattn_status status, const char* message) noexcept {
  try {
    last_error() = message;
  } catch (const std::bad_alloc&) {
    last_error().clear();  // no memory even for the message
  }
  return status;
}

// Runs `body`; no exception leaves the library.
template <class Body>
cuattn_status guarded(Body&& body) noexcept {
  try {
    body();
    return CUATTN_OK;
  } catch (const InvalidArgument& e) {
    return failed(CUATTN_INVALID_ARGUMENT, e.what());
  } catch (const NotImplemented& e) {
    return failed(CUATTN_NOT_IMPLEMENTED, e.what());
  } catch (const UnsupportedDevice& e) {
    return failed(CUATTN_UNSUPPORTED_DEVICE, e.what());
  } catch (const CudaError& e) {
    return failed(CUATTN_CUDA_ERROR, e.what());
  } catch (const OutOfMemory& e) {
    return failed(CUATTN_OUT_OF_MEMORY, e.what());
  } catch (const OutOfBlocks& e) {
    return failed(CUATTN_OUT_OF_BLOCKS, e.what());
  } catch (const std::bad_alloc&) {
    return failed(CUATTN_OUT_OF_MEMORY, "cuattn: the host is out of memory");
  } catch (const std::exception& e) {
    return failed(CUATTN_INTERNAL_ERROR, e.what());
  }
}

// A pointer of the C ABI that may not be NULL.
inline void require_given(const char* function, const char* argument, const void* pointer) {
  CUATTN_REQUIRE(pointer != nullptr, function, ": ", argument,
                 " must not be NULL; pass a pointer to it");
}

// `count` elements, which may be missing only where there are none.
inline void require_elements(const char* function, const char* argument, const void* elements,
                             int64_t count) {
  CUATTN_REQUIRE(count >= 0, function, ": the number of ", argument, " must be >= 0, got ", count,
                 "; it counts elements");
  if (count > 0) require_given(function, argument, elements);
}

// A GPU that the caller describes.
inline DeviceInfo made_up_device(const char* function, const cuattn_device* made_up) {
  for (int32_t value : made_up->reserved) {
    if (value != 0) {
      fail<NotImplemented>(function,
                           ": device sets a field that this library does not have; leave "
                           "what is reserved 0");
    }
  }
  DeviceInfo info{};
  info.is_cuda = made_up->is_cuda != 0;
  info.major = made_up->major;
  info.minor = made_up->minor;
  info.num_sms = made_up->num_sms;
  info.smem_per_block_optin = made_up->smem_per_block_optin;
  info.native = made_up->native;
  info.has_cublas = made_up->has_cublas != 0;
  std::memcpy(info.name, made_up->name, sizeof(info.name));
  info.name[sizeof(info.name) - 1] = '\0';
  return info;
}

template <size_t kSize>
void copy_text(char (&to)[kSize], const std::string& from) {
  size_t length = from.size() < kSize - 1 ? from.size() : kSize - 1;
  std::memcpy(to, from.data(), length);
  to[length] = '\0';
}

// Who computes which tile.
inline const char* schedule_text(const Plan& plan) {
  if (plan.kernel == Kernel::cpu || plan.kernel == Kernel::cpu_naive) return "threads of the pool";
  if (plan.tile.m == 0) return "one kernel after another";  // scores in memory
  if (plan.num_splits == 0) return "CTAs share a plan made on the device";
  if (plan.num_ctas == 0) return "one CTA per tile";
  return plan.draws_tiles ? "persistent CTAs, tiles drawn" : "persistent CTAs, fixed order";
}

inline void fill_plan(const Plan& plan, MaskKind mask, ScoreKind score, const std::string& ladder,
                      cuattn_plan& to) {
  std::memset(&to, 0, sizeof(to));
  copy_text(to.kernel, kernel_name(plan.kernel));
  copy_text(to.mask, mask_name(mask));
  copy_text(to.score, score_name(score));
  copy_text(to.reason, concat(plan.reason, access_clause(plan)));
  copy_text(to.ladder, ladder);
  to.tile_m = plan.tile.m;
  to.tile_n = plan.tile.n;
  to.stages = plan.tile.stages;
  to.warps = plan.tile.warps;
  to.head_dim = plan.head_dim;
  to.head_dim_v = plan.head_dim_v;
  to.num_splits = plan.num_splits;
  to.cluster = plan.cluster > 1 ? plan.cluster : 1;
  to.packed_heads = plan.packed_heads > 1 ? plan.packed_heads : 1;
  copy_text(to.schedule, schedule_text(plan));
  to.workspace_bytes = plan.workspace_bytes;
}

}  // namespace cuattn
