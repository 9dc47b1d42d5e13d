// SPDX-License-Identifier: Apache-2.0
// What a kernel that was compiled for a user's functions receives: the problem, the arrays and
// numbers that the functions read, and lists of blocks. Next: device/functor.cuh.
#pragma once

#include "cuattn/params/attention.h"

namespace cuattn {

struct FunctorParams : AttentionParams {
  FlexLists lists;
  FlexArray arrays[kMaxFlexArrays];
  int32_t numbers[kMaxFlexNumbers];  // the bits of an int32 or a float, or -1 and 0
};

}  // namespace cuattn
