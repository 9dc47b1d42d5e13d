// SPDX-License-Identifier: Apache-2.0
// The words of the house: how messages, explain() and kernels() spell its enums. Next: plan.h.
#pragma once

#include "cuattn/params/types.h"

namespace cuattn {

enum class Kernel : int32_t;  // plan.h

enum class Op : int32_t { attention, paged_attention, attention_backward, mla_decode };
inline constexpr const char* kOpNames[] = {"attention", "paged_attention", "attention_backward",
                                           "mla_decode"};

const char* kernel_name(Kernel kernel);  // as `backend=` spells it
const char* dtype_name(DType dtype);     // "float32", ...
const char* mask_name(MaskKind mask);
const char* score_name(ScoreKind score);
int32_t itemsize(DType dtype);  // bytes

}  // namespace cuattn
