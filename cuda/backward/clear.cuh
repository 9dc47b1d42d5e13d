// SPDX-License-Identifier: Apache-2.0
// Zeros for the rows of a gradient that no pass writes, those of no sequence and those before
// kv_start: autograd reads them. Used by naive.cu, sm80/backward.cuh and sm90/backward.cuh.
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
constexpr int kClearRows = 64;  // of a block, where most rows are no business of it

// The threads of a block zero the heads of one row.
__device__ __forceinline__ void clear_row(const GradientRows& result, int64_t first, int32_t heads,
                                          int32_t row_chunks) {
  int32_t item_bytes = result.dtype == DType::f32 ? 4 : 2;
  for (int32_t at = threadIdx.x; at < heads * row_chunks; at += kClearThreads) {
    int64_t element = first + at / row_chunks * result.strides.head;
    char* to = static_cast<char*>(result.data) + element * item_bytes + at % row_chunks * 16;
    *reinterpret_cast<uint4*>(to) = uint4{};
  }
}

// A block has one row.
static __global__ void __launch_bounds__(kClearThreads)
    clear_rows_of_none(const int32_t* cu_seqlens, int32_t batch, int32_t heads,
                       const __grid_constant__ GradientRows result, int32_t row_chunks) {
  int64_t row = blockIdx.x;
  if (row < cu_seqlens[batch]) return;
  clear_row(result, row * result.strides.seq, heads, row_chunks);
}

// A block has kClearRows rows of a sequence.
static __global__ void __launch_bounds__(kClearThreads)
    clear_rows_before(const __grid_constant__ AttentionParams f,
                      const __grid_constant__ GradientRows result, int32_t row_chunks) {
  int32_t blocks = (f.seqlen_kv + kClearRows - 1) / kClearRows;
  int32_t b = blockIdx.x / static_cast<unsigned>(blocks);
  int32_t begin = blockIdx.x % static_cast<unsigned>(blocks) * kClearRows;
  int32_t end = min(begin + kClearRows, first_key(f, b));
  for (int64_t row = begin; row < end; ++row) {
    clear_row(result, b * result.strides.batch + row * result.strides.seq, f.num_heads_kv,
              row_chunks);
  }
}

inline int32_t chunks_of_row(const GradientRows& rows) {
  return rows.dim * (rows.dtype == DType::f32 ? 4 : 2) / 16;
}

inline void launch_clear(const int32_t* cu_seqlens, int32_t batch, int64_t total, int32_t heads,
                         const GradientRows& result, cudaStream_t stream) {
  if (cu_seqlens == nullptr || result.data == nullptr || total * heads == 0) return;
  clear_rows_of_none<<<grid_blocks(total, "attention_backward"), kClearThreads, 0, stream>>>(
      cu_seqlens, batch, heads, result, chunks_of_row(result));
  CUATTN_CUDA_TRY(cudaGetLastError());
}

// Clears the rows of dk or dv that belong to no sequence or lie before kv_start.
inline void launch_clear_keys(const AttentionParams& f, const GradientRows& result,
                              cudaStream_t stream) {
  launch_clear(f.cu_seqlens_kv, f.batch, f.total_kv, f.num_heads_kv, result, stream);
  int64_t blocks = int64_t{f.batch} * ((f.seqlen_kv + int64_t{kClearRows} - 1) / kClearRows);
  if (f.kv_start == nullptr || result.data == nullptr || blocks * f.num_heads_kv == 0) return;
  clear_rows_before<<<grid_blocks(blocks, "attention_backward"), kClearThreads, 0, stream>>>(
      f, result, chunks_of_row(result));
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
