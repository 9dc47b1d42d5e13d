// SPDX-License-Identifier: Apache-2.0
// Zeros for the rows of a ragged gradient that belong to no sequence: autograd reads them. Used by
// naive.cu and sm80/backward.cuh.
#pragma once

#include "cuattn/params/backward.h"
#include "cuda/host/launch.h"

namespace cuattn {

// A gradient in rows.
struct GradientRows {
  void* data;
  Strides strides;
  DType dtype;  // of q, or f32
  int32_t dim;
};

constexpr int kClearThreads = 256;

// A block has one row.
static __global__ void __launch_bounds__(kClearThreads)
    clear_rows_of_none(const int32_t* cu_seqlens, int32_t batch, int32_t heads,
                       const __grid_constant__ GradientRows result, int32_t row_chunks) {
  int64_t row = blockIdx.x;
  if (row < cu_seqlens[batch]) return;
  int32_t item_bytes = result.dtype == DType::f32 ? 4 : 2;
  for (int32_t at = threadIdx.x; at < heads * row_chunks; at += kClearThreads) {
    int64_t element = row * result.strides.seq + at / row_chunks * result.strides.head;
    char* to = static_cast<char*>(result.data) + element * item_bytes + at % row_chunks * 16;
    *reinterpret_cast<uint4*>(to) = uint4{};
  }
}

inline void launch_clear(const int32_t* cu_seqlens, int32_t batch, int64_t total, int32_t heads,
                         const GradientRows& result, cudaStream_t stream) {
  if (cu_seqlens == nullptr || result.data == nullptr || total * heads == 0) return;
  int32_t row_chunks = result.dim * (result.dtype == DType::f32 ? 4 : 2) / 16;
  clear_rows_of_none<<<grid_blocks(total, "attention_backward"), kClearThreads, 0, stream>>>(
      cu_seqlens, batch, heads, result, row_chunks);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
