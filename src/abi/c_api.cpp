// SPDX-License-Identifier: Apache-2.0
// The C ABI of attention and merging: views in, exceptions out as status codes. Next: guarded.h.
#include "cuattn/c_api.h"

#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "cuattn/instances.h"
#include "src/abi/plan_log.h"
#include "src/abi/prepared.h"
#include "src/attention/call.h"
#include "src/attention/flex.h"
#include "src/check/arrays.h"
#include "src/guarded.h"
#include "src/info.h"
#include "src/merge/merge.h"
#include "src/options.h"

#ifndef CUATTN_VERSION
#define CUATTN_VERSION "0.0.0"
#endif

namespace cuattn {
namespace {

// Programs allocate these: they keep their size.
static_assert(sizeof(cuattn_attention_call) == 4192 && sizeof(cuattn_plan) == 4648 &&
              sizeof(cuattn_device) == 256 && sizeof(cuattn_kernel_info) == 136 &&
              sizeof(cuattn_paged_shape) == 48 && sizeof(cuattn_block_pool_stats) == 88);

AttentionCall& state_of(cuattn_attention_call& call) {
  return *reinterpret_cast<AttentionCall*>(call.state);
}

bool names_cublas(const char* backend) {
  return backend != nullptr && std::strcmp(backend, "cublas") == 0;
}

DeviceInfo device_info_of(const AttentionCall& call, bool find_libraries) {
  return backend_of(call.function(), call.device)
      .device_info(call.device.device_id, find_libraries);
}

void fill_shapes(const TensorView& q, cuattn_attention_call& c) {
  const AttentionCall& call = state_of(c);
  const AttentionParams& p = call.params;
  c.device = call.device;
  c.out_dtype = dl_dtype(p.out_dtype);
  c.out_ndim = q.ndim;
  for (int32_t axis = 0; axis + 1 < q.ndim; ++axis) c.out_shape[axis] = q.shape[axis];
  c.out_shape[q.ndim - 1] = p.head_dim_v;
  c.lse_ndim = q.ndim - 1;
  if (call.ragged) {
    c.lse_shape[0] = p.num_heads_q;
    c.lse_shape[1] = p.total_q;
  } else {
    c.lse_shape[0] = p.batch;
    c.lse_shape[1] = p.num_heads_q;
    c.lse_shape[2] = p.seqlen_q;
  }
  c.workspace_bytes = call.plan.workspace_bytes;
  c.nothing_to_do = p.total_q == 0 || p.num_heads_q == 0;
}

std::vector<KernelInfo> all_kernels() {
  std::vector<KernelInfo> list;
  cpu_backend().list_kernels(list);
  list_instances(list);
  if (const Backend* cuda = cuda_backend()) cuda->list_kernels(list);
  return list;
}

}  // namespace

std::string& last_error() {
  thread_local std::string message;
  return message;
}

}  // namespace cuattn

using namespace cuattn;

extern "C" {

const char* cuattn_last_error(void) { return last_error().c_str(); }

const char* cuattn_version(void) { return CUATTN_VERSION; }

void cuattn_attention_options_init(cuattn_attention_options* options, size_t struct_size) {
  init_options("attention", options, struct_size);
}

cuattn_status cuattn_attention_prepare(const DLTensor* q, const DLTensor* k, const DLTensor* v,
                                       const cuattn_attention_options* options,
                                       cuattn_attention_call* call) {
  return guarded([&] {
    require_given("attention", "call", call);
    mark(*call, Prepared::nothing);
    cuattn_attention_options room;
    const cuattn_attention_options& o = known_options("attention", options, room);
    TensorView view = view_of("attention", "q", q);
    AttentionCall& state = *new (call->state) AttentionCall(validate_attention(
        view, view_of("attention", "k", k), view_of("attention", "v", v), o, /*check_data=*/true));
    plan_attention(state, device_info_of(state, names_cublas(o.backend)), o.backend);
    if (logs_plans()) log_plan(state);
    fill_shapes(view, *call);
    mark(*call, Prepared::attention);
  });
}

void cuattn_flex_options_init(cuattn_flex_options* options, size_t struct_size) {
  init_options("flex_attention", options, struct_size);
}

cuattn_status cuattn_flex_add_functor(const void* image, size_t bytes, int32_t packed_heads,
                                      int32_t reads_blocks, int64_t* functor) {
  return guarded([&] {
    const char* fn = "flex_attention";
    CUATTN_REQUIRE(image != nullptr && bytes > 0 && functor != nullptr, fn,
                   ": a functor must have machine code, got none");
    const bool is_power = packed_heads > 0 && (packed_heads & (packed_heads - 1)) == 0;
    CUATTN_REQUIRE(is_power && packed_heads <= 64, fn,
                   ": packed_heads must be 1, 2, 4, 8, 16, 32 or 64, got ", packed_heads,
                   "; pass what the functor was compiled for");
    const Backend* cuda = cuda_backend();
    if (cuda == nullptr) fail<NotImplemented>(fn, ": this build has no CUDA; move the arrays");
    *functor = cuda->add_functor(image, bytes, {packed_heads, reads_blocks != 0});
  });
}

cuattn_status cuattn_flex_prepare(const DLTensor* q, const DLTensor* k, const DLTensor* v,
                                  const cuattn_attention_options* options,
                                  const cuattn_flex_options* flex_options,
                                  cuattn_attention_call* call) {
  return guarded([&] {
    const char* fn = "flex_attention";
    require_given(fn, "call", call);
    mark(*call, Prepared::nothing);
    cuattn_attention_options room;
    cuattn_flex_options flex_room;
    const cuattn_attention_options& o = known_options(fn, options, room);
    const cuattn_flex_options& flex = known_options(fn, flex_options, flex_room);
    TensorView view = view_of(fn, "q", q);
    AttentionCall& state = *new (call->state) AttentionCall(validate_attention(
        view, view_of(fn, "k", k), view_of(fn, "v", v), o, /*check_data=*/true, CallKind::flex));
    read_flex(state, flex, /*check_data=*/true);
    plan_attention(state, device_info_of(state, names_cublas(o.backend)), o.backend);
    if (logs_plans()) log_plan(state);
    fill_shapes(view, *call);
    mark(*call, Prepared::attention);
  });
}

cuattn_status cuattn_attention_run(cuattn_attention_call* call, const DLTensor* out,
                                   const DLTensor* lse, void* workspace, size_t workspace_bytes,
                                   void* stream) {
  return guarded([&] {
    require_given("attention", "call", call);
    const char* by = "cuattn_attention_prepare or cuattn_flex_prepare";
    require_prepared("attention", *call, Prepared::attention, by);
    AttentionCall& state = state_of(*call);
    const char* fn = state.function();
    std::optional<TensorView> lse_view;
    run_attention(state, view_of(fn, "out", out), optional_view(fn, "lse_out", lse, lse_view),
                  workspace, workspace_bytes, stream);
  });
}

cuattn_status cuattn_merge_states(const DLTensor* out_a, const DLTensor* lse_a,
                                  const DLTensor* out_b, const DLTensor* lse_b, const DLTensor* out,
                                  const DLTensor* lse_out, int32_t layout, void* stream) {
  return guarded([&] {
    const char* fn = "merge_states";
    std::optional<TensorView> lse_view;
    merge_states(view_of(fn, "out_a", out_a), view_of(fn, "lse_a", lse_a),
                 view_of(fn, "out_b", out_b), view_of(fn, "lse_b", lse_b), view_of(fn, "out", out),
                 optional_view(fn, "lse_out", lse_out, lse_view), layout, stream);
  });
}

cuattn_status cuattn_merge_many(const DLTensor* outs, const DLTensor* lses, const DLTensor* out,
                                const DLTensor* lse_out, int32_t layout, void* stream) {
  return guarded([&] {
    const char* fn = "merge_states";
    std::optional<TensorView> lse_view;
    merge_many(view_of(fn, "outs", outs), view_of(fn, "lses", lses), view_of(fn, "out", out),
               optional_view(fn, "lse_out", lse_out, lse_view), layout, stream);
  });
}

cuattn_status cuattn_attention_explain(const DLTensor* q, const DLTensor* k, const DLTensor* v,
                                       const cuattn_attention_options* options,
                                       const cuattn_device* device, cuattn_plan* result) {
  return guarded([&] {
    const char* fn = "attention";
    cuattn_attention_options room;
    const cuattn_attention_options& o = known_options(fn, options, room);
    require_given(fn, "plan", result);
    AttentionCall call =
        validate_attention(view_of(fn, "q", q), view_of(fn, "k", k), view_of(fn, "v", v), o,
                           /*check_data=*/false);
    AttentionRequest request = request_of(call);
    DeviceInfo info = device != nullptr ? made_up_device(fn, device) : device_info_of(call, true);
    plan_attention(call, info, o.backend);
    fill_plan(call.plan, request.mask, request.score, ladder_of(call, info, o.backend), *result);
  });
}

int32_t cuattn_kernel_count(void) {
  int32_t count = 0;
  guarded([&] { count = static_cast<int32_t>(all_kernels().size()); });
  return count;
}

cuattn_status cuattn_kernel_at(int32_t index, cuattn_kernel_info* info) {
  return guarded([&] {
    std::vector<KernelInfo> list = all_kernels();
    CUATTN_REQUIRE(index >= 0 && index < static_cast<int32_t>(list.size()),
                   "kernel_at: index must be in [0, ", list.size(), "), got ", index,
                   "; see cuattn_kernel_count()");
    const KernelInfo& kernel = list[index];
    require_given("kernel_at", "info", info);
    std::memset(info, 0, sizeof(*info));
    copy_text(info->op, kernel.op);
    copy_text(info->kernel, kernel.kernel);
    copy_text(info->arch, kernel.arch);
    copy_text(info->dtype, kernel.dtype);
    copy_text(info->mask, kernel.mask);
    copy_text(info->score, kernel.score);
    info->head_dim = kernel.head_dim;
    info->head_dim_v = kernel.head_dim_v;
  });
}

const char* cuattn_info_json(void) {
  thread_local std::string text;
  if (guarded([&] { text = info_json(); }) != CUATTN_OK) text = "{}";
  return text.c_str();
}

}  // extern "C"
