// SPDX-License-Identifier: Apache-2.0
// Kernels that overlap (programmatic dependent launch, from sm_90 on). Host side:
// launch_overlapping in cuda/host/launch.h.
#pragma once

#include "cuattn/device/arch.cuh"

namespace cuattn::device {

// Lets the kernel that was launched behind this one start (launch_overlapping in
// cuda/host/launch.h).
__device__ __forceinline__ void release_next_kernel() {
  the_kind_of_this_row_must_be_each();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In that kernel: until all that the previous one writes is there.
__device__ __forceinline__ void wait_for_previous_kernel() {
  the_kind_of_this_row_must_be_each();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace cuattn::device
