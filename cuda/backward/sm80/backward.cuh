// SPDX-License-Identifier: Apache-2.0
// The launcher of the sm80 backward kernels: the queries pass (Delta, dQ), the keys pass (dK, dV),
// where it is asked for a pass for dbias, the sums of other options, and zeros for the rows of
// ragged arrays that belong to no sequence. Seven products of tiles for the five of the formula (and
// two for dbias), and in return no atomics and no sums in memory. Next: queries.cuh, keys.cuh,
// bias.cuh.
#pragma once

#include "cuattn/schedule.h"
#include "cuda/backward/clear.cuh"
#include "cuda/backward/sm80/bias.cuh"
#include "cuda/backward/sm80/keys.cuh"
#include "cuda/backward/sm80/queries.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {

template <class Pass>
void launch_queries_sm80(const BackwardParams& p, const backward::Memory& memory,
                         cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  int32_t tiles = device::ceil_div(f.seqlen_q, Pass::kTile.m);
  unsigned blocks = grid_blocks(int64_t{f.batch} * f.num_heads_q * tiles, "sm80");
  if (blocks == 0) return;
  auto* kernel = backward::queries_sm80_kernel<Pass>;
  static uint64_t allowed = 0;
  allow_shared_memory(kernel, Pass::kSmemBytes, allowed);
  kernel<<<blocks, backward::kThreads, Pass::kSmemBytes, stream>>>(p, memory, tiles);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <class Pass>
void launch_keys_sm80(const BackwardParams& p, const backward::RowState* rows,
                      cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  int32_t tiles = device::ceil_div(f.seqlen_kv, Pass::kTile.n);
  int32_t results = Pass::kMakesOne && p.dk != nullptr && p.dv != nullptr ? 2 : 1;
  unsigned blocks = grid_blocks(int64_t{f.batch} * f.num_heads_kv * tiles * results, "sm80");
  if (blocks == 0 || (p.dk == nullptr && p.dv == nullptr)) return;
  auto* kernel = backward::keys_sm80_kernel<Pass>;
  static uint64_t allowed = 0;
  allow_shared_memory(kernel, Pass::kSmemBytes, allowed);
  kernel<<<blocks, backward::kThreads, Pass::kSmemBytes, stream>>>(p, rows, tiles, results);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <class Pass>
void launch_bias_sm80(const BackwardParams& p, const backward::Memory& memory,
                      cudaStream_t stream) {
  unsigned blocks = grid_blocks(backward::bias_blocks(p, Pass::kTile), "sm80");
  if (blocks == 0 || !p.needs(kNeedDbias)) return;
  auto* kernel = backward::bias_sm80_kernel<Pass>;
  static uint64_t allowed = 0;
  allow_shared_memory(kernel, Pass::kSmemBytes, allowed);
  kernel<<<blocks, backward::kThreads, Pass::kSmemBytes, stream>>>(p, memory, bias_parts(p));
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreKind kScore>
void launch_backward_sm80(const BackwardLaunch& launch, cudaStream_t stream) {
  const BackwardParams& p = launch.params;
  const AttentionParams& f = p.forward;
  const backward::Memory memory(p, launch.schedule.workspace);
  using Policy = device::OptionPolicy<kType, kMask, kScore>;
  launch_queries_sm80<backward::QueriesPass<kType, kHeadDim, kHeadDimV, Policy>>(p, memory, stream);
  launch_keys_sm80<backward::KeysPass<kType, kHeadDim, kHeadDimV, Policy>>(p, memory.rows, stream);
  if constexpr (kScore == ScoreKind::scored)
    launch_bias_sm80<backward::BiasPass<kType, kHeadDim, kHeadDimV, Policy>>(p, memory, stream);
  launch_option_sums(p, launch.schedule.workspace, stream);
  launch_clear(f.cu_seqlens_q, f.batch, f.total_q, f.num_heads_q,
               {p.dq, p.dq_strides, f.dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dk, p.dk_strides, p.dk_dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dv, p.dv_strides, p.dv_dtype, f.head_dim_v}, stream);
}

}  // namespace cuattn
