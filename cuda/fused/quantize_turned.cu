// SPDX-License-Identifier: Apache-2.0
// quantize of rows that are turned first. Next: turned_rows.cuh.
#include "cuda/fused/quantize_launch.cuh"

namespace cuattn {

void launch_quantize_turned(const QuantizeParams& p, cudaStream_t stream) {
  run_quantize<true>(p, stream);
}

}  // namespace cuattn
