// SPDX-License-Identifier: Apache-2.0
// A validated and planned attention call: what prepare() learns and run() needs. Lives inside
// cuattn_attention_call.
#pragma once

#include <type_traits>

#include "cuattn/backend.h"
#include "cuattn/c_api.h"
#include "cuattn/tensor.h"
#include "src/check/overlap.h"

namespace cuattn {

// Which function a call belongs to.
enum class CallKind : int32_t { attention, backward, flex, flex_backward };

struct AttentionCall {
  AttentionParams params;
  FlexParams flex;           // what a user wrote; has_programs: there is something in it
  CacheGatherParams gather;  // paged keys: gathered into the workspace before the kernel runs
  Plan plan;
  Plan decodes;  // of the single queries, where plan.decodes_apart
  DLDevice device;
  int32_t layout;
  bool ragged, paged, uses_seqused, has_sinks, has_bias, has_slopes, batch_invariant;
  bool has_programs;
  bool is_fast;           // accumulate="fast"
  int32_t scale_axes[3];  // of the scales of q, k and v; 0: one number
  CallKind kind;
  bool may_step;       // lengths and options are such that paged_attention's kernels could serve
  int32_t num_splits;  // forced; 0 = chosen
  int64_t max_seqlen_q,
      max_seqlen_kv;  // as the caller gave them: the extents a bias is held against

  bool is_flex() const { return kind == CallKind::flex || kind == CallKind::flex_backward; }
  const char* function() const {
    if (kind == CallKind::flex) return "flex_attention";
    if (kind == CallKind::flex_backward) return "flex_attention_backward";
    if (kind == CallKind::backward)
      return ragged ? "attention_varlen_backward" : "attention_backward";
    return ragged ? "attention_varlen" : "attention";
  }
};
// Programs copy it as bytes, and nobody destroys it. It must never outgrow the state, whose size is
// part of the ABI: keep what is large behind a pointer then. Its last word is the mark of abi/prepared.h.
static_assert(sizeof(AttentionCall) < sizeof(cuattn_attention_call::state) &&
              alignof(AttentionCall) <= alignof(uint64_t) &&
              std::is_trivially_copyable_v<AttentionCall>);

AttentionRequest request_of(const AttentionCall& call);

// The scales of what is stored. A kernel over rows that were made of float8 pages sees none.
inline Float8Scales stored_scales(const AttentionCall& call) {
  const AttentionParams& p = call.params;
  if (!call.gather.makes_numbers) return p.float8;
  return {p.float8.q, call.gather.k_scale, call.gather.v_scale};
}

// Whether the scale of q, k or v (0, 1, 2) has more than one sequence, or part of one. Where bits may not
// depend on the batch, an axis of one counts: a batch with more, or longer, sequences has it, too.
inline bool has_scale_axis(const AttentionCall& call, int32_t array, int32_t axis) {
  const Float8Scales& scales = call.params.float8;
  const Float8Scale* of[] = {&scales.q, &scales.k, &scales.v};
  return of[array]->extents[axis] > 1 ||
         (call.batch_invariant && call.scale_axes[array] > (axis == 0 ? 1 : axis));
}

// Makes the plans of a call, with the workspace of its gathered keys and of its single queries.
void plan_attention(AttentionCall& call, const DeviceInfo& device, const char* backend);

// Every rung with its verdict, those of the plans marked.
std::string ladder_of(const AttentionCall& call, const DeviceInfo& device, const char* backend);

// Validates shapes, dtypes, devices, strides and options, and fills everything but plan.
// `check_data` false: no data pointer is looked at, for explain().
AttentionCall validate_attention(const TensorView& q, const TensorView& k, const TensorView& v,
                                 const cuattn_attention_options& options, bool check_data,
                                 CallKind kind = CallKind::attention);

// Refuses a place of dropout that the kernels of the device do not begin at.
void require_dropout_key(const AttentionCall& call, const DeviceInfo& device);

// The arrays that a call reads, out and lse apart; for the forward and the backward pass.
void check_inputs(const AttentionCall& call, const CallMemory& memory);

// Validates the outputs and launches.
void run_attention(AttentionCall& call, const TensorView& out, const TensorView* lse,
                   void* workspace, size_t workspace_bytes, Stream stream);

}  // namespace cuattn
