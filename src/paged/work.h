// SPDX-License-Identifier: Apache-2.0
// How the work of a paged call is cut, and where its workspace lies. Next: work.cpp.
#pragma once

#include <initializer_list>

#include "src/paged/call.h"

namespace cuattn {

// Parts of the validation that paged_attention and mla_decode share (validate.cpp). Rows are counted
// in 32 bits; fills the group.
void check_rows(PagedCall& call);
// block_tables [num_seqs, max_blocks_per_seq] and context_lens [num_seqs]; `like` is the argument
// that has said where, and how many sequences there are.
void read_tables(PagedCall& call, const TensorView& tables, const TensorView& lens,
                 int64_t max_context_len, const char* like, bool check_data);
void fill_mask(PagedCall& call, const cuattn_paged_options& options);
void read_splits(const PagedCall& call, const cuattn_paged_options& options);

// What the choice of a kernel depends on.
PagedRequest request_of(const PagedCall& call, const cuattn_paged_options& options);

// How the plan cuts the rows and keys of the call.
void cut_work(PagedCall& call);

// What a call keeps in its workspace: its own deal, partial results, V2 buffers not given. Returns
// their bytes; a base of nullptr places nothing.
size_t place_workspace(PagedCall& call, void* base);

// An array without gaps, of these extents.
void require_contiguous(const PagedCall& call, const char* name, const TensorView& view,
                        DType dtype, std::initializer_list<int64_t> shape, bool output);

}  // namespace cuattn
