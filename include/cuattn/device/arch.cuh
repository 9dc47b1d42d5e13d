// SPDX-License-Identifier: Apache-2.0
// What keeps code that asks __CUDA_ARCH__ out of kernels whose PTX is made once for several
// architectures: the rows of kind `portable` in cuda/instances.cmake, and such sources of CMakeLists.txt.
#pragma once

namespace cuattn::device {

#ifdef CUATTN_ONE_PTX
// Defined nowhere: ptxas refuses a kernel that reaches a call of it, and prints this name.
extern __device__ void the_kind_of_this_row_must_be_each();
#else
__device__ __forceinline__ void the_kind_of_this_row_must_be_each() {}
#endif

}  // namespace cuattn::device
