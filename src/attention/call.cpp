// SPDX-License-Identifier: Apache-2.0
// attention and attention_varlen after validation: what the choice of a kernel depends on, and the
// run (outputs, launch). Between the two stand the choice and the caller's allocation of outputs and
// workspace. Next: step.cpp (the choice).
#include "src/attention/call.h"

#include "src/attention/flex.h"
#include "src/attention/numbers.h"
#include "src/attention/pages.h"
#include "src/cache/cache.h"
#include "src/check/arrays.h"
#include "src/check/axes.h"
#include "src/check/float8.h"
#include "src/check/overlap.h"

namespace cuattn {

AttentionRequest request_of(const AttentionCall& call) {
  const AttentionParams& p = call.params;
  AttentionRequest r{};
  r.dtype = p.dtype;
  r.batch = p.batch;
  r.num_heads_q = p.num_heads_q;
  r.num_heads_kv = p.num_heads_kv;
  r.head_dim = p.head_dim;
  r.head_dim_v = p.head_dim_v;
  r.seqlen_q = p.seqlen_q;
  r.seqlen_kv = p.seqlen_kv;
  r.ragged = call.ragged;
  r.uses_seqused = call.uses_seqused;
  r.mask = p.mask.kind();
  r.window_left = p.mask.left;
  r.window_right = p.mask.right;
  r.score = p.scores.kind;
  r.has_sinks = call.has_sinks;
  r.batch_invariant = call.batch_invariant;
  r.has_bias = call.has_bias;
  r.has_slopes = call.has_slopes;
  r.has_bias_map = call.has_bias && has_bias_map(p);
  r.num_splits = call.num_splits;
  r.paged = call.paged;
  r.kv_layout = call.gather.kv_layout;
  r.block_size = call.gather.pages.block_size;
  r.has_dropout = p.dropout.is_on();
  r.is_flex = call.is_flex();
  r.has_rows = p.rows.begin != nullptr;
  r.has_head_rows = p.rows.strides.head != 0;
  r.has_programs = call.has_programs;
  r.has_functor = call.flex.functor != 0;
  r.has_columns = p.v_channel_stride != 1;
  r.has_kv_start = p.kv_start != nullptr;
  r.total_q = p.total_q;
  r.total_kv = p.total_kv;
  r.has_float8_pages = call.paged && call.gather.dtype == DType::e4m3;
  r.is_fast = call.is_fast;
  for (int32_t array : {0, 1, 2}) r.has_sequence_scales |= has_scale_axis(call, array, 0);
  r.has_query_head_scales = p.float8.q.extents[1] > p.num_heads_kv;
  r.has_part_scales =
      has_scale_axis(call, 0, 2) || has_scale_axis(call, 1, 2) || r.has_query_head_scales;
  if (r.has_rows) r.mask = MaskKind::rows;
  if (r.has_functor) {  // as the kernel that has every option
    r.functor = call.flex.form;
    r.has_score_options = r.score == ScoreKind::scored;
    r.mask = MaskKind::window;
    r.score = ScoreKind::scored;
  }
  return r;
}

namespace {

AttentionSchedule schedule_of(const Plan& plan, void* workspace) {
  return {plan.tile,         plan.num_splits, plan.split_keys,  plan.most_splits,
          plan.packed_heads, plan.num_ctas,   plan.draws_tiles, workspace};
}

}  // namespace

void check_inputs(const AttentionCall& call, const CallMemory& memory) {
  const AttentionParams& p = call.params;
  int64_t item = itemsize(p.dtype);
  auto read_rows = [&](const char* name, const void* data, const Strides& strides, int64_t rows,
                       int64_t heads, int64_t dim, int64_t step = 1) {
    int64_t batch = call.ragged ? 1 : p.batch;
    memory.reads(
        {name,
         data,
         item,
         {{batch, strides.batch}, {rows, strides.seq}, {heads, strides.head}, {dim, step}}});
  };
  read_rows("q", p.q, p.q_strides, call.ragged ? p.total_q : p.seqlen_q, p.num_heads_q, p.head_dim);
  if (call.paged) {
    const CacheGatherParams& g = call.gather;
    memory.reads(cache_footprint("k", g.k, g));
    memory.reads(cache_footprint("v", g.v, g));
    memory.reads(tables_footprint(g));
  } else {
    int64_t rows = call.ragged ? p.total_kv : p.seqlen_kv;
    read_rows("k", p.k, p.k_strides, rows, p.num_heads_kv, p.head_dim);
    read_rows("v", p.v, p.v_strides, rows, p.num_heads_kv, p.head_dim_v, p.v_channel_stride);
  }
  Float8Scales scales = stored_scales(call);
  memory.reads(scale_footprint("q_scale", scales.q));
  memory.reads(scale_footprint("k_scale", scales.k));
  memory.reads(scale_footprint("v_scale", scales.v));
  memory.reads({"cu_seqlens_q", p.cu_seqlens_q, 4, {{p.batch + int64_t{1}, 1}}});
  memory.reads({"cu_seqlens_k", p.cu_seqlens_kv, 4, {{p.batch + int64_t{1}, 1}}});
  memory.reads({"seqused_q", p.seqused_q, 4, {{p.batch, 1}}});
  memory.reads({"seqused_k", p.seqused_kv, 4, {{p.batch, 1}}});
  memory.reads({"kv_start", p.kv_start, 4, {{p.batch, 1}}});
  memory.reads(
      {"alibi_slopes",
       p.scores.alibi_slopes,
       4,
       {{p.batch, p.scores.alibi_stride_batch}, {p.num_heads_q, p.scores.alibi_stride_head}}});
  memory.reads({"sinks", p.scores.sinks, 4, {{p.num_heads_q, p.scores.sinks_stride}}});
  memory.reads({"bias",
                p.scores.bias,
                itemsize(p.scores.bias_dtype),
                {{p.batch, p.scores.bias_stride_batch},
                 {p.num_heads_q, p.scores.bias_stride_head},
                 {call.max_seqlen_q, p.scores.bias_stride_q},
                 {call.max_seqlen_kv, p.scores.bias_stride_kv}}});
  memory.reads({"dropout_state", p.dropout.state, 8, {{2, 1}}});
  if (call.is_flex()) check_flex_inputs(call, memory);
}

namespace {

void launch(AttentionCall& call, void* workspace, Stream stream) {
  if (call.plan.keys == KeyAccess::gathered) {
    workspace = gather_pages(call, workspace, stream);
  } else if (call.plan.keys == KeyAccess::in_blocks) {
    point_at_pages(call);
  }
  if (call.has_programs) call.params.flex = &call.flex;
  backend_of(call.function(), call.device)
      .attention(call.params, schedule_of(call.plan, workspace), call.plan, call.device.device_id,
                 stream);
}

// First the others, whose kernel writes zeros in the rows of the decodes, then these.
void run_apart(const AttentionCall& call, void* workspace, Stream stream) {
  const Backend& backend = backend_of(call.function(), call.device);
  auto [step, apart] = decodes_of(call, workspace);
  auto* room = static_cast<char*>(workspace);
  AttentionCall others = call;
  others.params.seqused_q = apart.other_queries;
  others.params.seqused_kv = others.gather.seqused = apart.other_lens;
  backend.set_decodes_apart(apart, call.device.device_id, stream);
  launch(others, room + decode_bytes(call, call.decodes), stream);
  run_step(step, call.decodes, room + lengths_bytes(call), stream);
}

// Rows by a decode kernel, which is told the lengths of packed ones first.
void run_rows(const AttentionCall& call, void* workspace, Stream stream) {
  if (call.ragged) {
    backend_of(call.function(), call.device)
        .key_lengths(packed_lengths(call, workspace), call.device.device_id, stream);
  }
  auto* room = static_cast<char*>(workspace) + packed_lengths_bytes(call);
  run_step(step_of(call, workspace), call.plan, room, stream);
}

// Whichever way the plan goes.
void run_plan(AttentionCall& call, void* workspace, Stream stream) {
  const KeyAccess keys = call.plan.keys;
  if (keys == KeyAccess::by_step)
    return run_step(step_of(call, nullptr), call.plan, workspace, stream);
  if (keys == KeyAccess::rows_by_step) return run_rows(call, workspace, stream);
  if (call.plan.decodes_apart) return run_apart(call, workspace, stream);
  launch(call, workspace, stream);
}

}  // namespace

void run_attention(AttentionCall& call, const TensorView& out, const TensorView* lse,
                   void* workspace, size_t workspace_bytes, Stream stream) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  Axes axes = axes_of(call.ragged, call.layout);

  int64_t out_shape[4] = {p.total_q, p.num_heads_q, p.head_dim_v, 0};
  int64_t lse_shape[3] = {p.num_heads_q, p.total_q, 0};
  if (!call.ragged) {
    out_shape[axes.batch] = p.batch;
    out_shape[axes.seq] = p.seqlen_q;
    out_shape[axes.head] = p.num_heads_q;
    out_shape[3] = p.head_dim_v;
    lse_shape[0] = p.batch;
    lse_shape[1] = p.num_heads_q;
    lse_shape[2] = p.seqlen_q;
  }
  p.out_dtype = is_code(p.dtype) ? float8_out_dtype(fn, out, p.dtype)
                                 : result_dtype(fn, out, p.dtype, call.plan.kernel);
  require_output(fn, "out", out, p.out_dtype, shape_view(out_shape, axes.ndim), call.device);
  require_rows(fn, "out", out, true, true);
  p.out = out.data;
  p.out_strides = strides_of(out, axes);
  p.lse = nullptr;
  if (lse != nullptr) {
    require_output(fn, "lse_out", *lse, DType::f32, shape_view(lse_shape, axes.ndim - 1),
                   call.device);
    require_strided(fn, "lse_out", *lse, true, true);
    p.lse = static_cast<float*>(lse->data);
    p.lse_strides = lse_strides_of(*lse, call.ragged);
  }

  CallMemory memory(fn);  // what is written lies apart from all else
  memory.writes({"out", out});
  if (lse != nullptr) memory.writes({"lse_out", *lse});
  memory.writes_workspace(workspace, call.plan.workspace_bytes, workspace_bytes);
  check_inputs(call, memory);
  bool cuda = is_cuda(call.device);
  const Backend& backend = backend_of(fn, call.device);
  if (call.paged) check_pages(fn, call.gather, call.device, stream);
  Float8Scales scales = stored_scales(call);
  bool has_scales = scales.q.data || scales.k.data || scales.v.data;
  bool has_data = call.ragged || call.uses_seqused || p.dropout.state != nullptr || has_scales;
  if (has_data && (!cuda || checks_device_data())) {
    AttentionParams stored = p;
    stored.float8 = scales;
    backend.check(fn, stored, call.device.device_id, stream);
  }
  if (out.size() == 0 || p.batch == 0 || p.seqlen_q == 0) return;

  require_workspace(fn, call.plan, call.device, workspace, workspace_bytes);
  if (call.plan.numbers_bytes == 0) return run_plan(call, workspace, stream);
  AttentionCall numbers = call;
  make_numbers(numbers, workspace, stream);
  run_plan(numbers, workspace, stream);
}

}  // namespace cuattn
