// SPDX-License-Identifier: Apache-2.0
// The gradients that are sums of what the passes of CUDA left: dsinks of the states of the rows (of
// sm80 and simt), dslopes of their terms, dbias of its parts. Every sum has one block or
// thread and a fixed order. Before: sm80/backward.cuh.
#include "cuda/backward/bias_tiles.cuh"
#include "cuda/backward/weigh.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using backward::Memory;
using backward::RowState;

constexpr int kSumThreads = 512;

// Over the block, in thread 0.
__device__ double sum_of_block(double x) {
  __shared__ double sums[kSumThreads];
  sums[threadIdx.x] = x;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}

// The rows of a head that the workspace has: of one sequence, or of all, which lie together.
struct Rows {
  int64_t begin, end;
};

__device__ Rows rows_of(const AttentionParams& f, int32_t head, int32_t batch) {
  int64_t first = head * f.total_q;
  if (f.cu_seqlens_q == nullptr) {
    first += int64_t{batch} * f.seqlen_q;
    return {first, first + f.seqlen_q};
  }
  Span span = query_span(f, batch);
  return {first + span.start, first + span.start + span.stored};
}

__global__ void __launch_bounds__(kSumThreads)
    sum_sinks(const __grid_constant__ BackwardParams p, const RowState* states) {
  const AttentionParams& f = p.forward;
  int32_t head = blockIdx.x;
  float sink = finite_sink(f.scores.sinks[head * f.scores.sinks_stride]);
  double sum = 0.0;
  if (f.batch > 0) {
    int64_t end = rows_of(f, head, f.batch - 1).end;
    for (int64_t at = rows_of(f, head, 0).begin + threadIdx.x; at < end; at += kSumThreads) {
      RowState state = states[at];
      // A row that takes no part has lse +inf: 0.
      if (state.delta != 0.0f) sum -= exp(double{sink} - state.lse) * state.delta;
    }
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) p.dsinks[head * p.dsinks_stride] = static_cast<float>(sum);
}

__global__ void __launch_bounds__(kSumThreads)
    sum_slopes(const __grid_constant__ BackwardParams p, const float* terms) {
  const AttentionParams& f = p.forward;
  int32_t head = blockIdx.x % static_cast<unsigned>(f.num_heads_q);
  int32_t batch = blockIdx.x / static_cast<unsigned>(f.num_heads_q);
  int32_t last = p.dslopes_per_batch ? batch : f.batch - 1;
  double sum = 0.0;
  if (last >= 0) {
    int64_t end = rows_of(f, head, last).end;
    for (int64_t at = rows_of(f, head, batch).begin + threadIdx.x; at < end; at += kSumThreads)
      sum += terms[at];
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) {
    p.dslopes[batch * p.dslopes_stride_batch + head * p.dslopes_stride_head] =
        static_cast<float>(sum);
  }
}

// A thread has an element of dbias.
__global__ void __launch_bounds__(kSumThreads)
    sum_bias_parts(const __grid_constant__ BackwardParams p, const float* sums, int32_t parts) {
  const BiasGradient& bias = p.dbias;
  int64_t count = bias.extents[0] * bias.extents[1] * bias.extents[2] * bias.extents[3];
  int64_t index = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  if (index >= count) return;
  float sum = 0.0f;
  for (int32_t part = 0; part < parts; ++part) sum += sums[part * count + index];
  int64_t to = 0;
  for (int axis = 3; axis >= 0; --axis) {
    to += index % bias.extents[axis] * bias.strides[axis];
    index /= bias.extents[axis];
  }
  backward::store_dbias(p, to, sum);
}

}  // namespace

void launch_bias_sums(const BackwardParams& p, const float* sums, int32_t parts,
                      cudaStream_t stream) {
  const int64_t* extents = p.dbias.extents;
  int64_t elements = extents[0] * extents[1] * extents[2] * extents[3];
  if (elements == 0) return;
  int64_t blocks = (elements + kSumThreads - 1) / kSumThreads;
  sum_bias_parts<<<grid_blocks(blocks, "dbias"), kSumThreads, 0, stream>>>(p, sums, parts);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

void launch_slope_sums(const BackwardParams& p, const float* terms, cudaStream_t stream) {
  int64_t slopes = (p.dslopes_per_batch ? int64_t{p.forward.batch} : 1) * p.forward.num_heads_q;
  if (slopes == 0) return;
  sum_slopes<<<grid_blocks(slopes, "dslopes"), kSumThreads, 0, stream>>>(p, terms);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

void launch_option_sums(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  const Memory memory(p, workspace);
  if (p.needs(kNeedDsinks) && f.num_heads_q > 0) {
    sum_sinks<<<grid_blocks(f.num_heads_q, "dsinks"), kSumThreads, 0, stream>>>(p, memory.rows);
    CUATTN_CUDA_TRY(cudaGetLastError());
  }
  if (p.needs(kNeedDslopes)) launch_slope_sums(p, memory.slope_terms, stream);
  int32_t parts = bias_parts(p);
  if (p.needs(kNeedDbias) && parts > 1) launch_bias_sums(p, memory.bias_parts, parts, stream);
}

}  // namespace cuattn
