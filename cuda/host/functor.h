// SPDX-License-Identifier: Apache-2.0
// Kernels that were compiled for a user's functions: what both launchers of them share.
#pragma once

#include <cuda_runtime.h>

#include "cuattn/params/functor.h"
#include "cuattn/tiles.h"

namespace cuattn {

// A kernel of the machine code that add_functor numbered, loaded for the current device.
cudaKernel_t functor_kernel(int64_t number, const char* name, int smem_bytes, int device_id,
                            cudaStream_t stream);

// What a kernel of such tiles receives; throws where blocks of lists are not made of them.
void fill_functor(FunctorParams& params, const AttentionParams& p, Tile tile);

}  // namespace cuattn
