// SPDX-License-Identifier: Apache-2.0
// What an array of a call must look like, and where it may lie; one function per rule. Message =
// function, argument, rule, value given, way out. Next: options.h, overlap.h.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "cuattn/backend.h"
#include "cuattn/error.h"
#include "cuattn/tensor.h"
#include "src/check/text.h"

namespace cuattn {

inline bool is_cuda(DLDevice device) {
  return device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
}
inline bool is_cpu(DLDevice device) {
  return device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
}
inline bool same_device(DLDevice a, DLDevice b) {
  return is_cpu(a) ? is_cpu(b) : is_cuda(a) && is_cuda(b) && a.device_id == b.device_id;
}

// Refuses NULL, and what no array can be.
void require_array(const char* function, const char* argument, const DLTensor* tensor);

inline TensorView view_of(const char* function, const char* argument, const DLTensor* tensor) {
  if (tensor == nullptr || !is_small(*tensor)) require_array(function, argument, tensor);
  return TensorView(*tensor);
}
// The same for an array that may be NULL: nullptr then, else the view, kept in `storage`.
inline const TensorView* optional_view(const char* function, const char* argument,
                                       const DLTensor* tensor, std::optional<TensorView>& storage) {
  return tensor == nullptr ? nullptr : &storage.emplace(view_of(function, argument, tensor));
}

void require_known_device(const char* function, const char* argument, DLDevice device);

// The backend that serves `device` (a known one); throws UnsupportedDevice when this build has
// none.
const Backend& backend_of(const char* function, DLDevice device);

// The dtype of q: float32, float16 or bfloat16.
DType attention_dtype(const char* function, const char* argument, const TensorView& view);

void require_rank(const char* function, const char* argument, const TensorView& view, int32_t ndim,
                  const char* axes);
void require_dtype(const char* function, const char* argument, const TensorView& view, DType dtype,
                   const char* like = nullptr);
void require_device(const char* function, const char* argument, const TensorView& view,
                    DLDevice device, const char* like = "q");
void require_extent(const char* function, const char* argument, const char* axis, int64_t got,
                    int64_t want, const char* like);

// Memory a kernel reads or writes row by row: no negative strides, the last axis contiguous, and on
// CUDA rows that start on 16 bytes. Outputs must not have zero strides either. Strides of axes of
// extent 1 (or less) do not count. `check_data`: also the pointer (explain passes none).
void require_rows(const char* function, const char* argument, const TensorView& view, bool output,
                  bool check_data);

// Any non-negative strides, data aligned to its element.
void require_strided(const char* function, const char* argument, const TensorView& view,
                     bool output, bool check_data);

// A view that has nothing but a shape.
TensorView shape_view(const int64_t* shape, int32_t ndim);

// What an attention writes: values of `dtype`, that of q, or float32 where out is so.
DType result_dtype(const char* function, const TensorView& out, DType dtype, Kernel kernel);

// An output: dtype, device and the extents of `shape`.
void require_output(const char* function, const char* argument, const TensorView& view, DType dtype,
                    const TensorView& shape, DLDevice device);

// Memory as the plan asks for; throws OutOfMemory where it is missing or too small.
void require_workspace(const char* function, const Plan& plan, DLDevice device,
                       const void* workspace, size_t workspace_bytes);

// Whether the axes from `first` on are row-major without gaps.
bool is_dense_from(const TensorView& view, int32_t first);

// Row-major without gaps.
void require_contiguous(const char* function, const char* argument, const TensorView& view,
                        bool check_data);

// The last axis is contiguous.
void require_last_axis(const char* function, const char* argument, const TensorView& view);

// 128-bit loads: the strides of the first `axes` axes, where what `what` names starts, are
// multiples of 16 bytes. `check_data`: the pointer too.
void require_aligned(const char* function, const char* argument, const char* what,
                     const TensorView& view, int32_t axes, bool check_data);

// Bytes of workspace: the product, or OutOfMemory where it is more than any machine has.
size_t checked_bytes(const char* function, std::initializer_list<int64_t> factors);

// An extent that kernels keep in 32 bits.
int32_t checked_extent(const char* function, const char* argument, const char* axis,
                       int64_t extent);

// Queries or keys of a sequence. Kernels count positions in 32 bits, up to the end of the last
// tile, which may lie behind the sequence.
constexpr int32_t kMaxLength = INT32_MAX - 1023;  // 1024: four of the largest tiles
int32_t checked_length(const char* function, const char* argument, const char* axis,
                       int64_t length);

// A contiguous vector of `extent` elements; `axis` says what they are.
const void* read_vector(const char* function, const char* argument, const TensorView& view,
                        DType dtype, int64_t extent, const char* axis, DLDevice device,
                        const char* like, bool check_data);

// CUATTN_CHECK=1: what only the device sees is read back and checked, at the price of a
// synchronisation.
bool checks_device_data();

// The stride of `axis`, 0 where its extent is 1 or less: such a stride may hold anything.
int64_t stride_of(const TensorView& view, int32_t axis);

}  // namespace cuattn
