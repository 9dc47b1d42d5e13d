// SPDX-License-Identifier: Apache-2.0
// The counter that forward.cuh draws its work from begins at zero. A kernel writes it, not a
// memset, for behind a kernel the next one may start before it has ended.
#include "cuattn/device/overlap.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

__global__ void __launch_bounds__(32, 1) clear_counter_kernel(int32_t* counter) {
  device::release_next_kernel();
  if (threadIdx.x == 0) *counter = 0;
}

}  // namespace

void launch_clear_counter(int32_t* counter, cudaStream_t stream) {
  clear_counter_kernel<<<1, 32, 0, stream>>>(counter);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
