// SPDX-License-Identifier: Apache-2.0
// quantize of rows as they are. Next: quantize_launch.cuh.
#include "cuda/fused/quantize_launch.cuh"

namespace cuattn {

void launch_quantize(const QuantizeParams& p, cudaStream_t stream) {
  p.turns() ? launch_quantize_turned(p, stream) : run_quantize<false>(p, stream);
}

}  // namespace cuattn
