// SPDX-License-Identifier: Apache-2.0
// The launchers that backend.cu calls by name. Kernels of the instance table are reached through
// instances.inc instead.
#pragma once

#include <cuda_runtime.h>

#include "cuattn/params.h"

namespace cuattn {

void launch_naive(const PrefillParams& params, cudaStream_t stream);                  // naive.cu
void launch_cublas(const PrefillParams& params, int device_id, cudaStream_t stream);  // cublas.cu
bool cublas_available();
void launch_merge(const MergeParams& params, cudaStream_t stream);     // merge_states.cu
void check_prefill(const PrefillParams& params, cudaStream_t stream);  // check.cu: synchronises

}  // namespace cuattn
