// SPDX-License-Identifier: Apache-2.0
// What the values of a bias give away. Next: bias.cpp.
#pragma once

#include "cuattn/tensor.h"

namespace cuattn {

// Refuses a float bias on the CPU that holds zeros and ones alone: a mask of another library, which
// would be added to the scores. Reads up to all of it: under CUATTN_CHECK=1 only.
void refuse_zero_one(const char* function, const TensorView& bias);

}  // namespace cuattn
