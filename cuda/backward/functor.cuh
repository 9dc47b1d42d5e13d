// SPDX-License-Identifier: Apache-2.0
// Gradients of masks and scores that a user wrote: what the launchers of the passes share. Used by
// functor.cu (sm80) and simt/functor.cu.
#pragma once

#include "cuattn/plan.h"
#include "cuda/backward/bias_tiles.cuh"
#include "cuda/backward/weigh.cuh"
#include "cuda/host/functor.h"
#include "cuda/host/launch.h"

namespace cuattn::backward {

constexpr int kFunctorThreads = 128;  // of every pass

// One call: who launches a pass of it needs the name of its kernel and what that takes.
struct FunctorPasses {
  const FunctorBackwardParams& params;
  const Memory memory;
  const Plan& plan;
  int64_t functor;
  int device_id;
  cudaStream_t stream;

  template <class... Arguments>
  void launch(const char* name, int64_t blocks, int smem_bytes, Arguments... given) const {
    if (blocks == 0) return;
    cudaKernel_t kernel = functor_kernel(functor, name, smem_bytes, device_id, stream);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid_blocks(blocks, kernel_name(plan.kernel)));
    config.blockDim = dim3(kFunctorThreads);
    config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
    config.stream = stream;
    void* arguments[] = {const_cast<FunctorBackwardParams*>(&params), &given...};
    CUATTN_CUDA_TRY(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
  }

  // Blocks of a pass that cuts the queries, or keys, of a head into so many tiles.
  int64_t query_blocks(int32_t tiles) const {
    return int64_t{params.forward.batch} * params.forward.num_heads_q * tiles;
  }
  int64_t key_blocks(int32_t tiles) const {
    return int64_t{params.forward.batch} * params.forward.num_heads_kv * tiles;
  }
};

void launch_functor_passes_simt(const FunctorPasses& passes);  // simt/functor.cu

}  // namespace cuattn::backward
