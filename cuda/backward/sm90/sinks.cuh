// SPDX-License-Identifier: Apache-2.0
// dsink = - sum of exp(sink - lse) Delta over the rows of a head, from the states of the rows. No
// atomics: a block sums a sequence and head, another the sequences of a head, both in an order that
// shapes alone decide. Runs behind the passes of backward.cuh.
#pragma once

#include "cuda/backward/sm90/tiles.cuh"

namespace cuattn::backward {

constexpr int kSinkThreads = 256;

// The sum over all threads of a block, in a fixed order; the first thread has it.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float of_warps[kSinkThreads / 32];
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.0f;
#pragma unroll
  for (float of_warp : of_warps) x += of_warp;
  return x;
}

// terms: [num_heads_q, batch]
static __global__ void __launch_bounds__(kSinkThreads)
    sink_terms_sm90_kernel(const __grid_constant__ BackwardParams p,
                           const __grid_constant__ RowStates states, float* terms) {
  const AttentionParams& f = p.forward;
  const int32_t b = blockIdx.x / f.num_heads_q, head = blockIdx.x % f.num_heads_q;
  const Span queries = query_span(f, b);
  const float sink = finite_sink(f.scores.sinks[head * f.scores.sinks_stride]);
  const Strides& s = f.lse_strides;
  const float* lse = f.lse + b * s.batch + head * s.head + queries.start * s.seq;
  const float* delta = states.delta + states.place(f, queries, b, head);
  float sum = 0.0f;
#pragma unroll 4
  for (int32_t row = threadIdx.x; row < queries.used; row += kSinkThreads) {
    const float of_row = lse[row * s.seq];
    const bool dead = of_row == device::negative_infinity();
    const float prob = dead ? 0.0f : device::exp2_approx((sink - of_row) * device::kLog2e);
    sum = fmaf(prob, delta[row], sum);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) terms[int64_t{head} * f.batch + b] = sum * f.dropout.factor();
}

static __global__ void __launch_bounds__(kSinkThreads)
    sum_sinks_sm90_kernel(const float* terms, int32_t batch, float* dsinks, int64_t stride) {
  terms += int64_t{blockIdx.x} * batch;
  float sum = 0.0f;
#pragma unroll 4
  for (int32_t b = threadIdx.x; b < batch; b += kSinkThreads) sum += terms[b];
  sum = block_sum(sum);
  if (threadIdx.x == 0) dsinks[blockIdx.x * stride] = -sum;
}

// `terms`: memory for a float for each head and sequence.
inline void launch_sinks_sm90(const BackwardParams& p, const RowStates& states, float* terms,
                              cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  if (!p.needs(kNeedDsinks) || f.num_heads_q == 0) return;
  if (unsigned blocks = grid_blocks(int64_t{f.batch} * f.num_heads_q, "sm90"); blocks > 0) {
    sink_terms_sm90_kernel<<<blocks, kSinkThreads, 0, stream>>>(p, states, terms);
    CUATTN_CUDA_TRY(cudaGetLastError());
  }
  sum_sinks_sm90_kernel<<<grid_blocks(f.num_heads_q, "sm90"), kSinkThreads, 0, stream>>>(
      terms, f.batch, p.dsinks, p.dsinks_stride);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn::backward
