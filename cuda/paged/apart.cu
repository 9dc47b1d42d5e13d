// SPDX-License-Identifier: Apache-2.0
// The lengths by which attention_varlen hands sequences to a decode kernel (params/paged.h).
// DecodesApart parts a packed batch: sequences with one query for that kernel, the others for a
// kernel of attention; one block, for the lengths are few. KeyLengths: the whole batch, over packed
// rows. Next: src/attention/call.cpp (who runs the kernels).
#include "cuattn/params/paged.h"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

// The first sequence with one query among those of this thread and the threads behind it. `ones`:
// of each warp, a bit for each such lane. -1: there is none.
__device__ int32_t first_from_here(const uint32_t (&ones)[kWarps]) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t found = ones[warp] >> lane << lane;
  while (found == 0 && ++warp < kWarps) found = ones[warp];
  return found == 0 ? -1 : warp * 32 + __ffs(found) - 1;
}

// A sequence with more queries, or none, begins for the decode kernel where the next one with one
// query begins, and so ends where it begins. From the last sequences to the first.
__global__ void __launch_bounds__(kThreads) set_decodes_apart(const DecodesApart p) {
  __shared__ uint32_t ones[kWarps];
  __shared__ int32_t next_start;
  if (threadIdx.x == 0) p.decode_starts[p.num_seqs] = next_start = p.cu_seqlens_q[p.num_seqs];
  for (int32_t base = (p.num_seqs - 1) / kThreads * kThreads; base >= 0; base -= kThreads) {
    int32_t b = base + static_cast<int32_t>(threadIdx.x);
    bool exists = b < p.num_seqs;
    int32_t queries = exists ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : 0;
    uint32_t of_warp = __ballot_sync(0xffffffffu, queries == 1);
    if (threadIdx.x % 32 == 0) ones[threadIdx.x / 32] = of_warp;
    __syncthreads();
    int32_t first = first_from_here(ones);
    int32_t start = first < 0 ? next_start : p.cu_seqlens_q[base + first];
    if (exists) {
      int32_t keys = p.lens[b];
      p.decode_starts[b] = start;
      p.decode_lens[b] = queries == 1 ? keys : 0;
      p.other_queries[b] = queries == 1 ? 0 : queries;
      p.other_lens[b] = queries == 1 ? 0 : keys;
    }
    __syncthreads();
    if (threadIdx.x == 0) next_start = start;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) set_key_lengths(const KeyLengths p) {
  int32_t b = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (b < p.num_seqs) p.lens[b] = make_span(p.cu_seqlens, p.seqused, b, p.max_seqlen, p.total).used;
}

}  // namespace

void launch_key_lengths(const KeyLengths& params, cudaStream_t stream) {
  if (params.num_seqs == 0) return;
  set_key_lengths<<<(params.num_seqs - 1) / kThreads + 1, kThreads, 0, stream>>>(params);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

void launch_decodes_apart(const DecodesApart& params, cudaStream_t stream) {
  if (params.num_seqs == 0) return;
  set_decodes_apart<<<1, kThreads, 0, stream>>>(params);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
