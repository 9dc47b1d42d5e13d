// SPDX-License-Identifier: Apache-2.0
// Keys in the blocks of a cache: attention_varlen gathers them into rows, hands the block tables to
// a kernel that follows them, or becomes a step of paged_attention. Next: pages.cpp.
#pragma once

#include "src/attention/call.h"
#include "src/paged/call.h"

namespace cuattn {

// Should the keys be gathered: end to end where cu_seqlens_k is given, else seqlen_kv rows a
// sequence.
void size_pages(AttentionCall& call);

size_t gathered_bytes(const AttentionCall& call);  // of workspace

// Copies the keys out of their blocks; returns the workspace that is left for the kernel.
void* gather_pages(AttentionCall& call, void* workspace, Stream stream);

// For a kernel that follows the block tables.
void point_at_pages(AttentionCall& call);

// The call as a step of paged_attention. Rows are pages, too (Pages). The lengths of packed ones lie at
// the front of the workspace; behind them is the workspace of the step.
PagedCall step_of(const AttentionCall& call, void* workspace);
constexpr int32_t kMostPackedRows = 1 << 30;  // of such pages
size_t packed_lengths_bytes(const AttentionCall& call);
KeyLengths packed_lengths(const AttentionCall& call, void* workspace);

// A call whose plan has decodes_apart: its sequences with one query as such a step, and the lengths
// that part them from the others. The lengths lie at the front of the workspace; behind them is the
// workspace of the step, behind it that of the others.
struct Decodes {
  PagedCall step;
  DecodesApart apart;
};
Decodes decodes_of(const AttentionCall& call, void* workspace);
size_t lengths_bytes(const AttentionCall& call);
size_t decode_bytes(const AttentionCall& call, const Plan& step_plan);

}  // namespace cuattn
