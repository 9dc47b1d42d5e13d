// SPDX-License-Identifier: Apache-2.0
// merge_states: two parts lying apart, or many stacked on a first axis.
#pragma once

#include "cuattn/backend.h"
#include "cuattn/tensor.h"

namespace cuattn {

void merge_states(const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
                  const TensorView& lse_b, const TensorView& out, const TensorView* lse_out,
                  int32_t layout, Stream stream);
void merge_many(const TensorView& outs, const TensorView& lses, const TensorView& out,
                const TensorView* lse_out, int32_t layout, Stream stream);

}  // namespace cuattn
