// SPDX-License-Identifier: Apache-2.0
// Codes that become numbers of 16 bits in the workspace, where no kernel on tensor cores reads codes:
// a pass over them costs less than scores in memory. Next: numbers.cpp.
#pragma once

#include "cuattn/plan.h"
#include "src/attention/call.h"

namespace cuattn {

// Whether dequantize can make them of a call.
bool may_become_numbers(const AttentionRequest& request, const DeviceInfo& device);

// What a kernel is asked that reads them.
AttentionRequest as_numbers(AttentionRequest request);

size_t numbers_bytes(const char* function, const AttentionRequest& request);

// Makes them of q, k and v at the end of the workspace, in the dtype of out if that has 16 bits, else
// in bfloat16, and lets the call read them.
void make_numbers(AttentionCall& call, void* workspace, Stream stream);

}  // namespace cuattn
