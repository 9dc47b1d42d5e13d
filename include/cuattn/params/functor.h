// SPDX-License-Identifier: Apache-2.0
// What a kernel that was compiled for a user's functions receives: the problem, the arrays and
// numbers that the functions read, and lists of blocks. Next: device/functor.cuh, and of gradients
// device/functor_gradient.cuh.
#pragma once

#include "cuattn/params/backward.h"

namespace cuattn {

struct FunctorParams : AttentionParams {
  FlexLists lists;
  FlexArray arrays[kMaxFlexArrays];
  int32_t numbers[kMaxFlexNumbers];  // the bits of an int32 or a float, or -1 and 0
};

struct FunctorGradientParams : FunctorParams {
  FlexArrayGradient gradients[kMaxFlexArrays];  // of `arrays`; sums in float32, by atomics
};

struct FunctorBackwardParams : BackwardParams {
  FunctorGradientParams functor;  // `forward`, and what the functions read
};
static_assert(sizeof(FunctorBackwardParams) <= 4000, "a kernel takes 4 KB");

}  // namespace cuattn
