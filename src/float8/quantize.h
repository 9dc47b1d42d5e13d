// SPDX-License-Identifier: Apache-2.0
// quantize and dequantize: what is checked before a backend runs them.
#pragma once

#include "cuattn/backend.h"
#include "cuattn/c_api_float8.h"
#include "cuattn/tensor.h"

namespace cuattn {

void quantize(const TensorView& x, const TensorView& out, const TensorView& scale,
              const cuattn_quantize_options& options, Stream stream);
void dequantize(const TensorView& x, const TensorView& out, const TensorView& scale,
                const cuattn_quantize_options& options, Stream stream);

}  // namespace cuattn
