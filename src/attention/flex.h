// SPDX-License-Identifier: Apache-2.0
// What a user wrote, from the C ABI into a validated call. Next: params/flex.h, flex.cpp.
#pragma once

#include "src/attention/backward.h"

namespace cuattn {

// Adds row ranges, lists and programs to a call that validate_attention has filled. `call.flex`
// borrows what the options point to.
void read_flex(AttentionCall& call, const cuattn_flex_options& options, bool check_data);

// Adds what the options ask of the score program's gradients, after read_flex.
void read_flex_gradient(BackwardCall& call, const cuattn_flex_options& options, bool check_data);

// The gradients of captured arrays that a run writes.
void check_array_gradients(const BackwardCall& call, CallMemory& memory);

// The arrays that it reads, for check_inputs.
void check_flex_inputs(const AttentionCall& call, const CallMemory& memory);

}  // namespace cuattn
