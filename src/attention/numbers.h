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

// Over pages: q alone becomes numbers, k and v do as they are gathered, or a decode kernel reads their
// codes. Whether a call may, then as what it is planned, and the bytes of its q.
bool may_become_numbers(const AttentionCall& call, const DeviceInfo& device);
AttentionCall as_numbers(AttentionCall call);
size_t numbers_bytes(const AttentionCall& call);

// Makes them of q, k and v at the end of the workspace, in the dtype of out if that has 16 bits, else
// in bfloat16, and lets the call read them. Over pages of q.
void make_numbers(AttentionCall& call, void* workspace, Stream stream);

}  // namespace cuattn
