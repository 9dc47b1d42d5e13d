// SPDX-License-Identifier: Apache-2.0
// The plain products of the naive rungs, forward and backward, around a plane of float32: [batch,
// num_heads_q, seqlen_q, seqlen_kv], a number for each pair of a query and a key. Used by naive.cu
// and ../backward/naive.cu.
#pragma once

#include "cuattn/device/convert.cuh"
#include "cuattn/params/attention.h"
#include "cuda/host/launch.h"

namespace cuattn {
namespace products {

using namespace device;

constexpr int kKeysPerBlock = 32;  // the lanes of a warp: they share a query row
constexpr int kRowsPerBlock = 8;   // the warps of a block: they share those key rows through L1
constexpr int kThreads = 256;
constexpr int kTermsPerSum = 64;  // summed apart, then added: one sum over all rounds more

// 16 bytes of a row; rows are 16-byte aligned and head dims are multiples of 8.
template <class T>
struct alignas(16) Chunk {
  static constexpr int kSize = 16 / sizeof(T);
  T x[kSize];
};

// An array of query rows or of keys, or a result like one.
struct Rows {
  const void* data;
  Strides strides;
  int32_t dim;  // elements of a row
};

template <class T>
__device__ const T* row_of(const Rows& rows, int32_t b, int64_t row, int32_t head) {
  int64_t offset = b * rows.strides.batch + row * rows.strides.seq + head * rows.strides.head;
  return static_cast<const T*>(rows.data) + offset;
}

template <class T>
__device__ const Chunk<T>* chunks_of(const Rows& rows, int32_t b, int64_t row, int32_t head) {
  return reinterpret_cast<const Chunk<T>*>(row_of<T>(rows, b, row, head));
}

// Blocks count heads, tiles of rows and tiles of keys: 32 bits, whose division is short. A pair of
// a query and a key for each thread: a block has 8 rows and 32 keys.
struct ThreadPair {
  int32_t b, head, row, key;
};

__device__ __forceinline__ ThreadPair pair_of_thread(int32_t heads, int32_t rows, int32_t keys) {
  uint32_t key_tiles = ceil_div<uint32_t>(keys, kKeysPerBlock);
  uint32_t row_tiles = ceil_div<uint32_t>(rows, kRowsPerBlock);
  uint32_t key_tile = blockIdx.x % key_tiles, line = blockIdx.x / key_tiles;
  uint32_t row_tile = line % row_tiles, b_head = line / row_tiles, count = heads;
  return {static_cast<int32_t>(b_head / count), static_cast<int32_t>(b_head % count),
          static_cast<int32_t>(row_tile * kRowsPerBlock + threadIdx.x / kKeysPerBlock),
          static_cast<int32_t>(key_tile * kKeysPerBlock + threadIdx.x % kKeysPerBlock)};
}

inline int64_t pair_blocks(int64_t batch, int64_t heads, int64_t rows, int64_t keys) {
  return batch * heads * ceil_div<int64_t>(rows, kRowsPerBlock) *
         ceil_div<int64_t>(keys, kKeysPerBlock);
}

// 16 bytes of a row for each thread: a block has as many whole rows of one head as it has threads
// for. `row` may lie behind the last.
struct RowPart {
  int32_t b, head, row, chunk;
};

__device__ __forceinline__ RowPart part_of_thread(int32_t heads, int32_t rows, int32_t chunks) {
  uint32_t per_block = kThreads / chunks, tiles = ceil_div<uint32_t>(rows, per_block);
  uint32_t in_block = threadIdx.x / chunks, tile = blockIdx.x % tiles, b_head = blockIdx.x / tiles;
  uint32_t count = heads;
  return {static_cast<int32_t>(b_head / count), static_cast<int32_t>(b_head % count),
          in_block < per_block ? static_cast<int32_t>(tile * per_block + in_block) : rows,
          static_cast<int32_t>(threadIdx.x % chunks)};
}

// dots[b, h, i, j] = rows_i . keys_j, for the keys that some row may see. One thread a dot product.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    dot_products(const __grid_constant__ AttentionParams p, const __grid_constant__ Rows rows,
                 const __grid_constant__ Rows keys_of, float* dots) {
  using T = Element<kType>;
  const auto [b, head, row, key] = pair_of_thread(p.num_heads_q, p.seqlen_q, p.seqlen_kv);
  Span queries = query_span(p, b), keys = key_span(p, b);
  if (row >= queries.used || key >= keys.used) return;

  int32_t head_kv = head / (p.num_heads_q / p.num_heads_kv);
  const Chunk<T>* q = chunks_of<T>(rows, b, queries.start + row, head);
  const Chunk<T>* k = chunks_of<T>(keys_of, b, keys.start + key, head_kv);
  float dot = 0.0f;
  for (int32_t c = 0; c < rows.dim / Chunk<T>::kSize; ++c) {
    Chunk<T> a = q[c], d = k[c];
    for (int i = 0; i < Chunk<T>::kSize; ++i) dot = fmaf(to_float(a.x[i]), to_float(d.x[i]), dot);
  }
  if constexpr (is_code(kType)) {
    dot *= p.float8.of_query(b, head, row) * p.float8.of_key(b, head_kv, first_key(p, b) + key);
  }
  dots[((int64_t{b} * p.num_heads_q + head) * p.seqlen_q + row) * p.seqlen_kv + key] = dot;
}

// Blocks of part_of_thread.
template <class T>
int64_t row_blocks(int64_t batch, int64_t heads, int32_t rows, int32_t dim) {
  int32_t chunks = dim / Chunk<T>::kSize;
  return chunks == 0 ? 0 : batch * heads * ceil_div(rows, kThreads / chunks);
}

// result[b, i, h, :] = factor * sum_j plane[b, h, i, j] keys_j. One thread per 16 bytes of keys.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    sums_over_keys(const __grid_constant__ AttentionParams p, const float* plane,
                   const __grid_constant__ Rows keys_of, float factor,
                   const __grid_constant__ Rows result) {
  using T = Element<kType>;
  const auto [b, head, row, chunk] =
      part_of_thread(p.num_heads_q, p.seqlen_q, result.dim / Chunk<T>::kSize);
  if (row >= p.seqlen_q) return;
  Span queries = query_span(p, b), keys = key_span(p, b);
  if (row >= queries.stored) return;

  KeyRange seen{0, 0};  // rows that are stored but not used see nothing: they become zeros
  if (row < queries.used) {
    seen = p.mask.visible(row, queries.used, keys.used);
  }
  int32_t head_kv = head / (p.num_heads_q / p.num_heads_kv);
  const float* weights =
      plane + ((int64_t{b} * p.num_heads_q + head) * p.seqlen_q + row) * p.seqlen_kv;
  float sum[Chunk<T>::kSize] = {};
  for (int32_t begin = seen.begin; begin < seen.end; begin += kTermsPerSum) {
    float part[Chunk<T>::kSize] = {};
    for (int32_t key = begin; key < min(begin + kTermsPerSum, seen.end); ++key) {
      float weight = weights[key];
      if (weight == 0.0f) continue;  // not seen, by the bias too: the row may be anything, even NaN
      Chunk<T> v = chunks_of<T>(keys_of, b, keys.start + key, head_kv)[chunk];
      for (int i = 0; i < Chunk<T>::kSize; ++i) part[i] = fmaf(weight, to_float(v.x[i]), part[i]);
    }
    for (int i = 0; i < Chunk<T>::kSize; ++i) sum[i] += part[i];
  }
  Chunk<T> to;
  for (int i = 0; i < Chunk<T>::kSize; ++i) to.x[i] = from_float<T>(factor * sum[i]);
  const_cast<Chunk<T>*>(chunks_of<T>(result, b, queries.start + row, head))[chunk] = to;
}

template <DType kType>
void launch_dot_products(const AttentionParams& p, const Rows& rows, const Rows& keys, float* dots,
                         cudaStream_t stream) {
  int64_t blocks = pair_blocks(p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_kv);
  if (blocks == 0) return;  // seqlen_kv = 0: no score to compute, every row is empty
  dot_products<kType><<<grid_blocks(blocks, "naive"), kThreads, 0, stream>>>(p, rows, keys, dots);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <DType kType>
void launch_sums_over_keys(const AttentionParams& p, const float* plane, const Rows& keys,
                           float factor, const Rows& result, cudaStream_t stream) {
  int64_t blocks = row_blocks<Element<kType>>(p.batch, p.num_heads_q, p.seqlen_q, result.dim);
  if (blocks == 0) return;
  sums_over_keys<kType>
      <<<grid_blocks(blocks, "naive"), kThreads, 0, stream>>>(p, plane, keys, factor, result);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace products
}  // namespace cuattn
