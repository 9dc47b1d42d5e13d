// SPDX-License-Identifier: Apache-2.0
#include "src/check/arrays.h"

#include <cstdlib>

#include "cuattn/names.h"
#include "src/check/environment.h"
#include "src/check/overlap.h"

namespace cuattn {

constexpr int64_t kAlignment = 16;  // bytes: one 128-bit load

void require_array(const char* function, const char* argument, const DLTensor* tensor) {
  CUATTN_REQUIRE(tensor != nullptr, function, ": ", argument,
                 " must be an array, got NULL; pass a DLTensor");
  check_tensor(*tensor, [&](const auto&... parts) {
    fail<InvalidArgument>(function, ": ", argument, parts...);
  });
}

void require_known_device(const char* function, const char* argument, DLDevice device) {
  if (is_cpu(device) || is_cuda(device)) return;
  fail<UnsupportedDevice>(function, ": ", argument, " must be on the CPU or a CUDA device, got ",
                          text(device), "; copy it to one of these");
}

const Backend& backend_of(const char* function, DLDevice device) {
  if (is_cpu(device)) return cpu_backend();
  const Backend* cuda = cuda_backend();
  if (cuda == nullptr) {
    fail<UnsupportedDevice>(function, ": the arrays are on ", text(device),
                            " but this build of cuattn has no CUDA kernels; rebuild with "
                            "CUATTN_CUDA=ON, or move them to the CPU");
  }
  return *cuda;
}

DType attention_dtype(const char* function, const char* argument, const TensorView& view) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (view.is(dtype)) return dtype;
  }
  if (view.is(DType::e4m3)) {
    fail<NotImplemented>(function, ": ", argument,
                         " is float8_e4m3fn, for which no kernel is built yet; cast to bfloat16");
  }
  fail<InvalidArgument>(function, ": ", argument, " must be float32, float16 or bfloat16, got ",
                        text(view.dtype), "; cast it first");
}

void require_rank(const char* function, const char* argument, const TensorView& view, int32_t ndim,
                  const char* axes) {
  CUATTN_REQUIRE(view.ndim == ndim, function, ": ", argument, " must have ", ndim, " axes ", axes,
                 ", got ", view.ndim, " with shape ", shape_text(view), "; reshape it");
}

void require_dtype(const char* function, const char* argument, const TensorView& view, DType dtype,
                   const char* like) {
  CUATTN_REQUIRE(view.is(dtype), function, ": ", argument, " must be ", dtype_name(dtype),
                 like != nullptr ? " like " : "", like != nullptr ? like : "", ", got ",
                 text(view.dtype), "; cast it",
                 dtype == DType::i32 && view.is(DType::i64)
                     ? ", by x.astype('int32') or torch's x.int()"
                     : "");
}

void require_device(const char* function, const char* argument, const TensorView& view,
                    DLDevice device, const char* like) {
  CUATTN_REQUIRE(same_device(view.device, device), function, ": ", argument, " must be on ",
                 text(device), " like ", like, ", got ", text(view.device), "; move it there");
}

void require_extent(const char* function, const char* argument, const char* axis, int64_t got,
                    int64_t want, const char* like) {
  CUATTN_REQUIRE(got == want, function, ": ", argument, " must have ", axis, " ", want, " like ",
                 like, ", got ", got, "; make them equal");
}

void require_rows(const char* function, const char* argument, const TensorView& view, bool output,
                  bool check_data) {
  if (view.size() == 0) return;
  require_last_axis(function, argument, view);
  require_strided(function, argument, view, output, check_data);
  if (is_cuda(view.device)) {
    require_aligned(function, argument, "rows", view, view.ndim - 1, check_data);
  }
}

void require_last_axis(const char* function, const char* argument, const TensorView& view) {
  if (view.size() == 0) return;
  int32_t last = view.ndim - 1;
  CUATTN_REQUIRE(view.shape[last] <= 1 || view.strides[last] == 1, function, ": ", argument,
                 " must be contiguous in its last axis, got strides ", strides_text(view),
                 " in elements; make a contiguous copy");
}

void require_aligned(const char* function, const char* argument, const char* what,
                     const TensorView& view, int32_t axes, bool check_data) {
  int64_t element_bytes = view.dtype.bits / 8;
  for (int32_t axis = 0; axis < axes; ++axis) {
    CUATTN_REQUIRE(stride_of(view, axis) * element_bytes % kAlignment == 0, function, ": ",
                   argument, " must have ", what, " that start on ", kAlignment,
                   " bytes, got strides ", strides_text(view), " in elements of ", element_bytes,
                   " bytes; make a contiguous copy");
  }
  if (!check_data) return;
  CUATTN_REQUIRE(reinterpret_cast<uintptr_t>(view.data) % kAlignment == 0, function, ": ", argument,
                 " must start on ", kAlignment, " bytes, got an address with remainder ",
                 reinterpret_cast<uintptr_t>(view.data) % kAlignment, "; make a contiguous copy");
}

void require_strided(const char* function, const char* argument, const TensorView& view,
                     bool output, bool check_data) {
  if (view.size() == 0) return;
  for (int32_t axis = 0; axis < view.ndim; ++axis) {
    if (view.shape[axis] <= 1) continue;
    CUATTN_REQUIRE(view.strides[axis] >= 0, function, ": ", argument,
                   " must not have negative strides, got ", strides_text(view),
                   "; make a contiguous copy");
    CUATTN_REQUIRE(!output || view.strides[axis] > 0, function, ": ", argument,
                   " is written, so no stride may be zero, got ", strides_text(view),
                   "; pass an array with own memory");
  }
  CUATTN_REQUIRE(!output || !overlaps_itself(view), function, ": ", argument,
                 " is written, so its elements must not overlap, got strides ", strides_text(view),
                 " for shape ", shape_text(view), "; pass an array with own memory");
  if (!check_data) return;
  int64_t element_bytes = view.dtype.bits / 8;
  CUATTN_REQUIRE(view.data != nullptr, function, ": ", argument,
                 " has no memory; pass an array that holds data");
  CUATTN_REQUIRE(reinterpret_cast<uintptr_t>(view.data) % element_bytes == 0, function, ": ",
                 argument, " must be aligned to its elements of ", element_bytes,
                 " bytes; make a contiguous copy");
}

TensorView shape_view(const int64_t* shape, int32_t ndim) {
  TensorView view;
  view.ndim = ndim;
  for (int32_t axis = 0; axis < ndim; ++axis) view.shape[axis] = shape[axis];
  return view;
}

DType result_dtype(const char* function, const TensorView& out, DType dtype, Kernel kernel) {
  if (dtype == DType::f32 || out.is(dtype)) return dtype;
  CUATTN_REQUIRE(out.is(DType::f32), function, ": out must be ", dtype_name(dtype),
                 " like q, or float32, got ", text(out.dtype), "; cast it");
  if (kernel == Kernel::naive || kernel == Kernel::cublas || kernel == Kernel::tiled) {
    fail<NotImplemented>(function, ": out must be ", dtype_name(dtype),
                         " like q, got float32, which backend '", kernel_name(kernel),
                         "' does not write from 16-bit inputs; pass an out of q's dtype, or q, k "
                         "and v in float32");
  }
  return DType::f32;
}

void require_output(const char* function, const char* argument, const TensorView& view, DType dtype,
                    const TensorView& shape, DLDevice device) {
  require_dtype(function, argument, view, dtype);
  require_device(function, argument, view, device);
  bool same = view.ndim == shape.ndim;
  for (int32_t axis = 0; same && axis < shape.ndim; ++axis)
    same = view.shape[axis] == shape.shape[axis];
  CUATTN_REQUIRE(same, function, ": ", argument, " must have shape ", shape_text(shape), ", got ",
                 shape_text(view), "; allocate it with that shape");
}

void require_workspace(const char* function, const Plan& plan, DLDevice device,
                       const void* workspace, size_t workspace_bytes) {
  if (workspace_bytes < plan.workspace_bytes ||
      (plan.workspace_bytes > 0 && workspace == nullptr)) {
    fail<OutOfMemory>(function, ": workspace must hold ", plan.workspace_bytes,
                      " bytes for backend '", kernel_name(plan.kernel), "', got ", workspace_bytes,
                      "; allocate as explain() says, or use backend='auto'");
  }
  size_t alignment = is_cuda(device) ? 256 : 16;  // what CUDA allocators and malloc give
  CUATTN_REQUIRE(reinterpret_cast<uintptr_t>(workspace) % alignment == 0, function,
                 ": workspace must start on ", alignment,
                 " bytes; take it from an allocator, not from the middle of an array");
}

bool is_dense_from(const TensorView& view, int32_t first) {
  int64_t stride = 1;
  for (int32_t axis = view.ndim - 1; axis >= first; --axis) {
    if (view.shape[axis] > 1 && view.strides[axis] != stride) return false;
    stride *= view.shape[axis];
  }
  return true;
}

void require_contiguous(const char* function, const char* argument, const TensorView& view,
                        bool check_data) {
  CUATTN_REQUIRE(view.size() == 0 || is_dense_from(view, 0), function, ": ", argument,
                 " must be contiguous, got strides ", strides_text(view),
                 "; make a contiguous copy");
  require_strided(function, argument, view, false, check_data);
}

size_t checked_bytes(const char* function, std::initializer_list<int64_t> factors) {
  constexpr double kMost = 0x1p60;
  size_t bytes = 1;
  double estimate = 1;
  for (int64_t factor : factors) {
    bytes *= static_cast<size_t>(factor);
    estimate *= static_cast<double>(factor);
  }
  if (estimate > kMost) {
    fail<OutOfMemory>(function, ": the workspace would have to hold ", estimate,
                      " bytes, more than there can be; split the call");
  }
  return bytes;
}

int32_t checked_extent(const char* function, const char* argument, const char* axis,
                       int64_t extent) {
  CUATTN_REQUIRE(extent >= 0 && extent <= INT32_MAX, function, ": ", argument, " must have ", axis,
                 " from 0 to ", INT32_MAX, ", got ", extent, "; split the call");
  return static_cast<int32_t>(extent);
}

int32_t checked_length(const char* function, const char* argument, const char* axis,
                       int64_t length) {
  CUATTN_REQUIRE(length >= 0 && length <= kMaxLength, function, ": ", argument, " must have ", axis,
                 " from 0 to ", kMaxLength, " (2^31 - 1024, so that the end of the last tile is ",
                 "an int32), got ", length, "; split the call, for keys with merge_states");
  return static_cast<int32_t>(length);
}

const void* read_vector(const char* function, const char* argument, const TensorView& view,
                        DType dtype, int64_t extent, const char* axis, DLDevice device,
                        const char* like, bool check_data) {
  require_dtype(function, argument, view, dtype);
  require_device(function, argument, view, device, like);
  CUATTN_REQUIRE(view.ndim == 1 && view.shape[0] == extent, function, ": ", argument,
                 " must have shape (", axis, ",) = (", extent, ",), got ", shape_text(view),
                 "; give one entry for each");
  require_contiguous(function, argument, view, check_data);
  return view.data;
}

bool checks_device_data() {
  static const bool enabled = is_on(std::getenv("CUATTN_CHECK"));
  return enabled;
}

int64_t stride_of(const TensorView& view, int32_t axis) {
  return view.shape[axis] > 1 ? view.strides[axis] : 0;
}

}  // namespace cuattn
