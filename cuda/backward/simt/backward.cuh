// SPDX-License-Identifier: Apache-2.0
// The launcher of the float32 backward kernels: the states of the rows, then the passes of
// passes.cuh, then the sums that sm80 has, too. Seven products of tiles for the five of the formula,
// and two for dbias; no atomics, the same bits in every run. Before: simt/passes.cuh.
#pragma once

#include "cuattn/schedule.h"
#include "cuda/backward/clear.cuh"
#include "cuda/backward/simt/passes.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace backward {

constexpr int kStateThreads = 256;

// lse and Delta of the rows, stored ones past the used ones too. A warp has a row.
static __global__ void __launch_bounds__(kStateThreads)
    find_row_states(const __grid_constant__ BackwardParams p, RowState* states) {
  const AttentionParams& f = p.forward;
  int64_t index = (int64_t{blockIdx.x} * kStateThreads + threadIdx.x) / 32;
  int32_t row = index % f.seqlen_q, head = index / f.seqlen_q % f.num_heads_q;
  int32_t batch = index / f.seqlen_q / f.num_heads_q;
  if (batch >= f.batch) return;
  Span queries = query_span(f, batch);
  if (row >= queries.stored) return;
  int64_t stored = queries.start + row;
  RowState state{positive_infinity(), 0.0f};
  float lse = device::negative_infinity();
  if (row < queries.used) {
    lse =
        f.lse[batch * f.lse_strides.batch + head * f.lse_strides.head + stored * f.lse_strides.seq];
  }
  if (lse != device::negative_infinity()) {
    auto at = [&](const void* data, const Strides& s) {
      return static_cast<const float*>(data) + batch * s.batch + head * s.head + stored * s.seq;
    };
    const float *dout = at(p.dout, p.dout_strides), *out = at(f.out, f.out_strides);
    float dot = 0.0f;
    for (int32_t d = threadIdx.x % 32; d < f.head_dim_v; d += 32) dot = fmaf(dout[d], out[d], dot);
    dot = device::warp_sum(dot);
    state = {lse, p.dlse == nullptr ? dot : dot - *at(p.dlse, p.dlse_strides)};
  }
  if (threadIdx.x % 32 == 0) states[row_index(f, batch, head, stored)] = state;
}

static void launch_row_states(const BackwardParams& p, RowState* states, cudaStream_t stream) {
  int64_t rows = int64_t{p.forward.batch} * p.forward.num_heads_q * p.forward.seqlen_q;
  if (rows == 0) return;
  unsigned blocks = grid_blocks(device::ceil_div(rows * 32, int64_t{kStateThreads}), "simt");
  find_row_states<<<blocks, kStateThreads, 0, stream>>>(p, states);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace backward

template <class Pass>
void launch_pass_simt(const BackwardParams& p, const backward::Memory& memory, int64_t items,
                      int32_t count, cudaStream_t stream) {
  unsigned blocks = grid_blocks(items, "simt");
  if (blocks == 0) return;
  auto* kernel = backward::backward_simt_kernel<Pass>;
  constexpr int kSharedBytes = sizeof(typename Pass::Shared);
  static uint64_t allowed = 0;
  allow_shared_memory(kernel, kSharedBytes, allowed);
  kernel<<<blocks, Pass::kThreads, kSharedBytes, stream>>>(p, memory, count);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <class Pass>
void launch_keys_simt(const BackwardParams& p, const backward::Memory& memory,
                      cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  int32_t tiles = device::ceil_div(f.seqlen_kv, Pass::kTile.m);
  launch_pass_simt<Pass>(p, memory, int64_t{f.batch} * f.num_heads_kv * tiles, tiles, stream);
}

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreKind kScore>
void launch_backward_simt(const BackwardLaunch& launch, cudaStream_t stream) {
  static_assert(kType == DType::f32 && kHeadDim == kHeadDimV && kMask == MaskKind::window &&
                    kScore == ScoreKind::scored,
                "one kernel for all masks and scores");
  using namespace backward;
  const BackwardParams& p = launch.params;
  const AttentionParams& f = p.forward;
  const Memory memory(p, launch.schedule.workspace);
  launch_row_states(p, memory.rows, stream);
  if (p.needs(kNeedDq | kNeedDslopes)) {
    using Pass = SimtQueriesPass<kHeadDim, SimtOptions>;
    int32_t tiles = device::ceil_div(f.seqlen_q, Pass::kTile.m);
    launch_pass_simt<Pass>(p, memory, int64_t{f.batch} * f.num_heads_q * tiles, tiles, stream);
  }
  if constexpr (simt_keys_makes_one(kHeadDim)) {
    using DkPass = SimtKeysPass<kHeadDim, SimtOptions, true, false>;
    using DvPass = SimtKeysPass<kHeadDim, SimtOptions, false, true>;
    if (p.needs(kNeedDk)) launch_keys_simt<DkPass>(p, memory, stream);
    if (p.needs(kNeedDv)) launch_keys_simt<DvPass>(p, memory, stream);
  } else if (p.needs(kNeedDk | kNeedDv)) {
    launch_keys_simt<SimtKeysPass<kHeadDim, SimtOptions, true, true>>(p, memory, stream);
  }
  if (p.needs(kNeedDbias)) {
    using Pass = SimtBiasPass<kHeadDim, SimtOptions>;
    launch_pass_simt<Pass>(p, memory, bias_blocks(p, Pass::kTile), bias_parts(p), stream);
  }
  launch_option_sums(p, launch.schedule.workspace, stream);
  launch_clear(f.cu_seqlens_q, f.batch, f.total_q, f.num_heads_q,
               {p.dq, p.dq_strides, f.dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dk, p.dk_strides, p.dk_dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dv, p.dv_strides, p.dv_dtype, f.head_dim_v}, stream);
}

}  // namespace cuattn
