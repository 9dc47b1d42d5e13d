// SPDX-License-Identifier: Apache-2.0
// The middle step of the naive backward pass: each row of products becomes P Z, ds and dx; and the
// gradients that are sums of ds: dbias, dsinks, dslopes. Used by naive.cu.
#pragma once

#include "cuattn/device/mask.cuh"
#include "cuattn/params/backward.h"
#include "cuda/attention/products.cuh"
#include "cuda/attention/softmax_rows.cuh"

namespace cuattn {

// Of the workspace (PlanesLayout). What is multiplied by 0 is not read: rows that nobody sees may
// hold NaN.
struct RowArrays {
  float* weights;  // q k before, P Z after
  float* ds;       // dout v before, ds after
  float* dx;       // may be ds: then dx is left there
  float *sink_terms, *slope_terms;
};

constexpr int kSumThreads = 256;
// Blocks of a multiprocessor: asked for more, ptxas spills.
constexpr int kResident = 2;

__device__ __forceinline__ double sum_of_warp(double x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// Of a row: dout . out - dlse. All lanes return it.
template <DType kType>
__device__ double delta_of(const BackwardParams& p, int32_t b, int64_t stored_row, int32_t head) {
  using namespace products;
  using T = Element<kType>;
  const AttentionParams& f = p.forward;
  const T* dout = row_of<T>({p.dout, p.dout_strides, f.head_dim_v}, b, stored_row, head);
  const T* out = row_of<T>({f.out, f.out_strides, f.head_dim_v}, b, stored_row, head);
  double delta = 0.0;
  for (int32_t d = threadIdx.x % 32; d < f.head_dim_v; d += 32)
    delta += double{to_float(dout[d])} * to_float(out[d]);
  delta = sum_of_warp(delta);
  if (p.dlse == nullptr) return delta;
  return delta - p.dlse[b * p.dlse_strides.batch + stored_row * p.dlse_strides.seq +
                        head * p.dlse_strides.head];
}

// P of a score in natural units. The clamp is for a score and an lse so large that they are
// rounded apart; NaN stays NaN.
__device__ __forceinline__ float probability(float score, float lse) {
  float exponent = score - lse;
  return expf(exponent > 0.0f ? 0.0f : exponent);
}

// One warp a row of [batch, head, row].
template <DType kType>
__global__ void __launch_bounds__(kSoftmaxRowsPerBlock * 32, kResident)
    row_gradients(const __grid_constant__ BackwardParams p, const __grid_constant__ RowArrays to) {
  using namespace device;
  const AttentionParams& f = p.forward;
  int32_t lane = threadIdx.x % 32;
  const auto [b, head, row] = row_of_warp(f);
  if (row >= f.seqlen_q) return;
  int64_t at = (int64_t{b} * f.num_heads_q + head) * f.seqlen_q + row;
  Span queries = query_span(f, b), keys = key_span(f, b);

  float lse = negative_infinity();  // as of a row that sees nothing
  double delta = 0.0;
  if (row < queries.used) {
    int64_t stored_row = queries.start + row;
    lse =
        f.lse[b * f.lse_strides.batch + stored_row * f.lse_strides.seq + head * f.lse_strides.head];
    if (lse != negative_infinity()) delta = delta_of<kType>(p, b, stored_row, head);
  }
  bool dead = lse == negative_infinity();
  KeyRange seen{0, 0};
  if (!dead) {
    seen = f.mask.visible(row, queries.used, keys.used);
    seen = f.rows.limit(seen, b, head, queries.start + row);
  }
  ScoreMod<kType, ScoreKind::scored> score(f, b, head, queries.used, keys.used);
  const DropoutParams dropout = f.dropout.resolved();
  const uint32_t index = dropout.head(b, head);

  float *weights = to.weights + at * f.seqlen_kv, *ds_row = to.ds + at * f.seqlen_kv;
  float *dx_row = to.dx + at * f.seqlen_kv, slope_term = 0.0f;
  int32_t written = row < queries.used ? keys.used : 0;  // nobody reads the rest
  for (int32_t key = lane; key < written; key += 32) {
    float weight = 0.0f, ds = 0.0f, dx = 0.0f;
    float dot = 0.0f, prob = 0.0f;
    if (key >= seen.begin && key < seen.end) {
      dot = weights[key];
      prob = probability(score(dot, row, key), lse);
    }
    if (prob != 0.0f) {  // else what v holds does not matter
      float factor = kept_factor(dropout, index, row, key);
      weight = prob * factor;
      ds = prob * (factor * ds_row[key] - static_cast<float>(delta));
      dx = ds * score.derivative(dot);
      slope_term -= ds * score.distance(row, key);
    }
    weights[key] = weight;
    ds_row[key] = ds;
    dx_row[key] = dx;
  }
  slope_term = warp_sum(slope_term);
  if (lane > 0) return;
  if (p.needs(kNeedDslopes)) to.slope_terms[at] = slope_term;
  if (p.needs(kNeedDsinks)) {
    float sink = finite_sink(f.scores.sinks[head * f.scores.sinks_stride]);
    to.sink_terms[at] = dead ? 0.0f : static_cast<float>(-exp(double{sink} - lse) * delta);
  }
}

// The part of an axis that goes into the element `index` of a gradient: all of it where the
// gradient's extent is 1.
struct Summed {
  int32_t begin, end;
};

__device__ __forceinline__ Summed summed(int64_t extent, int32_t index, int32_t all) {
  if (extent == 1) return {0, all};
  return {index, index + 1};
}

// dbias: over what the bias is broadcast, ds is summed. A thread has an element, or a warp where
// the keys are summed.
template <DType kType>
__global__ void __launch_bounds__(kSumThreads)
    bias_gradient(const __grid_constant__ BackwardParams p, const float* ds) {
  using namespace device;
  const AttentionParams& f = p.forward;
  const BiasGradient& bias = p.dbias;
  const bool sums_keys = bias.extents[3] == 1;
  const auto [b, head, row, thread_key] = products::pair_of_thread(
      static_cast<int32_t>(bias.extents[1]), static_cast<int32_t>(bias.extents[2]),
      static_cast<int32_t>(bias.extents[3]));
  const int32_t key = sums_keys ? 0 : thread_key;
  if (row >= bias.extents[2] || key >= bias.extents[3]) return;
  const int32_t lane = sums_keys ? threadIdx.x % 32 : 0, lanes = sums_keys ? 32 : 1;
  Summed batches = summed(bias.extents[0], b, f.batch);
  Summed heads = summed(bias.extents[1], head, f.num_heads_q);
  Summed rows = summed(bias.extents[2], row, f.seqlen_q);
  Summed keys = summed(bias.extents[3], key, f.seqlen_kv);
  double sum = 0.0;
  for (int32_t from_b = batches.begin; from_b < batches.end; ++from_b) {
    int32_t rows_end = min(rows.end, query_span(f, from_b).used);
    const int32_t column = first_key(f, from_b);  // of ds's first key
    const int32_t keys_begin = max(keys.begin - column, 0);
    const int32_t keys_end = min(keys.end - column, key_span(f, from_b).used);
    for (int32_t from_head = heads.begin; from_head < heads.end; ++from_head) {
      int64_t first_row = (int64_t{from_b} * f.num_heads_q + from_head) * f.seqlen_q;
      for (int32_t from = rows.begin; from < rows_end; ++from) {
        const float* ds_row = ds + (first_row + from) * f.seqlen_kv;
        for (int32_t j = keys_begin + lane; j < keys_end; j += lanes) sum += ds_row[j];
      }
    }
  }
  if (sums_keys) sum = sum_of_warp(sum);
  int64_t to =
      b * bias.strides[0] + head * bias.strides[1] + row * bias.strides[2] + key * bias.strides[3];
  float value = static_cast<float>(sum);
  if (f.scores.bias_dtype == DType::f32) {
    static_cast<float*>(bias.data)[to] = value;
  } else {
    static_cast<Element<kType>*>(bias.data)[to] = from_float<Element<kType>>(value);
  }
}

// A result with one number for each query head, or for each head of each sequence.
struct HeadResult {
  float* data;
  int64_t stride_batch, stride_head;
  bool per_batch;
};

// Sums terms[batch, head, row] over the rows, and over the batch unless per_batch. One block a sum.
static __global__ void __launch_bounds__(kSumThreads)
    head_sums(const float* terms, int32_t batch, int32_t heads, int32_t rows,
              const __grid_constant__ HeadResult result) {
  __shared__ double sums[kSumThreads];
  int64_t head = blockIdx.x % static_cast<unsigned>(heads);
  int64_t first = result.per_batch ? blockIdx.x / static_cast<unsigned>(heads) : 0;
  int64_t count = (result.per_batch ? 1 : int64_t{batch}) * rows;
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) {
    int64_t b = first + i / rows;
    sum += terms[(b * heads + head) * rows + i % rows];
  }
  sums[threadIdx.x] = sum;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) {
    result.data[first * result.stride_batch + head * result.stride_head] =
        static_cast<float>(sums[0]);
  }
}

inline void launch_head_sums(const AttentionParams& f, const float* terms, const HeadResult& result,
                             cudaStream_t stream) {
  int64_t sums = (result.per_batch ? int64_t{f.batch} : 1) * f.num_heads_q;
  if (sums == 0) return;
  head_sums<<<grid_blocks(sums, "naive"), kSumThreads, 0, stream>>>(terms, f.batch, f.num_heads_q,
                                                                    f.seqlen_q, result);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <DType kType>
void launch_row_gradients(const BackwardParams& p, const RowArrays& arrays, cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  row_gradients<kType><<<softmax_blocks(f), kSoftmaxRowsPerBlock * 32, 0, stream>>>(p, arrays);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

// dbias, dsinks and dslopes, as far as they are needed.
template <DType kType>
void launch_option_gradients(const BackwardParams& p, const RowArrays& arrays,
                             cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  const int64_t* extents = p.dbias.extents;
  int64_t blocks = products::pair_blocks(extents[0], extents[1], extents[2], extents[3]);
  if (p.needs(kNeedDbias) && blocks > 0) {
    bias_gradient<kType><<<grid_blocks(blocks, "naive"), kSumThreads, 0, stream>>>(p, arrays.ds);
    CUATTN_CUDA_TRY(cudaGetLastError());
  }
  if (p.needs(kNeedDsinks))
    launch_head_sums(f, arrays.sink_terms, {p.dsinks, 0, p.dsinks_stride, false}, stream);
  if (p.needs(kNeedDslopes)) {
    launch_head_sums(
        f, arrays.slope_terms,
        {p.dslopes, p.dslopes_stride_batch, p.dslopes_stride_head, p.dslopes_per_batch}, stream);
  }
}

}  // namespace cuattn
