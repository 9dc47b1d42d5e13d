// SPDX-License-Identifier: Apache-2.0
// Rung one, backend="naive": attention as the formula reads. Three kernels, the scores [batch,
// num_heads_q, seqlen_q, seqlen_kv] in memory between them as float32: dot products, softmax of
// each row, weighted sum of the values. Serves every option and dtype of the library; memory and
// speed are what the other rungs improve. Next: tiled.cuh.
#include "cuda/attention/softmax_rows.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using namespace device;

constexpr int kKeysPerBlock = 32;  // the lanes of a warp: they share a query row
constexpr int kRowsPerBlock = 8;   // the warps of a block: they share those key rows through L1
constexpr int kThreads = 256;
constexpr int kKeysPerSum = 64;  // summed apart, then added: one sum over all keys rounds more

// 16 bytes of a row; rows are 16-byte aligned and head dims are multiples of 8.
template <class T>
struct alignas(16) Chunk {
  static constexpr int kSize = 16 / sizeof(T);
  T x[kSize];
};

template <class T>
__device__ const Chunk<T>* row_of(const void* base, Strides strides, int32_t b, int64_t row,
                                  int32_t head) {
  int64_t offset = b * strides.batch + row * strides.seq + head * strides.head;
  return reinterpret_cast<const Chunk<T>*>(static_cast<const T*>(base) + offset);
}

// dots[b, h, i, j] = q_i . k_j, for the keys that some row may see. One thread a dot product.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    dot_products(const __grid_constant__ AttentionParams p, float* dots) {
  using T = Element<kType>;
  int64_t tile = blockIdx.x;  // of [batch, head, row tile, key tile]
  int32_t key_tiles = ceil_div(p.seqlen_kv, kKeysPerBlock);
  int32_t row_tiles = ceil_div(p.seqlen_q, kRowsPerBlock);
  auto key_tile = static_cast<int32_t>(tile % key_tiles);
  auto row_tile = static_cast<int32_t>(tile / key_tiles % row_tiles);
  auto head = static_cast<int32_t>(tile / key_tiles / row_tiles % p.num_heads_q);
  auto b = static_cast<int32_t>(tile / key_tiles / row_tiles / p.num_heads_q);
  int32_t key = key_tile * kKeysPerBlock + threadIdx.x % kKeysPerBlock;
  int32_t row = row_tile * kRowsPerBlock + threadIdx.x / kKeysPerBlock;
  Span queries = query_span(p, b), keys = key_span(p, b);
  if (row >= queries.used || key >= keys.used) return;

  int32_t head_kv = head / (p.num_heads_q / p.num_heads_kv);
  const Chunk<T>* q = row_of<T>(p.q, p.q_strides, b, queries.start + row, head);
  const Chunk<T>* k = row_of<T>(p.k, p.k_strides, b, keys.start + key, head_kv);
  float dot = 0.0f;
  for (int32_t c = 0; c < p.head_dim / Chunk<T>::kSize; ++c) {
    Chunk<T> a = q[c], d = k[c];
    for (int i = 0; i < Chunk<T>::kSize; ++i) dot = fmaf(to_float(a.x[i]), to_float(d.x[i]), dot);
  }
  dots[((int64_t{b} * p.num_heads_q + head) * p.seqlen_q + row) * p.seqlen_kv + key] = dot;
}

// out[b, i, h, :] = sum_j probs[b, h, i, j] v_j. One thread per 16 bytes of the output row.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    weighted_sums(const __grid_constant__ AttentionParams p, const float* probs) {
  using T = Element<kType>;
  int32_t chunks = p.head_dim_v / Chunk<T>::kSize;
  int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;  // of [batch, head, row, chunk]
  if (at >= int64_t{p.batch} * p.num_heads_q * p.seqlen_q * chunks) return;
  int32_t chunk = static_cast<int32_t>(at % chunks);
  at /= chunks;
  int32_t row = static_cast<int32_t>(at % p.seqlen_q);
  int32_t head = static_cast<int32_t>(at / p.seqlen_q % p.num_heads_q);
  int32_t b = static_cast<int32_t>(at / p.seqlen_q / p.num_heads_q);
  Span queries = query_span(p, b), keys = key_span(p, b);
  if (row >= queries.stored) return;

  KeyRange seen{0, 0};  // rows that are stored but not used see nothing: they become zeros
  if (row < queries.used) {
    seen = p.mask.visible(row, queries.used, keys.used);
  }
  int32_t head_kv = head / (p.num_heads_q / p.num_heads_kv);
  const float* prob = probs + at * p.seqlen_kv;
  float sum[Chunk<T>::kSize] = {};
  for (int32_t begin = seen.begin; begin < seen.end; begin += kKeysPerSum) {
    float part[Chunk<T>::kSize] = {};
    for (int32_t key = begin; key < min(begin + kKeysPerSum, seen.end); ++key) {
      float weight = prob[key];
      if (weight == 0.0f) continue;  // hidden by the bias: the value may be anything, even NaN
      Chunk<T> v = row_of<T>(p.v, p.v_strides, b, keys.start + key, head_kv)[chunk];
      for (int i = 0; i < Chunk<T>::kSize; ++i) part[i] = fmaf(weight, to_float(v.x[i]), part[i]);
    }
    for (int i = 0; i < Chunk<T>::kSize; ++i) sum[i] += part[i];
  }
  Chunk<T> result;
  for (int i = 0; i < Chunk<T>::kSize; ++i) result.x[i] = from_float<T>(sum[i]);
  int64_t offset = b * p.out_strides.batch + (queries.start + row) * p.out_strides.seq +
                   head * p.out_strides.head;
  reinterpret_cast<Chunk<T>*>(static_cast<T*>(p.out) + offset)[chunk] = result;
}

template <DType kType>
void launch_three(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  float* scores = static_cast<float*>(workspace);  // [batch, num_heads_q, seqlen_q, seqlen_kv]
  int64_t rows = int64_t{p.batch} * p.num_heads_q * p.seqlen_q;
  int64_t tiles = int64_t{p.batch} * p.num_heads_q * ceil_div(p.seqlen_q, kRowsPerBlock) *
                  ceil_div(p.seqlen_kv, kKeysPerBlock);
  if (tiles > 0) {  // seqlen_kv = 0: no score to compute, every row is empty
    dot_products<kType><<<grid_blocks(tiles, "naive"), kThreads, 0, stream>>>(p, scores);
    CUATTN_CUDA_TRY(cudaGetLastError());
  }
  launch_softmax_rows<kType>(p, scores, scores, stream);
  int64_t chunks = rows * (p.head_dim_v / Chunk<Element<kType>>::kSize);
  weighted_sums<kType>
      <<<grid_blocks(ceil_div<int64_t>(chunks, kThreads), "naive"), kThreads, 0, stream>>>(p,
                                                                                           scores);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace

void launch_naive(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  if (int64_t{p.batch} * p.num_heads_q * p.seqlen_q == 0) return;
  switch (p.dtype) {
    case DType::f32: return launch_three<DType::f32>(p, workspace, stream);
    case DType::f16: return launch_three<DType::f16>(p, workspace, stream);
    case DType::bf16: return launch_three<DType::bf16>(p, workspace, stream);
    default: CUATTN_ASSERT(false, "naive: dtype ", static_cast<int>(p.dtype));
  }
}

}  // namespace cuattn
