// SPDX-License-Identifier: Apache-2.0
// Rotary embedding of q within the kernel of a prepared call.
#pragma once

#include "cuattn/c_api_fused.h"
#include "src/attention/call.h"

namespace cuattn {

// Whether the kernel of the plan turns q, if it is asked to.
bool rotates_queries(const AttentionCall& call);

// Has run_attention turn q as apply_rope would. False, and the call is as it was: the kernel does not.
bool rotate_queries(AttentionCall& call, const TensorView& cos, const TensorView& sin,
                    const cuattn_rope_options& options, Stream stream);

// The arrays that it reads for it.
void check_tables(const AttentionCall& call, const CallMemory& memory);

}  // namespace cuattn
