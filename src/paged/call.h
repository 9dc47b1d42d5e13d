// SPDX-License-Identifier: Apache-2.0
// A validated and planned call of paged attention, V1, V2 or paged_plan: what prepare learns and
// run needs. Lives inside cuattn_attention_call.
#pragma once

#include <string>
#include <type_traits>

#include "cuattn/backend.h"
#include "cuattn/c_api.h"
#include "cuattn/params/float8.h"
#include "cuattn/tensor.h"

namespace cuattn {

struct PagedCall {
  PagedParams params;
  PagedRequest request;
  Plan plan;
  DLDevice device;
  const char *function, *k_name, *v_name;  // as the caller knows them
  int64_t q_shape[2];  // num_seqs and q_len of q; work has them, too, without lists of tokens
  bool is_decode;      // q [num_seqs, num_heads_q, head_dim], without an axis of queries
  bool has_codes;  // q is e4m3: codes that become numbers of params.dtype in the workspace first
  Float8Scale q_scale;  // of these
  bool has_equal_lens;  // of mla_decode: no lens were given, all are those of the keys there are
  bool are_rows;        // of a dense batch
  bool are_alike;       // sequences, by what the host knows: such rows without seqused
};
// Programs copy it as bytes, and nobody destroys it. It must never outgrow the state, whose size is
// part of the ABI: keep what is large behind a pointer then.
static_assert(sizeof(PagedCall) < sizeof(cuattn_attention_call::state) &&
              alignof(PagedCall) <= alignof(uint64_t) && std::is_trivially_copyable_v<PagedCall>);

// The arrays of a call; block_tables and context_lens are int32.
struct PagedArrays {
  TensorView q, k_cache, v_cache, block_tables, context_lens;
};

// Validates everything but the outputs, and fills everything but plan and what follows from it.
// `check_data` false: no data pointer is looked at, for explain().
PagedCall validate_paged(const PagedArrays& arrays, const cuattn_paged_options& options,
                         bool check_data);

// For paged_plan: the shapes stand for q and the caches.
PagedCall validate_paged_plan(const TensorView& block_tables, const TensorView& context_lens,
                              const cuattn_paged_shape& shape, const cuattn_paged_options& options);

// The arrays of mla_decode: q_nope and ckv_cache with the columns of the latent. q_pe and kpe_cache,
// the rope columns, may be nullptr; so may v_cache, for values that are the latents, and both tables
// and lens, for rows: ckv_cache [num_seqs, seqlen, latent]. Or indices, lists of tokens, with or
// without topk_lens, are there instead of tables and lens.
struct LatentArrays {
  TensorView q_nope, ckv_cache;
  const TensorView *q_pe, *kpe_cache, *v_cache, *block_tables, *context_lens, *indices, *topk_lens;
};
PagedCall validate_latent(const LatentArrays& arrays, const cuattn_paged_options& options,
                          bool check_data);

// Chooses a kernel and cuts the work for it. Must come before run.
void plan_paged(PagedCall& call, const cuattn_paged_options& options, const DeviceInfo& device);

// All that run_paged refuses, and nothing else: nothing is written.
void check_paged(const PagedCall& call, const TensorView& out, const TensorView* lse,
                 const void* workspace, size_t workspace_bytes, Stream stream);

// Validates the outputs and launches, on a copy of the call, which may so be run again, with other
// outputs and another workspace.
void run_paged(PagedCall call, const TensorView& out, const TensorView* lse, void* workspace,
               size_t workspace_bytes, Stream stream);

// For a call whose params somebody else has filled: attention_varlen with few queries a sequence.
Plan plan_step(PagedCall call, int32_t num_splits, bool batch_invariant, const DeviceInfo& device);
std::string ladder_of_step(const PagedCall& call, const DeviceInfo& device, const Plan& plan);
void run_step(PagedCall call, const Plan& plan, void* workspace, Stream stream);

void run_paged_plan(PagedCall& call, const TensorView& plan, Stream stream);

}  // namespace cuattn
