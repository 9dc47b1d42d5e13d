// SPDX-License-Identifier: Apache-2.0
// The launcher of the gradients of masks and scores that a user wrote: the passes of sm80, compiled
// for the functions by NVRTC, those of simt in float32, and after them what sm80/backward.cuh runs,
// too. Gradients of captured arrays are summed by atomics in the queries pass. Before:
// cuda/attention/functor.cu. Next: device/functor_gradient.cuh, python/cuattn/flex/emit_backward.py.
#include "cuda/backward/clear.cuh"
#include "cuda/backward/functor.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

// Where sums begin.
void clear_gradients(const FunctorGradientParams& functor, cudaStream_t stream) {
  for (int i = 0; i < kMaxFlexArrays; ++i) {
    const FlexArray& array = functor.arrays[i];
    const FlexArrayGradient& to = functor.gradients[i];
    if (to.data == nullptr) continue;
    size_t count = 1;
    for (int axis = 0; axis < array.rank; ++axis) count *= array.extents[axis];
    CUATTN_CUDA_TRY(cudaMemsetAsync(to.data, 0, count * sizeof(float), stream));
  }
}

// The tile that blocks of lists are made of.
Tile tile_of_blocks(const Plan& plan) {
  if (plan.kernel == Kernel::naive) return {1, 1, 0, 0};  // which reads none
  if (plan.kernel == Kernel::simt) return plan.tile;
  const HeadDims d = {plan.head_dim, plan.head_dim_v};
  return {plan.tile.m, sm80_keys_tile(d, ScoreKind::scored).n, 0, 0};
}

void launch_passes_sm80(const backward::FunctorPasses& passes) {
  const BackwardParams& p = passes.params;
  const HeadDims d = {passes.plan.head_dim, passes.plan.head_dim_v};
  const Tile queries = passes.plan.tile;
  const Tile keys = sm80_keys_tile(d, ScoreKind::scored), bias = sm80_bias_tile(d);
  const int32_t query_tiles = device::ceil_div(p.forward.seqlen_q, queries.m);
  passes.launch("cuattn_queries", passes.query_blocks(query_tiles),
                sm80_queries_smem_bytes(d, queries), passes.memory, query_tiles);
  if (p.dk != nullptr || p.dv != nullptr) {
    const int32_t key_tiles = device::ceil_div(p.forward.seqlen_kv, keys.n);
    const int32_t results = sm80_keys_makes_one(d) && p.dk != nullptr && p.dv != nullptr ? 2 : 1;
    passes.launch("cuattn_keys", passes.key_blocks(key_tiles) * results,
                  sm80_keys_smem_bytes(d, keys), passes.memory.rows, key_tiles, results);
  }
  if (p.needs(kNeedDbias)) {
    passes.launch("cuattn_bias", backward::bias_blocks(p, bias), sm80_queries_smem_bytes(d, bias),
                  passes.memory, bias_parts(p));
  }
}

}  // namespace

void launch_functor_backward(const BackwardParams& p, void* workspace, const Plan& plan,
                             int device_id, cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  FunctorBackwardParams params;
  static_cast<BackwardParams&>(params) = p;
  params.flex = nullptr;
  params.forward.flex = nullptr;
  fill_functor(params.functor, f, tile_of_blocks(plan));
  for (int i = 0; i < kMaxFlexArrays; ++i) params.functor.gradients[i] = p.flex->arrays[i];
  clear_gradients(params.functor, stream);
  if (plan.kernel == Kernel::naive) return launch_naive_backward(params, workspace, stream);
  const backward::FunctorPasses passes{
      params, backward::Memory(p, workspace), plan, f.flex->functor, device_id, stream};
  if (plan.kernel == Kernel::simt) {
    launch_functor_passes_simt(passes);
  } else {
    launch_passes_sm80(passes);
  }
  launch_option_sums(p, workspace, stream);
  launch_clear(f.cu_seqlens_q, f.batch, f.total_q, f.num_heads_q,
               {p.dq, p.dq_strides, f.dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dk, p.dk_strides, p.dk_dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dv, p.dv_strides, p.dv_dtype, f.head_dim_v}, stream);
}

}  // namespace cuattn
