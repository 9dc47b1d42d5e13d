// SPDX-License-Identifier: Apache-2.0
// attention and attention_varlen in two steps: validate (arrays and options to AttentionParams) and
// run (outputs, launch). Between the two stand the plan (plan.cpp) and the caller's allocation of
// outputs and workspace.
#include "src/attention/call.h"

#include "src/cache/cache.h"
#include "src/check/overlap.h"
#include "src/check/validate.h"
#include "src/paged/call.h"

namespace cuattn {
namespace {

// Where each axis of an array lies: dense bshd or bhsd, or ragged [total, heads, dim].
struct Axes {
  int32_t ndim, batch, seq, head;  // batch = -1: ragged
  const char* names;
};

Axes axes_of(bool ragged, int32_t layout) {
  if (ragged) return {3, -1, 0, 1, "[total, num_heads, head_dim]"};
  if (layout == CUATTN_LAYOUT_BSHD) return {4, 0, 1, 2, "[batch, seqlen, num_heads, head_dim]"};
  return {4, 0, 2, 1, "[batch, num_heads, seqlen, head_dim]"};
}

Strides strides_of(const TensorView& view, const Axes& axes) {
  return {axes.batch < 0 ? 0 : stride_of(view, axes.batch), stride_of(view, axes.seq),
          stride_of(view, axes.head)};
}

// A ragged q over caches in blocks.
void read_paged_arrays(AttentionCall& call, const TensorView& q, const TensorView& k,
                       const TensorView& v, const cuattn_attention_options& o, bool check_data) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  CUATTN_REQUIRE(
      o.cu_seqlens_q != nullptr, fn,
      ": cu_seqlens_q must be given with block_tables, got none; pass int32 [batch + 1]");
  Axes axes = axes_of(true, call.layout);
  p.dtype = attention_dtype(fn, "q", q);
  require_rank(fn, "q", q, axes.ndim, axes.names);
  require_head_dim(fn, "q", "head_dim", q.shape[2], p.dtype);
  require_rows(fn, "q", q, false, check_data);
  if (k.is(DType::e4m3)) {
    fail<NotImplemented>(fn,
                         ": k is float8_e4m3fn, which chunked prefill has no kernel for yet; use "
                         "paged_attention, or a cache of q's dtype");
  }
  require_dtype(fn, "k", k, p.dtype, "q");
  call.pages = read_pages(fn, {"k", "v"}, k, v, view_of(fn, "block_tables", o.block_tables),
                          kv_layout_of(fn, o.kv_layout), p.dtype, call.device, "q", check_data);
  const CacheGatherParams& pages = call.pages;
  require_extent(fn, "k", "head_dim", pages.k.head_dim, q.shape[2], "q");
  require_head_dim(fn, "v", "head_dim_v", pages.v.head_dim, p.dtype);
  CUATTN_REQUIRE(pages.num_blocks > 0 || pages.num_seqs == 0, fn,
                 ": k must hold at least one block, got 0; allocate one");
  p.num_heads_q = checked_extent(fn, "q", "num_heads_q", q.shape[1]);
  p.num_heads_kv = pages.num_heads;
  require_heads(fn, p.num_heads_q, p.num_heads_kv);
  p.head_dim = static_cast<int32_t>(q.shape[2]);
  p.head_dim_v = pages.v.head_dim;
  p.total_q = q.shape[0];
  p.total_kv = int64_t{pages.max_blocks} * pages.block_size;  // of one sequence, until size_pages
  p.q = q.data;
  p.q_strides = strides_of(q, axes);
}

// q, k and v: ranks, dtypes, devices, extents, strides.
void read_arrays(AttentionCall& call, const TensorView& q, const TensorView& k, const TensorView& v,
                 bool check_data) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  Axes axes = axes_of(call.ragged, call.layout);
  const struct {
    const char* name;
    const TensorView& view;
  } arrays[] = {{"q", q}, {"k", k}, {"v", v}};
  p.dtype = attention_dtype(fn, "q", q);
  for (const auto& [name, view] : arrays) {
    require_rank(fn, name, view, axes.ndim, axes.names);
    require_dtype(fn, name, view, p.dtype, "q");
    require_device(fn, name, view, call.device);
  }
  int32_t dim = axes.ndim - 1;
  require_head_dim(fn, "q", "head_dim", q.shape[dim], p.dtype);
  require_extent(fn, "k", "head_dim", k.shape[dim], q.shape[dim], "q");
  require_head_dim(fn, "v", "head_dim_v", v.shape[dim], p.dtype);
  require_extent(fn, "v", "num_heads_kv", v.shape[axes.head], k.shape[axes.head], "k");
  require_extent(fn, "v", call.ragged ? "total" : "seqlen_kv", v.shape[axes.seq], k.shape[axes.seq],
                 "k");
  if (axes.batch >= 0) {
    require_extent(fn, "k", "batch", k.shape[axes.batch], q.shape[axes.batch], "q");
    require_extent(fn, "v", "batch", v.shape[axes.batch], q.shape[axes.batch], "q");
    p.batch = checked_extent(fn, "q", "batch", q.shape[axes.batch]);
    p.seqlen_q = checked_length(fn, "q", "seqlen_q", q.shape[axes.seq]);
    p.seqlen_kv = checked_length(fn, "k", "seqlen_kv", k.shape[axes.seq]);
    call.max_seqlen_q = p.seqlen_q;
    call.max_seqlen_kv = p.seqlen_kv;
  }
  p.num_heads_q = checked_extent(fn, "q", "num_heads_q", q.shape[axes.head]);
  p.num_heads_kv = checked_extent(fn, "k", "num_heads_kv", k.shape[axes.head]);
  require_heads(fn, p.num_heads_q, p.num_heads_kv);
  p.head_dim = static_cast<int32_t>(q.shape[dim]);
  p.head_dim_v = static_cast<int32_t>(v.shape[dim]);
  p.total_q = call.ragged ? q.shape[0] : int64_t{p.batch} * p.seqlen_q;
  p.total_kv = call.ragged ? k.shape[0] : int64_t{p.batch} * p.seqlen_kv;
  for (const auto& [name, view] : arrays) require_rows(fn, name, view, false, check_data);
  p.q = q.data;
  p.k = k.data;
  p.v = v.data;
  p.q_strides = strides_of(q, axes);
  p.k_strides = strides_of(k, axes);
  p.v_strides = strides_of(v, axes);
}

// An int32 vector of lengths or offsets: contiguous, on the device of q.
const int32_t* read_lengths(const AttentionCall& call, const char* name, const DLTensor* tensor,
                            int64_t extent, const char* axis, bool check_data) {
  if (tensor == nullptr) return nullptr;
  return static_cast<const int32_t*>(read_vector(call.function(), name,
                                                 view_of(call.function(), name, tensor), DType::i32,
                                                 extent, axis, call.device, "q", check_data));
}

void read_ragged(AttentionCall& call, const cuattn_attention_options& o, bool check_data) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  bool has_lengths = o.cu_seqlens_k != nullptr || (call.paged && o.seqused_k != nullptr);
  CUATTN_REQUIRE(o.cu_seqlens_q != nullptr && has_lengths, fn,
                 ": cu_seqlens_q and cu_seqlens_k must both be given, got one; pass int32 [batch + "
                 "1] for each",
                 call.paged ? ", or seqused_k [batch]" : "");
  TensorView begins = view_of(fn, "cu_seqlens_q", o.cu_seqlens_q);
  CUATTN_REQUIRE(begins.ndim == 1 && begins.shape[0] >= 1, fn,
                 ": cu_seqlens_q must have shape (batch + 1,), got ", shape_text(begins),
                 "; start it with 0");
  p.batch = checked_extent(fn, "cu_seqlens_q", "batch", begins.shape[0] - 1);
  p.cu_seqlens_q = read_lengths(call, "cu_seqlens_q", o.cu_seqlens_q, p.batch + int64_t{1},
                                "batch + 1", check_data);
  p.cu_seqlens_kv = read_lengths(call, "cu_seqlens_k", o.cu_seqlens_k, p.batch + int64_t{1},
                                 "batch + 1", check_data);
  CUATTN_REQUIRE(o.max_seqlen_q >= 0, fn, ": max_seqlen_q must be >= 0, got ", o.max_seqlen_q,
                 "; pass an upper bound of the query lengths");
  CUATTN_REQUIRE(o.max_seqlen_k >= 0, fn, ": max_seqlen_k must be >= 0, got ", o.max_seqlen_k,
                 "; pass an upper bound of the key lengths");
  call.max_seqlen_q = o.max_seqlen_q;
  call.max_seqlen_kv = o.max_seqlen_k;
  // No sequence is longer than all rows together; a generous bound costs no empty tiles.
  int64_t longest_q = o.max_seqlen_q < p.total_q ? o.max_seqlen_q : p.total_q;
  int64_t longest_kv = o.max_seqlen_k < p.total_kv ? o.max_seqlen_k : p.total_kv;
  p.seqlen_q = checked_length(fn, "q", "max_seqlen_q", longest_q);
  p.seqlen_kv = checked_length(fn, "k", "max_seqlen_k", longest_kv);
}

// Should the keys be gathered: end to end where cu_seqlens_k is given, else seqlen_kv rows a
// sequence.
void size_pages(AttentionCall& call) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  CacheGatherParams& g = call.pages;
  require_extent(fn, "block_tables", "num_seqs", g.num_seqs, p.batch, "cu_seqlens_q");
  p.total_kv = int64_t{p.batch} * p.seqlen_kv;
  g.num_tokens = p.total_kv;
  g.cu_seqlens = p.cu_seqlens_kv;
  g.padded_len = p.seqlen_kv;
  g.seqused = p.seqused_kv;
  for (CacheSide* side : {&g.k, &g.v}) {
    side->row_head = side->head_dim;
    side->row_token = int64_t{p.num_heads_kv} * side->head_dim;
  }
}

// Bytes of the gathered rows of one side, in whole pieces of 256.
size_t page_bytes(const AttentionCall& call, const CacheSide& side) {
  size_t bytes = checked_bytes(call.function(),
                               {call.params.total_kv, side.row_token, itemsize(call.params.dtype)});
  return (bytes + 255) / 256 * 256;
}

void read_mask(AttentionCall& call, const cuattn_attention_options& o) {
  AttentionParams& p = call.params;
  require_window(call.function(), o.window_left, o.window_right);
  int64_t right = o.causal ? 0 : o.window_right;
  p.mask = {window_side(o.window_left, p.seqlen_kv), window_side(right, p.seqlen_q)};
}

// Broadcast from the right, as numpy does, to [batch, num_heads_q, seqlen_q, seqlen_kv].
void read_bias(AttentionCall& call, const DLTensor* tensor, bool check_data) {
  if (tensor == nullptr) return;
  const char* fn = call.function();
  AttentionParams& p = call.params;
  TensorView view = view_of(fn, "bias", tensor);
  require_device(fn, "bias", view, call.device);
  if (view.is(DType::boolean)) {
    p.scores.bias_dtype = DType::boolean;
  } else {
    p.scores.bias_dtype = view.is(DType::f32) ? DType::f32 : p.dtype;
    CUATTN_REQUIRE(view.is(p.scores.bias_dtype), fn,
                   ": bias must be float32, bool or the dtype of q (", dtype_name(p.dtype),
                   "), got ", text(view.dtype), "; cast it");
  }
  const int64_t full[4] = {p.batch, p.num_heads_q, call.max_seqlen_q, call.max_seqlen_kv};
  int64_t strides[4] = {0, 0, 0, 0};
  bool broadcasts = view.ndim <= 4;
  for (int32_t axis = 0; broadcasts && axis < view.ndim; ++axis) {
    int32_t to = 4 - view.ndim + axis;
    broadcasts = view.shape[axis] == full[to] || view.shape[axis] == 1;
    strides[to] = stride_of(view, axis);
  }
  CUATTN_REQUIRE(broadcasts, fn,
                 ": bias must broadcast to [batch, num_heads_q, seqlen_q, seqlen_kv] = (", full[0],
                 ", ", full[1], ", ", full[2], ", ", full[3], "), got ", shape_text(view),
                 "; add axes of extent 1 where it is shared");
  require_strided(fn, "bias", view, false, check_data);
  p.scores.bias = view.data;
  p.scores.bias_stride_batch = strides[0];
  p.scores.bias_stride_head = strides[1];
  p.scores.bias_stride_q = strides[2];
  p.scores.bias_stride_kv = strides[3];
}

void read_scores(AttentionCall& call, const cuattn_attention_options& o, bool check_data) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  p.scores.scale = read_scale(fn, o.has_scale, o.scale, p.head_dim);
  p.scores.softcap = read_softcap(fn, o.softcap);
  p.scores.inv_softcap = inverse_softcap(p.scores.softcap, p.scores.scale);
  auto heads = [&](const char* name, const DLTensor* tensor, const char* batch_axis) {
    return read_heads(fn, name, tensor, "num_heads_q", p.num_heads_q, batch_axis, p.batch,
                      call.device, check_data);
  };
  HeadVector slopes = heads("alibi_slopes", o.alibi_slopes, "batch");
  p.scores.alibi_slopes = slopes.data;
  p.scores.alibi_stride_batch = slopes.stride_batch;
  p.scores.alibi_stride_head = slopes.stride_head;
  read_bias(call, o.bias, check_data);
  HeadVector sinks = heads("sinks", o.sinks, nullptr);
  p.scores.sinks = sinks.data;
  p.scores.sinks_stride = sinks.stride_head;
  // A scale that is not positive turns the running maximum around: the scored kernels apply it
  // before the maximum.
  bool scored = p.scores.softcap > 0.0f || o.alibi_slopes != nullptr || o.bias != nullptr ||
                !is_plain_scale(p.scores.scale);
  p.scores.kind = scored ? ScoreKind::scored : ScoreKind::identity;
}

}  // namespace

AttentionCall validate_attention(const TensorView& q, const TensorView& k, const TensorView& v,
                                 const cuattn_attention_options& o, bool check_data) {
  AttentionCall call{};
  call.paged = o.block_tables != nullptr;
  call.ragged = o.cu_seqlens_q != nullptr || o.cu_seqlens_k != nullptr || call.paged;
  call.layout = o.layout;
  call.uses_seqused = o.seqused_q != nullptr || o.seqused_k != nullptr;
  call.may_step = call.paged && o.seqused_k != nullptr && o.cu_seqlens_k == nullptr &&
                  o.seqused_q == nullptr && o.bias == nullptr && !o.batch_invariant;
  call.has_sinks = o.sinks != nullptr;
  call.has_bias = o.bias != nullptr;
  call.batch_invariant = o.batch_invariant != 0;
  call.device = q.device;
  const char* fn = call.function();
  require_known_device(fn, "q", call.device);
  CUATTN_REQUIRE(o.layout == CUATTN_LAYOUT_BSHD || o.layout == CUATTN_LAYOUT_BHSD, fn,
                 ": layout must be 'bshd' or 'bhsd', got ", layout_text(o.layout),
                 "; choose one of these");
  if (call.paged) {
    read_paged_arrays(call, q, k, v, o, check_data);
  } else {
    read_arrays(call, q, k, v, check_data);
  }
  if (call.ragged) read_ragged(call, o, check_data);
  AttentionParams& p = call.params;
  p.seqused_q = read_lengths(call, "seqused_q", o.seqused_q, p.batch, "batch", check_data);
  p.seqused_kv = read_lengths(call, "seqused_k", o.seqused_k, p.batch, "batch", check_data);
  if (call.paged) size_pages(call);
  read_mask(call, o);
  read_scores(call, o, check_data);
  if (o.num_splits < 0) {
    fail<InvalidArgument>(fn, ": num_splits must be >= 0, got ", o.num_splits,
                          "; pass 0 to let cuattn choose");
  }
  call.num_splits = o.num_splits;
  return call;
}

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
  r.score = p.scores.kind;
  r.has_sinks = call.has_sinks;
  r.batch_invariant = call.batch_invariant;
  r.has_bias = call.has_bias;
  r.has_bias_map = call.has_bias && has_bias_map(p);
  r.num_splits = call.num_splits;
  r.paged = call.paged;
  r.kv_layout = call.pages.kv_layout;
  r.block_size = call.pages.block_size;
  return r;
}

namespace {

// The call as a step of paged_attention.
PagedCall step_of(const AttentionCall& call) {
  const AttentionParams& p = call.params;
  const CacheGatherParams& g = call.pages;
  PagedCall step{};
  step.function = call.function();
  step.device = call.device;
  PagedParams& to = step.params;
  PagedWork& w = to.work;
  w.context_lens = p.seqused_kv;
  w.num_seqs = p.batch;
  w.q_len = p.seqlen_q;
  w.num_heads_kv = p.num_heads_kv;
  w.group = p.num_heads_q / p.num_heads_kv;
  w.capacity = p.seqlen_kv;
  w.mask = p.mask;
  to.q = p.q;
  to.out = p.out;
  to.lse = p.lse;
  to.k_cache = g.k.cache;
  to.v_cache = g.v.cache;
  to.q_strides = p.q_strides;
  to.out_strides = p.out_strides;
  to.lse_strides = p.lse_strides;
  to.cu_seqlens_q = p.cu_seqlens_q;
  to.total_q = p.total_q;
  to.k_strides = g.k.strides;
  to.v_strides = g.v.strides;
  to.dtype = to.kv_dtype = p.dtype;
  to.kv_layout = g.kv_layout;
  to.num_heads_q = p.num_heads_q;
  to.head_dim = p.head_dim;
  to.pages = {g.block_tables, g.block_tables_stride, g.num_blocks, g.block_size};
  to.scores = p.scores;
  to.k_scale = to.v_scale = 1.0f;
  return step;
}

// Few queries a sequence are a decode step: the keys are read once, in their blocks and in parts,
// as long as a few passes over them serve all the rows that share a kv head.
constexpr int32_t kMaxStepRows = 64, kMaxStepPasses = 4;

bool plans_step(const AttentionCall& call, const DeviceInfo& device, Plan& plan) {
  const AttentionParams& p = call.params;
  if (!call.may_step || p.head_dim != p.head_dim_v || p.total_q == 0 || p.num_heads_q == 0 ||
      p.batch == 0)
    return false;
  int64_t rows = int64_t{p.seqlen_q} * (p.num_heads_q / p.num_heads_kv);
  if (rows > kMaxStepRows) return false;
  plan = plan_step(step_of(call), call.num_splits, device);
  plan.keys = KeyAccess::by_step;
  return rows <= int64_t{kMaxStepPasses} * plan.tile.m;
}

}  // namespace

Plan plan_of(const AttentionCall& call, const DeviceInfo& device, const char* backend) {
  Plan plan{};
  if (is_auto(backend) && plans_step(call, device, plan)) return plan;
  plan = select_attention(request_of(call), device, backend);
  if (plan.keys == KeyAccess::gathered) {
    plan.workspace_bytes += page_bytes(call, call.pages.k) + page_bytes(call, call.pages.v);
  }
  return plan;
}

std::string ladder_of(const AttentionCall& call, const DeviceInfo& device, const char* backend,
                      const Plan& plan) {
  if (plan.keys != KeyAccess::by_step) return explain_attention(request_of(call), device, backend);
  return ladder_of_step(step_of(call), device, plan);
}

namespace {

// Copies the keys out of their blocks; returns the workspace that is left for the kernel.
void* gather_pages(AttentionCall& call, void* workspace, Stream stream) {
  AttentionParams& p = call.params;
  CacheGatherParams& g = call.pages;
  auto* place = static_cast<char*>(workspace);
  auto take = [&](CacheSide& side, Strides& strides) {
    side.rows = place;
    strides = {g.cu_seqlens != nullptr ? 0 : p.seqlen_kv * side.row_token, side.row_token,
               side.row_head};
    place += page_bytes(call, side);
    return side.rows;
  };
  p.k = take(g.k, p.k_strides);
  p.v = take(g.v, p.v_strides);
  if (p.total_kv > 0 && p.num_heads_kv > 0) {
    backend_of(call.function(), call.device).cache_gather(g, call.device.device_id, stream);
  }
  return place;
}

// For a kernel that follows the block tables.
void point_at_pages(AttentionCall& call) {
  AttentionParams& p = call.params;
  const CacheGatherParams& g = call.pages;
  p.pages = {g.block_tables, g.block_tables_stride, g.num_blocks, g.block_size};
  p.k = g.k.cache;
  p.v = g.v.cache;
  p.k_strides = {g.k.strides.block, g.k.strides.token, g.k.strides.head};
  p.v_strides = {g.v.strides.block, g.v.strides.token, g.v.strides.head};
}

AttentionSchedule schedule_of(const Plan& plan, void* workspace) {
  return {plan.tile,     plan.num_splits,  plan.packed_heads,
          plan.num_ctas, plan.draws_tiles, workspace};
}

// What is written lies apart from all else.
void check_memory(const AttentionCall& call, const TensorView& out, const TensorView* lse,
                  const void* workspace) {
  const AttentionParams& p = call.params;
  int64_t item = itemsize(p.dtype), bytes = static_cast<int64_t>(call.plan.workspace_bytes);
  CallMemory memory(call.function());
  memory.writes({"out", out});
  if (lse != nullptr) memory.writes({"lse_out", *lse});
  memory.writes({"workspace", workspace, 1, {{bytes, 1}}});

  auto read_rows = [&](const char* name, const void* data, const Strides& strides, int64_t rows,
                       int64_t heads, int64_t dim) {
    int64_t batch = call.ragged ? 1 : p.batch;
    memory.reads({name,
                  data,
                  item,
                  {{batch, strides.batch}, {rows, strides.seq}, {heads, strides.head}, {dim, 1}}});
  };
  read_rows("q", p.q, p.q_strides, call.ragged ? p.total_q : p.seqlen_q, p.num_heads_q, p.head_dim);
  if (call.paged) {
    const CacheGatherParams& g = call.pages;
    memory.reads(cache_footprint("k", g.k, g, g.dtype));
    memory.reads(cache_footprint("v", g.v, g, g.dtype));
    memory.reads(tables_footprint(g));
  } else {
    int64_t rows = call.ragged ? p.total_kv : p.seqlen_kv;
    read_rows("k", p.k, p.k_strides, rows, p.num_heads_kv, p.head_dim);
    read_rows("v", p.v, p.v_strides, rows, p.num_heads_kv, p.head_dim_v);
  }
  memory.reads({"cu_seqlens_q", p.cu_seqlens_q, 4, {{p.batch + int64_t{1}, 1}}});
  memory.reads({"cu_seqlens_k", p.cu_seqlens_kv, 4, {{p.batch + int64_t{1}, 1}}});
  memory.reads({"seqused_q", p.seqused_q, 4, {{p.batch, 1}}});
  memory.reads({"seqused_k", p.seqused_kv, 4, {{p.batch, 1}}});
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
  require_output(fn, "out", out, p.dtype, shape_view(out_shape, axes.ndim), call.device);
  require_rows(fn, "out", out, true, true);
  p.out = out.data;
  p.out_strides = strides_of(out, axes);
  p.lse = nullptr;
  if (lse != nullptr) {
    require_output(fn, "lse_out", *lse, DType::f32, shape_view(lse_shape, axes.ndim - 1),
                   call.device);
    require_strided(fn, "lse_out", *lse, true, true);
    p.lse = static_cast<float*>(lse->data);
    p.lse_strides = call.ragged
                        ? Strides{0, stride_of(*lse, 1), stride_of(*lse, 0)}
                        : Strides{stride_of(*lse, 0), stride_of(*lse, 2), stride_of(*lse, 1)};
  }

  check_memory(call, out, lse, workspace);
  bool cuda = is_cuda(call.device);
  const Backend& backend = backend_of(fn, call.device);
  if (call.paged) check_pages(fn, call.pages, call.device, stream);
  if ((call.ragged || call.uses_seqused) && (!cuda || checks_device_data()))
    backend.check(p, call.device.device_id, stream);
  if (out.size() == 0 || p.batch == 0 || p.seqlen_q == 0) return;

  require_workspace(fn, call.plan, call.device, workspace, workspace_bytes);
  if (call.plan.keys == KeyAccess::by_step)
    return run_step(step_of(call), call.plan, workspace, stream);
  if (call.plan.keys == KeyAccess::gathered) {
    workspace = gather_pages(call, workspace, stream);
  } else if (call.plan.keys == KeyAccess::in_blocks) {
    point_at_pages(call);
  }
  backend.attention(p, schedule_of(call.plan, workspace), call.plan, call.device.device_id, stream);
}

}  // namespace cuattn
