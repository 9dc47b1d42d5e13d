// SPDX-License-Identifier: Apache-2.0
// Launches forward.cuh as NVRTC compiled it with masks and scores of a user. Next: ../functor.cu, which
// keeps the machine code, and functor.cuh, which the kernel asks.
#include "cuattn/plan.h"
#include "cuda/attention/sm90/host.cuh"
#include "cuda/host/functor.h"
#include "cuda/host/launchers.h"

namespace cuattn {

void launch_functor_sm90(const FunctorParams& p, int64_t functor, const AttentionSchedule& cut,
                         const Plan& plan, int device_id, cudaStream_t stream) {
  const HeadDims dims = {plan.head_dim, plan.head_dim_v};
  const int32_t q_stages = sm90_q_stages(dims, plan.tile, ScoreKind::identity);
  const int32_t smem_bytes = sm90_smem_bytes(dims, plan.tile, ScoreKind::identity, q_stages);
  const char* name = "cuattn_functor_sm90";
  cudaKernel_t kernel = functor_kernel(functor, name, smem_bytes, device_id, stream);
  Sm90Schedule s = make_sm90_schedule(p, cut, plan.tile);
  if (s.total == 0) return;
  Sm90Maps maps = make_sm90_maps(p, s, plan.tile, q_stages);
  if (s.counter != nullptr) launch_clear_counter(s.counter, stream);
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(sm90_grid(s, cut)));
  config.blockDim = dim3(static_cast<unsigned>(plan.tile.warps * 32));
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = s.counter != nullptr ? 1 : 0;  // it begins while the counter is cleared
  void* arguments[] = {const_cast<FunctorParams*>(&p), &s, &maps};
  CUATTN_CUDA_TRY(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
  if (s.splits > 1) merge_parts(p, cut, 9, stream);
}

}  // namespace cuattn
