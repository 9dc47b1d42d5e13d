// SPDX-License-Identifier: Apache-2.0
// What a user wrote, from the C ABI into a validated call. Next: params/flex.h, flex.cpp.
#pragma once

#include "src/attention/call.h"

namespace cuattn {

// Adds row ranges, lists and programs to a call that validate_attention has filled. `call.flex`
// borrows what the options point to.
void read_flex(AttentionCall& call, const cuattn_flex_options& options, bool check_data);

// The arrays that it reads, for check_inputs.
void check_flex_inputs(const AttentionCall& call, const CallMemory& memory);

}  // namespace cuattn
