// SPDX-License-Identifier: Apache-2.0
// The launcher of the gradients of masks and scores that a user wrote: the passes of sm80, compiled
// for the functions by NVRTC, and after them what sm80/backward.cuh runs, too. Gradients of captured
// arrays are summed by atomics in the queries pass. Before: cuda/attention/functor.cu. Next:
// device/functor_gradient.cuh, python/cuattn/flex/emit_backward.py.
#include "cuattn/plan.h"
#include "cuda/backward/bias_tiles.cuh"
#include "cuda/backward/clear.cuh"
#include "cuda/backward/weigh.cuh"
#include "cuda/host/functor.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kThreads = 128;  // of every pass

// A pass of one call: who launches it needs the name of its kernel and what that takes.
struct Passes {
  const FunctorBackwardParams& params;
  int64_t functor;
  int device_id;
  cudaStream_t stream;

  template <class... Arguments>
  void launch(const char* name, int64_t blocks, int smem_bytes, Arguments... given) const {
    if (blocks == 0) return;
    cudaKernel_t kernel = functor_kernel(functor, name, smem_bytes, device_id, stream);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid_blocks(blocks, "sm80"));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
    config.stream = stream;
    void* arguments[] = {const_cast<FunctorBackwardParams*>(&params), &given...};
    CUATTN_CUDA_TRY(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
  }
};

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

}  // namespace

void launch_functor_backward(const BackwardParams& p, void* workspace, const Plan& plan,
                             int device_id, cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  const HeadDims d = {plan.head_dim, plan.head_dim_v};
  const Tile queries = sm80_queries_tile(d, ScoreKind::scored);
  const Tile keys = sm80_keys_tile(d, ScoreKind::scored), bias = sm80_bias_tile(d);
  FunctorBackwardParams params;
  static_cast<BackwardParams&>(params) = p;
  params.flex = nullptr;
  params.forward.flex = nullptr;
  fill_functor(params.functor, f, {queries.m, keys.n, 0, 0});
  for (int i = 0; i < kMaxFlexArrays; ++i) params.functor.gradients[i] = p.flex->arrays[i];
  clear_gradients(params.functor, stream);
  if (plan.kernel == Kernel::naive) return launch_naive_backward(params, workspace, stream);
  const backward::Memory memory(p, workspace);
  const Passes passes{params, f.flex->functor, device_id, stream};
  const int32_t query_tiles = device::ceil_div(f.seqlen_q, queries.m);
  passes.launch("cuattn_queries", int64_t{f.batch} * f.num_heads_q * query_tiles,
                sm80_queries_smem_bytes(d, queries), memory, query_tiles);
  if (p.dk != nullptr || p.dv != nullptr) {
    const int32_t key_tiles = device::ceil_div(f.seqlen_kv, keys.n);
    const int32_t results = sm80_keys_makes_one(d) && p.dk != nullptr && p.dv != nullptr ? 2 : 1;
    passes.launch("cuattn_keys", int64_t{f.batch} * f.num_heads_kv * key_tiles * results,
                  sm80_keys_smem_bytes(d, keys), memory.rows, key_tiles, results);
  }
  if (p.needs(kNeedDbias)) {
    passes.launch("cuattn_bias", backward::bias_blocks(p, bias, bias_parts(p)),
                  sm80_queries_smem_bytes(d, bias), memory, bias_parts(p));
  }
  launch_option_sums(p, workspace, stream);
  launch_clear(f.cu_seqlens_q, f.batch, f.total_q, f.num_heads_q,
               {p.dq, p.dq_strides, f.dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dk, p.dk_strides, p.dk_dtype, f.head_dim}, stream);
  launch_clear_keys(f, {p.dv, p.dv_strides, p.dv_dtype, f.head_dim_v}, stream);
}

}  // namespace cuattn
