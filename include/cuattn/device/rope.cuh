// SPDX-License-Identifier: Apache-2.0
// The rotation of one pair of elements, in the one form that all kernels use. Source:
// arXiv:2104.09864. Next: cuda/cache/rotate.cuh, cuda/fused/rope.cu.
#pragma once

#include "cuattn/device/math.cuh"

namespace cuattn::device {

// (a, b) becomes (a cos - b sin, b cos + a sin). Products and sums are rounded one by one, as on
// the CPU.
struct Rotated {
  float a, b;
};
__device__ __forceinline__ Rotated rotated(float a, float b, float cos, float sin) {
  return {__fadd_rn(__fmul_rn(a, cos), __fmul_rn(b, -sin)),
          __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin))};
}

}  // namespace cuattn::device
