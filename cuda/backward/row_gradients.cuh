// SPDX-License-Identifier: Apache-2.0
// The middle step of the naive backward pass: each row of products becomes P Z, ds and dx; and the
// gradients that are sums of ds: dbias, dsinks, dslopes. Used by naive.cu.
#pragma once

#include "cuattn/device/mask.cuh"
#include "cuattn/params/backward.h"
#include "cuda/attention/products.cuh"

namespace cuattn {

// Of the workspace (PlanesLayout). What is multiplied by 0 is not read: rows that nobody sees may
// hold NaN.
struct RowArrays {
  float* weights;  // q k before, P Z after
  float* ds;       // dout v before, ds after
  float* dx;       // may be ds: then dx is left there
  float *sink_terms, *slope_terms;
};

constexpr int kGradientRowsPerBlock = 4;  // one warp each
constexpr int kSumThreads = 256;

// Of a row: dout . out - dlse. All lanes return it.
template <DType kType>
__device__ float delta_of(const BackwardParams& p, int32_t b, int64_t stored_row, int32_t head) {
  using namespace products;
  using T = Element<kType>;
  const AttentionParams& f = p.forward;
  const T* dout = row_of<T>({p.dout, p.dout_strides, f.head_dim_v}, b, stored_row, head);
  const T* out = row_of<T>({f.out, f.out_strides, f.head_dim_v}, b, stored_row, head);
  float delta = 0.0f;
  for (int32_t d = threadIdx.x % 32; d < f.head_dim_v; d += 32)
    delta = fmaf(to_float(dout[d]), to_float(out[d]), delta);
  delta = warp_sum(delta);
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
__global__ void __launch_bounds__(kGradientRowsPerBlock * 32)
    row_gradients(const __grid_constant__ BackwardParams p, const __grid_constant__ RowArrays to) {
  using namespace device;
  const AttentionParams& f = p.forward;
  int32_t lane = threadIdx.x % 32;
  int64_t at = int64_t{blockIdx.x} * kGradientRowsPerBlock + threadIdx.x / 32;
  if (at >= int64_t{f.batch} * f.num_heads_q * f.seqlen_q) return;
  int32_t row = static_cast<int32_t>(at % f.seqlen_q);
  int32_t head = static_cast<int32_t>(at / f.seqlen_q % f.num_heads_q);
  int32_t b = static_cast<int32_t>(at / f.seqlen_q / f.num_heads_q);
  Span queries = query_span(f, b), keys = key_span(f, b);

  float lse = negative_infinity(), delta = 0.0f;  // as of a row that sees nothing
  if (row < queries.used) {
    int64_t stored_row = queries.start + row;
    lse = f.lse[b * f.lse_strides.batch + stored_row * f.lse_strides.seq +
                head * f.lse_strides.head];
    if (lse != negative_infinity()) delta = delta_of<kType>(p, b, stored_row, head);
  }
  bool dead = lse == negative_infinity();
  KeyRange seen{0, 0};
  if (!dead) seen = f.mask.visible(row, queries.used, keys.used);
  ScoreMod<kType, ScoreKind::scored> score(f, b, head, queries.used, keys.used);
  const DropoutParams dropout = f.dropout.resolved();
  uint32_t index = static_cast<uint32_t>(int64_t{b} * f.num_heads_q + head);

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
      ds = prob * (factor * ds_row[key] - delta);
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
    to.sink_terms[at] = dead ? 0.0f : -expf(sink - lse) * delta;
  }
}

// dbias: over what the bias is broadcast, ds is summed. A thread has an element, or a warp where
// all the keys are summed.
template <DType kType>
__global__ void __launch_bounds__(kSumThreads)
    bias_gradient(const __grid_constant__ BackwardParams p, const float* ds, int32_t lanes) {
  using namespace device;
  const AttentionParams& f = p.forward;
  const BiasGradient& bias = p.dbias;
  int64_t at = (int64_t{blockIdx.x} * kSumThreads + threadIdx.x) / lanes, extents[4], index[4];
  for (int axis = 0; axis < 4; ++axis) extents[axis] = bias.extents[axis];
  if (at >= extents[0] * extents[1] * extents[2] * extents[3]) return;
  int64_t rest = at, to = 0;
  for (int axis = 3; axis >= 0; --axis) {
    index[axis] = rest % extents[axis];
    rest /= extents[axis];
    to += index[axis] * bias.strides[axis];
  }
  const int32_t all[4] = {f.batch, f.num_heads_q, f.seqlen_q, f.seqlen_kv};
  int32_t begin[4], end[4];
  for (int axis = 0; axis < 4; ++axis) {
    bool sums = extents[axis] == 1;
    begin[axis] = sums ? 0 : static_cast<int32_t>(index[axis]);
    end[axis] = sums ? all[axis] : begin[axis] + 1;
  }
  double sum = 0.0;
  for (int32_t b = begin[0]; b < end[0]; ++b) {
    int32_t rows = min(end[2], query_span(f, b).used), keys = min(end[3], key_span(f, b).used);
    for (int32_t head = begin[1]; head < end[1]; ++head) {
      const float* plane = ds + (int64_t{b} * f.num_heads_q + head) * f.seqlen_q * f.seqlen_kv;
      for (int32_t row = begin[2]; row < rows; ++row) {
        for (int32_t key = begin[3] + threadIdx.x % lanes; key < keys; key += lanes)
          sum += plane[int64_t{row} * f.seqlen_kv + key];
      }
    }
  }
  for (int32_t other = lanes / 2; other > 0; other /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, other);
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

inline void launch_head_sums(const AttentionParams& f, const float* terms,
                             const HeadResult& result, cudaStream_t stream) {
  int64_t sums = (result.per_batch ? int64_t{f.batch} : 1) * f.num_heads_q;
  if (sums == 0) return;
  head_sums<<<grid_blocks(sums, "naive"), kSumThreads, 0, stream>>>(terms, f.batch, f.num_heads_q,
                                                                    f.seqlen_q, result);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <DType kType>
void launch_row_gradients(const BackwardParams& p, const RowArrays& arrays, cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  int64_t rows = int64_t{f.batch} * f.num_heads_q * f.seqlen_q;
  unsigned blocks =
      grid_blocks(device::ceil_div<int64_t>(rows, kGradientRowsPerBlock), "naive");
  row_gradients<kType><<<blocks, kGradientRowsPerBlock * 32, 0, stream>>>(p, arrays);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

// dbias, dsinks and dslopes, as far as they are needed.
template <DType kType>
void launch_option_gradients(const BackwardParams& p, const RowArrays& arrays,
                             cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  const int64_t* extents = p.dbias.extents;
  int64_t elements = extents[0] * extents[1] * extents[2] * extents[3];
  if (p.needs(kNeedDbias) && elements > 0) {
    int32_t lanes = extents[3] == 1 && f.seqlen_kv > 1 ? 32 : 1;
    bias_gradient<kType><<<products::blocks_for(elements * lanes), kSumThreads, 0, stream>>>(
        p, arrays.ds, lanes);
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
