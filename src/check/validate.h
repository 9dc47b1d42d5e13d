// SPDX-License-Identifier: Apache-2.0
// Checks shared by the public calls: what an array must look like, and how a refusal is worded.
// Message = function, argument, rule, value given, way out.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "cuattn/backend.h"
#include "cuattn/error.h"
#include "cuattn/tensor.h"

namespace cuattn {

std::string text(DLDevice device);          // "cpu", "cuda:0"
std::string text(DLDataType dtype);         // "float32", "int64"
std::string shape_text(const TensorView&);  // "(2, 3, 4, 8)"
std::string strides_text(const TensorView&);
std::string layout_text(int32_t layout);  // "'nhd'"

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

KvLayout kv_layout_of(const char* function, int32_t code);  // of CUATTN_KV_*

// head_dim of attention over keys of `kv_dtype`, up to 256; `axis`: "head_dim" or "head_dim_v".
void require_head_dim(const char* function, const char* argument, const char* axis,
                      int64_t head_dim, DType kv_dtype);
void require_heads(const char* function, int64_t num_heads_q, int64_t num_heads_kv);

// The factor of the scores, 1 / sqrt(head_dim) where none is given, and their softcap, 0 = off.
float read_scale(const char* function, bool is_given, double scale, int32_t head_dim);
float read_softcap(const char* function, double softcap);

// A side of the window that reaches past all `longest` keys is kUnlimited.
void require_window(const char* function, int64_t left, int64_t right);
int32_t window_side(int64_t side, int64_t longest);

// A contiguous vector of `extent` elements; `axis` says what they are.
const void* read_vector(const char* function, const char* argument, const TensorView& view,
                        DType dtype, int64_t extent, const char* axis, DLDevice device,
                        const char* like, bool check_data);

// float32 [heads], or [batch, heads] where `batch_axis` is not nullptr; no tensor: no data.
struct HeadVector {
  const float* data;
  int64_t stride_batch, stride_head;
};
HeadVector read_heads(const char* function, const char* argument, const DLTensor* tensor,
                      const char* axis, int64_t heads, const char* batch_axis, int64_t batch,
                      DLDevice device, bool check_data);

// CUATTN_CHECK=1: what only the device sees is read back and checked, at the price of a
// synchronisation.
bool checks_device_data();

// The stride of `axis`, 0 where its extent is 1 or less: such a stride may hold anything.
int64_t stride_of(const TensorView& view, int32_t axis);

}  // namespace cuattn
