// SPDX-License-Identifier: Apache-2.0
// The run of paged_attention, paged_attention_v1, paged_attention_v2 and paged_plan: outputs,
// memory, launch. Next: cpu/paged.cpp (the mathematics).
#include "src/paged/call.h"

#include "src/check/arrays.h"
#include "src/check/float8.h"
#include "src/check/overlap.h"
#include "src/float8/codes.h"
#include "src/paged/work.h"

namespace cuattn {
namespace {

Footprint cache_footprint(const char* name, const PagedParams& p, const void* cache,
                          const CacheStrides& strides) {
  bool is_vllm = p.kv_layout == KvLayout::vllm;  // there a head's tokens and dims are one run
  int64_t run = int64_t{p.head_dim} * (is_vllm ? p.pages.block_size : 1);
  if (p.latent.is_used && p.kv_dtype == DType::e4m3) run = PackedLatent::kBytes;
  return {name,
          cache,
          itemsize(p.kv_dtype),
          {{p.pages.num_blocks, strides.block},
           {p.work.num_heads_kv, strides.head},
           {is_vllm ? 1 : p.pages.block_size, strides.token},
           {run, 1}}};
}

// What is written lies apart from all else.
void check_memory(const PagedCall& call, const TensorView& out, const TensorView* lse,
                  const void* workspace, size_t workspace_bytes) {
  const PagedParams& p = call.params;
  const PagedWork& w = p.work;
  CallMemory memory(call.function);
  memory.writes({"out", out});
  if (lse != nullptr) memory.writes({"lse_out", *lse});
  memory.writes_workspace(workspace, call.plan.workspace_bytes, workspace_bytes);
  // Those given; the others lie in the workspace, which is not placed yet.
  int64_t partials = int64_t{w.num_seqs} * p.num_heads_q * w.num_splits;
  memory.writes({"exp_sums", p.exp_sums, 4, {{partials, 1}}});
  memory.writes({"max_logits", p.max_logits, 4, {{partials, 1}}});
  memory.writes({"tmp_out", p.tmp_out, itemsize(p.dtype), {{partials * p.head_dim, 1}}});
  memory.reads(
      {p.latent.queries > 0 ? "topk_lens" : "context_lens", w.context_lens, 4, {{w.num_seqs, 1}}});
  memory.reads({call.params.latent.is_used ? "q_nope" : "q",
                p.q,
                itemsize(call.has_codes ? DType::e4m3 : p.dtype),
                {{call.q_shape[0], p.q_strides.batch},
                 {call.q_shape[1], p.q_strides.seq},
                 {p.num_heads_q, p.q_strides.head},
                 {p.head_dim, 1}}});
  memory.reads(cache_footprint(call.k_name, p, p.k_cache, p.k_strides));
  memory.reads(cache_footprint(call.v_name, p, p.v_cache, p.v_strides));
  const LatentParams& latent = p.latent;
  memory.reads({"q_pe",
                latent.q_rope,
                itemsize(p.dtype),
                {{call.q_shape[0], latent.q_strides.batch},
                 {call.q_shape[1], latent.q_strides.seq},
                 {p.num_heads_q, latent.q_strides.head},
                 {latent.rope_dim, 1}}});
  memory.reads({"kpe_cache",
                latent.rope_cache,
                itemsize(p.dtype),
                {{p.pages.num_blocks, latent.strides.block},
                 {p.pages.block_size, latent.strides.token},
                 {latent.rope_dim, 1}}});
  bool has_lists = latent.queries > 0;
  int64_t columns = (int64_t{w.capacity} + p.pages.block_size - 1) / p.pages.block_size;
  if (has_lists) columns = w.capacity;
  memory.reads({has_lists ? "indices" : "block_tables",
                p.pages.block_tables,
                4,
                {{w.num_seqs, p.pages.block_tables_stride}, {columns, 1}}});
  memory.reads(
      {"alibi_slopes",
       p.scores.alibi_slopes,
       4,
       {{w.num_seqs, p.scores.alibi_stride_batch}, {p.num_heads_q, p.scores.alibi_stride_head}}});
  memory.reads({"sinks", p.scores.sinks, 4, {{p.num_heads_q, p.scores.sinks_stride}}});
  auto read_scales = [&](const char* name, const float* data, int64_t batch, int64_t head) {
    memory.reads({name, data, 4, {{w.num_seqs, batch}, {w.num_heads_kv, head}}});
  };
  if (call.has_codes) memory.reads(scale_footprint("q_scale", call.q_scale));
  read_scales("k_scale", p.k_scales, p.k_scales_stride_batch, p.k_scales_stride_head);
  read_scales("v_scale", p.v_scales, p.v_scales_stride_batch, p.v_scales_stride_head);
  if (call.request.has_deal) memory.reads({"plan", w.deal, 4, {{PagedDeal::size(w), 1}}});
}

// The dtype of out, and with codes that of the numbers they become.
void read_out_dtype(PagedCall& call, const TensorView& out) {
  PagedParams& p = call.params;
  if (call.has_codes) {
    p.out_dtype = float8_out_dtype(call.function, out, DType::e4m3);
    p.dtype = p.out_dtype == DType::f16 ? DType::f16 : DType::bf16;
    return;
  }
  bool may_widen = call.request.partition_size == 0 && !call.request.one_pass && !p.latent.is_used;
  p.out_dtype = may_widen ? result_dtype(call.function, out, p.dtype, call.plan.kernel) : p.dtype;
}

// What only the device sees of lengths, tables and scales.
void check_data(const PagedCall& call, Stream stream) {
  const PagedParams& p = call.params;
  const Backend& backend = backend_of(call.function, call.device);
  if (is_cuda(call.device) && !checks_device_data()) return;
  if (call.q_scale.data != nullptr) {
    AttentionParams scales{};
    scales.float8.q = call.q_scale;
    backend.check(call.function, scales, call.device.device_id, stream);
  }
  bool has_tables = p.pages.block_tables != nullptr || p.work.num_seqs == 0;
  if (has_tables) backend.check_paged(call.function, p, call.device.device_id, stream);
}

// Codes of q become numbers at the end of the workspace, which the call reads from then on.
void make_queries(PagedCall& call, void* workspace, Stream stream) {
  PagedParams& p = call.params;
  const Plan& plan = call.plan;
  Codes codes{p.q,
              p.q_strides,
              1,
              DType::e4m3,
              call.q_scale,
              ScalePart::none,
              p.work.num_seqs,
              p.work.q_len,
              p.num_heads_q,
              p.head_dim};
  void* place = static_cast<char*>(workspace) + (plan.workspace_bytes - plan.numbers_bytes);
  p.q_strides = make_numbers(codes, p.dtype, place, backend_of(call.function, call.device),
                             call.device.device_id, stream);
  p.q = place;
}

// The call with the outputs in its params, once all is found right.
PagedCall with_outputs(PagedCall call, const TensorView& out, const TensorView* lse,
                       const void* workspace, size_t workspace_bytes, Stream stream) {
  const char* fn = call.function;
  PagedParams& p = call.params;
  PagedWork& w = p.work;
  TensorView want;
  want.ndim = call.is_decode ? 3 : 4;
  int32_t head = want.ndim - 2;
  want.shape[0] = call.q_shape[0];
  if (!call.is_decode) want.shape[1] = call.q_shape[1];
  want.shape[head] = p.num_heads_q;
  want.shape[head + 1] = p.head_dim;
  read_out_dtype(call, out);
  require_output(fn, "out", out, p.out_dtype, want, call.device);
  require_rows(fn, "out", out, true, true);
  p.out = out.data;
  p.out_strides = {stride_of(out, 0), call.is_decode ? 0 : stride_of(out, 1), stride_of(out, head)};
  p.lse = nullptr;
  if (lse != nullptr) {
    want.ndim -= 1;
    want.shape[1] = p.num_heads_q;
    want.shape[2] = call.q_shape[1];
    require_output(fn, "lse_out", *lse, DType::f32, want, call.device);
    require_strided(fn, "lse_out", *lse, true, true);
    p.lse = static_cast<float*>(lse->data);
    p.lse_strides = {stride_of(*lse, 0), call.is_decode ? 0 : stride_of(*lse, 2),
                     stride_of(*lse, 1)};
  }
  check_memory(call, out, lse, workspace, workspace_bytes);
  check_data(call, stream);
  if (out.size() != 0) require_workspace(fn, call.plan, call.device, workspace, workspace_bytes);
  return call;
}

}  // namespace

void run_step(PagedCall call, const Plan& plan, void* workspace, Stream stream) {
  call.plan = plan;
  cut_work(call);
  place_workspace(call, workspace);
  backend_of(call.function, call.device)
      .paged(call.params, call.plan, call.device.device_id, stream);
}

void check_paged(const PagedCall& call, const TensorView& out, const TensorView* lse,
                 const void* workspace, size_t workspace_bytes, Stream stream) {
  with_outputs(call, out, lse, workspace, workspace_bytes, stream);
}

void run_paged(PagedCall call, const TensorView& out, const TensorView* lse, void* workspace,
               size_t workspace_bytes, Stream stream) {
  call = with_outputs(call, out, lse, workspace, workspace_bytes, stream);
  if (out.size() == 0) return;
  place_workspace(call, workspace);
  if (call.has_codes) make_queries(call, workspace, stream);
  backend_of(call.function, call.device)
      .paged(call.params, call.plan, call.device.device_id, stream);
}

void run_paged_plan(PagedCall& call, const TensorView& plan, Stream stream) {
  PagedWork& w = call.params.work;
  require_contiguous(call, "out", plan, DType::i32, {PagedDeal::size(w)}, true);
  CallMemory memory(call.function);
  memory.writes({"out", plan});
  memory.reads({"context_lens", w.context_lens, 4, {{w.num_seqs, 1}}});
  const Backend& backend = backend_of(call.function, call.device);
  int32_t device = call.device.device_id;
  if (!is_cuda(call.device) || checks_device_data())
    backend.check_context_lens(call.function, w, device, stream);
  backend.paged_deal(w, static_cast<int32_t*>(plan.data), device, stream);
}

}  // namespace cuattn
