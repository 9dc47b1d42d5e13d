// SPDX-License-Identifier: Apache-2.0
// attention and attention_varlen: arrays and options to AttentionParams. Next: call.cpp (plan and
// run), check/ (the rules).
#include <cmath>
#include <limits>
#include <utility>

#include "src/attention/call.h"
#include "src/attention/pages.h"
#include "src/cache/cache.h"
#include "src/check/axes.h"
#include "src/check/bias.h"
#include "src/check/float8.h"
#include "src/check/options.h"
#include "src/options.h"

namespace cuattn {
namespace {

// Sets the dtypes of a call over pages, of q and of out; returns that of the caches.
DType read_paged_dtypes(AttentionCall& call, const TensorView& q, const TensorView& k) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  bool is_float8 = k.is(DType::e4m3);
  if (call.kind == CallKind::attention && q.is(DType::e4m3)) {
    CUATTN_REQUIRE(is_float8, fn, ": k must be float8_e4m3fn like q, got ", text(k.dtype),
                   "; give q in the dtype of the caches");
    p.dtype = DType::e4m3;
    p.out_dtype = DType::bf16;
    return DType::e4m3;
  }
  p.dtype = p.out_dtype = attention_dtype(fn, "q", q);
  if (!is_float8) return p.dtype;
  if (call.kind != CallKind::attention) {
    fail<NotImplemented>(fn,
                         ": k is float8_e4m3fn, over which masks and scores written by the user "
                         "have no kernel yet; use a cache of q's dtype");
  }
  CUATTN_REQUIRE(p.dtype != DType::f32, fn,
                 ": q must be float16 or bfloat16 over float8_e4m3fn caches, got float32; cast it");
  return DType::e4m3;
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
  DType stored = read_paged_dtypes(call, q, k);
  p.v_channel_stride = 1;
  require_rank(fn, "q", q, axes.ndim, axes.names);
  require_head_dim(fn, "q", "head_dim", q.shape[2], stored);
  require_rows(fn, "q", q, false, check_data);
  require_dtype(fn, "k", k, stored, "q");
  call.gather = read_pages(fn, {"k", "v"}, k, v, view_of(fn, "block_tables", o.block_tables),
                           kv_layout_of(fn, o.kv_layout), stored, call.device, "q", check_data);
  CacheGatherParams& g = call.gather;
  g.makes_numbers = stored != p.dtype;
  g.number_dtype = p.dtype;
  require_extent(fn, "k", "head_dim", g.k.head_dim, q.shape[2], "q");
  require_head_dim(fn, "v", "head_dim_v", g.v.head_dim, stored);
  CUATTN_REQUIRE(g.pages.num_blocks > 0 || g.num_seqs == 0, fn,
                 ": k must hold at least one block, got 0; allocate one");
  p.num_heads_q = checked_extent(fn, "q", "num_heads_q", q.shape[1]);
  p.num_heads_kv = g.num_heads;
  require_heads(fn, p.num_heads_q, p.num_heads_kv);
  p.head_dim = static_cast<int32_t>(q.shape[2]);
  p.head_dim_v = g.v.head_dim;
  p.total_q = q.shape[0];
  p.total_kv = int64_t{g.max_blocks} * g.pages.block_size;  // of one sequence, until size_pages
  p.q = q.data;
  p.q_strides = strides_of(q, axes);
}

// Sets the dtypes of a call over rows: of q, k and v, and of out.
void read_dtypes(AttentionCall& call, const TensorView& q, const TensorView& k,
                 const TensorView& v) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  int count = q.is(DType::e4m3) + k.is(DType::e4m3) + v.is(DType::e4m3);
  bool has_int8 = q.is(DType::i8) || k.is(DType::i8);
  if (call.kind != CallKind::attention || (count == 0 && !has_int8)) {
    p.dtype = p.out_dtype = attention_dtype(fn, "q", q);
    return;
  }
  p.out_dtype = DType::bf16;
  if (has_int8) {
    CUATTN_REQUIRE(q.is(DType::i8) && k.is(DType::i8) && count == 1, fn,
                   ": int8 q and k must come together, with v of float8_e4m3fn, got ",
                   text(q.dtype), ", ", text(k.dtype), " and ", text(v.dtype),
                   "; make all three with cuattn.quantize(mode='int8')");
    p.dtype = DType::i8;
    return;
  }
  CUATTN_REQUIRE(count == 3, fn, ": q, k and v must all be float8_e4m3fn or none of them, got ",
                 text(q.dtype), ", ", text(k.dtype), " and ", text(v.dtype),
                 "; make all three with cuattn.quantize, or take paged_attention, which has 16-bit "
                 "q over float8 caches");
  p.dtype = DType::e4m3;
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
  read_dtypes(call, q, k, v);
  for (const auto& [name, view] : arrays) {
    require_rank(fn, name, view, axes.ndim, axes.names);
    require_dtype(fn, name, view, *name == 'v' ? value_dtype(p.dtype) : p.dtype, "q");
    require_device(fn, name, view, call.device);
  }
  int32_t dim = axes.ndim - 1;
  require_head_dim(fn, "q", "head_dim", q.shape[dim], p.dtype, kMostForwardDim);
  require_extent(fn, "k", "head_dim", k.shape[dim], q.shape[dim], "q");
  require_head_dim(fn, "v", "head_dim_v", v.shape[dim], p.dtype, kMostForwardDim);
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
  require_rows(fn, "q", q, false, check_data);
  require_rows(fn, "k", k, false, check_data);
  p.v_channel_stride = 1;
  if (is_code(p.dtype)) {
    p.v_channel_stride = require_values(fn, "v", v, axes.seq, false, check_data);
  } else {
    require_rows(fn, "v", v, false, check_data);
  }
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

// The scales of float8 arrays; those of others must be left out.
void read_scales(AttentionCall& call, const cuattn_attention_options& o, bool check_data) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  CacheGatherParams& g = call.gather;
  const bool pages = g.makes_numbers;  // k and v alone are float8, by heads
  const DType stored = pages ? DType::e4m3 : p.dtype;
  p.float8.k = p.float8.v = {nullptr, 1.0f, 1, {1, 1, 1}, {0, 0, 0}};
  auto blocks = [](int64_t rows) { return (rows + kScaleRows - 1) / kScaleRows; };
  int32_t group = p.num_heads_kv > 0 ? p.num_heads_q / p.num_heads_kv : 1;
  const struct {
    ScaleShape shape;
    double number;
    const DLTensor* tensor;
    Float8Scale& scale;
    DType dtype;
  } scales[] = {
      {{"q_scale", p.batch, p.num_heads_kv, p.num_heads_q, blocks(call.max_seqlen_q),
        "(batch, num_heads_q, ceil(seqlen_q / 128))", group > 0 ? group : 1},
       o.q_scale,
       o.q_scales,
       p.float8.q,
       p.dtype},
      {{"k_scale", p.batch, p.num_heads_kv, p.num_heads_kv, blocks(call.max_seqlen_kv),
        pages ? nullptr : "(batch, num_heads_kv, ceil(seqlen_kv / 128))", 1},
       o.k_scale,
       o.k_scales,
       pages ? g.k_scale : p.float8.k,
       stored},
      {{"v_scale", p.batch, p.num_heads_kv, p.num_heads_kv, p.head_dim_v,
        pages ? nullptr : "(batch, num_heads_kv, head_dim_v)", 1},
       o.v_scale,
       o.v_scales,
       pages ? g.v_scale : p.float8.v,
       stored},
  };
  for (const auto& [shape, number, tensor, scale, dtype] : scales) {
    CUATTN_REQUIRE(is_code(dtype) || (tensor == nullptr && number == 1.0), fn, ": ", shape.name,
                   " belongs to float8_e4m3fn arrays, these are ", dtype_name(dtype),
                   "; leave it out, or make float8 arrays with cuattn.quantize");
    scale = read_float8_scale(fn, shape, number, tensor, call.device, check_data);
  }
  const DLTensor* given[] = {o.q_scales, o.k_scales, o.v_scales};
  for (int32_t array : {0, 1, 2})
    call.scale_axes[array] = given[array] != nullptr ? given[array]->ndim : 0;
}

// How products of codes are summed; those of other numbers have one way.
void read_accumulate(AttentionCall& call, const cuattn_attention_options& o) {
  const char* fn = call.function();
  require_nothing_reserved(fn, o.reserved);
  call.is_fast = o.accumulate == CUATTN_ACCUMULATE_FAST;
  CUATTN_REQUIRE(call.is_fast || o.accumulate == CUATTN_ACCUMULATE_EXACT, fn,
                 ": accumulate must be 'exact' or 'fast', 0 or 1 in C, got ", o.accumulate,
                 "; choose one of these");
  CUATTN_REQUIRE(!call.is_fast || is_code(call.params.dtype), fn,
                 ": accumulate must be 'exact' for ", dtype_name(call.params.dtype),
                 " q, got 'fast'; leave it out, or quantise q, k and v with cuattn.quantize");
}

// Broadcast from the right, as numpy does, to [batch, num_heads_q, seqlen_q, seqlen_kv].
void read_bias(AttentionCall& call, const DLTensor* tensor, bool check_data) {
  if (tensor == nullptr) return;
  const char* fn = call.function();
  const AttentionParams& p = call.params;
  ScoreParams& s = call.params.scores;
  TensorView view = view_of(fn, "bias", tensor);
  require_device(fn, "bias", view, call.device);
  if (view.is(DType::boolean)) {
    s.bias_dtype = DType::boolean;
  } else {
    s.bias_dtype = view.is(DType::f32) ? DType::f32 : p.dtype;
    CUATTN_REQUIRE(view.is(DType::f32) || !is_code(p.dtype), fn,
                   ": bias must be float32 or bool for ", dtype_name(p.dtype), " q, got ",
                   text(view.dtype), "; cast it");
    CUATTN_REQUIRE(view.is(s.bias_dtype), fn, ": bias must be float32, bool or the dtype of q (",
                   dtype_name(p.dtype), "), got ", text(view.dtype), "; cast it");
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
  if (check_data && s.bias_dtype != DType::boolean && is_cpu(call.device) && checks_device_data())
    refuse_zero_one(fn, view);
  s.bias = view.data;
  s.bias_stride_batch = strides[0];
  s.bias_stride_head = strides[1];
  s.bias_stride_q = strides[2];
  s.bias_stride_kv = strides[3];
}

// Where the first row, key and head of a call stand in the greater one whose part it is.
void read_dropout_places(AttentionCall& call, const cuattn_attention_options& o) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const std::pair<const char*, int64_t> places[] = {{"dropout_row", o.dropout_row},
                                                    {"dropout_key", o.dropout_key},
                                                    {"dropout_head", o.dropout_head}};
  for (auto [name, place] : places) {
    CUATTN_REQUIRE(place >= 0 && place <= kMost, fn, ": ", name, " must lie in [0, 2^31), got ",
                   place, "; it says where this part of a greater call begins");
  }
  CUATTN_REQUIRE(
      o.dropout_heads == 0 || (o.dropout_heads >= p.num_heads_q && o.dropout_heads <= kMost), fn,
      ": dropout_heads must lie in [num_heads_q, 2^31) = [", p.num_heads_q, ", 2^31) or be 0, got ",
      o.dropout_heads, "; it counts the heads of the call whose part this is");
  int64_t heads = o.dropout_heads != 0 ? o.dropout_heads : p.num_heads_q;
  int64_t first = heads > 0 ? o.dropout_head % heads : 0;  // of its sequence there
  CUATTN_REQUIRE(first + p.num_heads_q <= heads, fn,
                 ": dropout_head must leave all heads of the call, ", p.num_heads_q,
                 ", among the dropout_heads of one sequence, ", heads, ", got ", o.dropout_head,
                 ", which is head ", first,
                 " of its sequence; pass dropout_heads, the heads of a sequence of the greater "
                 "call, and dropout_head = sequence * dropout_heads + head");
  p.dropout.first_row = static_cast<uint32_t>(o.dropout_row);
  p.dropout.first_key = static_cast<uint32_t>(o.dropout_key);
  p.dropout.first_head = static_cast<uint32_t>(o.dropout_head);
  if (o.dropout_heads != 0) p.dropout.num_heads = static_cast<uint32_t>(o.dropout_heads);
}

void read_dropout(AttentionCall& call, const cuattn_attention_options& o, bool check_data) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  CUATTN_REQUIRE(o.dropout_p >= 0.0 && o.dropout_p < 1.0, fn,
                 ": dropout_p must lie in [0, 1), got ", o.dropout_p,
                 "; it is the share of probabilities that are dropped");
  p.dropout.num_heads = static_cast<uint32_t>(p.num_heads_q);
  if (o.dropout_p == 0.0) return;
  read_dropout_places(call, o);
  CUATTN_REQUIRE(o.dropout_seed >= -1, fn, ": dropout_seed must lie in [0, 2^63), got ",
                 o.dropout_seed, "; pass another");
  CUATTN_REQUIRE((o.dropout_seed >= 0) != (o.dropout_state != nullptr), fn,
                 ": dropout_seed or dropout_state must be given with dropout_p > 0, got ",
                 o.dropout_seed >= 0 ? "both" : "none",
                 "; pass an integer, or int64 [2] that holds seed and offset");
  CUATTN_REQUIRE(o.dropout_offset >= 0 && o.dropout_offset <= kMaxDropoutOffset, fn,
                 ": dropout_offset must lie in [0, 2^32), got ", o.dropout_offset,
                 "; count calls, and change the seed when they are used up");
  int64_t heads = o.dropout_head + int64_t{p.batch} * p.dropout.num_heads;
  CUATTN_REQUIRE(heads <= kMaxDropoutOffset, fn,
                 ": dropout_p must be 0 for 2^32 heads and more, got dropout_head + batch * heads ",
                 heads, "; split the call");
  auto kept = static_cast<int32_t>(std::lround(256.0 * (1.0 - o.dropout_p)));
  p.dropout.dropped = 256 - (kept > 1 ? kept : 1);
  p.dropout.seed = static_cast<uint64_t>(o.dropout_seed);
  p.dropout.offset = static_cast<uint32_t>(o.dropout_offset);
  if (o.dropout_state == nullptr) return;
  p.dropout.state = static_cast<const int64_t*>(
      read_vector(fn, "dropout_state", view_of(fn, "dropout_state", o.dropout_state), DType::i64, 2,
                  "seed and offset", call.device, "q", check_data));
}

// Whether an array's last axes are these, or 1 where `broadcasts`.
bool ends_in(const DLTensor* array, int32_t count, const int64_t* extents, bool broadcasts) {
  if (array == nullptr || array->shape == nullptr) return true;
  for (int32_t i = 1; i <= count && i <= array->ndim; ++i) {
    int64_t got = array->shape[array->ndim - i];
    if (got != extents[count - i] && !(broadcasts && got == 1)) return false;
  }
  return true;
}

// Whether the shapes of a dense call agree when their axes are read so.
bool agree(const TensorView& q, const TensorView& k, const TensorView& v,
           const cuattn_attention_options& o, const Axes& axes) {
  int64_t heads = q.shape[axes.head], heads_kv = k.shape[axes.head];
  const int64_t scores[] = {heads, q.shape[axes.seq], k.shape[axes.seq]};
  return q.shape[0] == k.shape[0] && q.shape[0] == v.shape[0] && q.shape[3] == k.shape[3] &&
         k.shape[axes.seq] == v.shape[axes.seq] && heads_kv == v.shape[axes.head] && heads_kv > 0 &&
         heads % heads_kv == 0 && ends_in(o.bias, 3, scores, true) &&
         ends_in(o.sinks, 1, scores, false) && ends_in(o.alibi_slopes, 1, scores, false);
}

// Behind a refusal: that the shapes agree in the other layout, if they do, and not in the given.
std::string other_layout(const TensorView& q, const TensorView& k, const TensorView& v,
                         const cuattn_attention_options& o) {
  bool is_bshd = o.layout == CUATTN_LAYOUT_BSHD;
  int32_t other = is_bshd ? CUATTN_LAYOUT_BHSD : CUATTN_LAYOUT_BSHD;
  Axes axes = axes_of(false, other);
  bool is_known = is_bshd || o.layout == CUATTN_LAYOUT_BHSD;
  bool is_meant = is_known && q.ndim == 4 && k.ndim == 4 && v.ndim == 4 &&
                  agree(q, k, v, o, axes) && !agree(q, k, v, o, axes_of(false, o.layout));
  if (!is_meant) return {};
  return concat("; read as ", axes.names, " the shapes agree: pass layout=", layout_text(other));
}

// What `dtype` says of bytes. Over pages q may have more bits than they.
TensorView as_told(const char* fn, const char* name, const TensorView& view,
                   const cuattn_attention_options& o, bool is_paged_q = false) {
  if (o.dtype == CUATTN_KV_DTYPE_AUTO) return view;
  TensorView told = as_e4m3(view);
  if (is_paged_q || view.is(DType::i8)) return told;
  CUATTN_REQUIRE(told.is(DType::e4m3), fn,
                 ": dtype float8_e4m3fn asks for arrays of that dtype or of uint8, got ", name,
                 " of ", text(view.dtype), "; leave it out");
  return told;
}

AttentionCall validated(TensorView q, TensorView k, TensorView v, const cuattn_attention_options& o,
                        bool check_data, CallKind kind) {
  AttentionCall call{};
  call.kind = kind;
  call.paged = o.block_tables != nullptr;
  call.ragged = o.cu_seqlens_q != nullptr || o.cu_seqlens_k != nullptr || call.paged;
  call.layout = o.layout;
  call.uses_seqused = o.seqused_q != nullptr || o.seqused_k != nullptr || o.kv_start != nullptr;
  bool has_lens = !call.paged || (o.seqused_k != nullptr && o.cu_seqlens_k == nullptr);
  call.may_step = has_lens && kind == CallKind::attention && o.seqused_q == nullptr &&
                  o.kv_start == nullptr && o.bias == nullptr && o.dropout_p == 0.0;
  call.has_sinks = o.sinks != nullptr;
  call.has_bias = o.bias != nullptr;
  call.has_slopes = o.alibi_slopes != nullptr;
  call.batch_invariant = o.batch_invariant != 0;
  call.device = q.device;
  const char* fn = call.function();
  require_known_device(fn, "q", call.device);
  q = as_told(fn, "q", q, o, call.paged);
  k = as_told(fn, "k", k, o);
  v = as_told(fn, "v", v, o);
  CUATTN_REQUIRE(o.layout == CUATTN_LAYOUT_BSHD || o.layout == CUATTN_LAYOUT_BHSD, fn,
                 ": layout must be 'bshd' or 'bhsd', got ", layout_text(o.layout),
                 "; choose one of these");
  if (call.paged) {
    read_paged_arrays(call, q, k, v, o, check_data);
  } else {
    CUATTN_REQUIRE(o.kv_layout == CUATTN_KV_NHD, fn,
                   ": kv_layout belongs to paged caches and must be 'nhd', 0 in C, without "
                   "block_tables, got ",
                   o.kv_layout, "; leave it out");
    read_arrays(call, q, k, v, check_data);
  }
  if (call.ragged) read_ragged(call, o, check_data);
  AttentionParams& p = call.params;
  p.seqused_q = read_lengths(call, "seqused_q", o.seqused_q, p.batch, "batch", check_data);
  p.seqused_kv = read_lengths(call, "seqused_k", o.seqused_k, p.batch, "batch", check_data);
  CUATTN_REQUIRE(o.kv_start == nullptr || !call.ragged, fn,
                 ": kv_start must not be given where sequences are packed; leave the padding out "
                 "of cu_seqlens_k");
  if (o.kv_start != nullptr && call.is_flex()) {
    fail<NotImplemented>(fn,
                         ": kv_start must be None: masks and scores written by the user count "
                         "keys from the first of k; say it in mask_mod");
  }
  p.kv_start = read_lengths(call, "kv_start", o.kv_start, p.batch, "batch", check_data);
  if (call.paged) size_pages(call);
  p.mask = read_mask(fn, o.causal, o.window_left, o.window_right, p.seqlen_q, p.seqlen_kv);
  p.scores = read_scores(fn, o, call.has_bias, {p.batch, p.num_heads_q, p.head_dim, "batch"},
                         call.device, check_data);
  read_scales(call, o, check_data);
  read_accumulate(call, o);
  read_bias(call, o.bias, check_data);
  read_dropout(call, o, check_data);
  if (o.num_splits < 0) {
    fail<InvalidArgument>(fn, ": num_splits must be >= 0, got ", o.num_splits,
                          "; pass 0 to let cuattn choose");
  }
  call.num_splits = o.num_splits;
  return call;
}

}  // namespace

void require_dropout_key(const AttentionCall& call, const DeviceInfo& device) {
  uint32_t key = call.params.dropout.first_key;
  if (!device.is_cuda || key % 16 == 0) return;
  fail<NotImplemented>(call.function(), ": dropout_key must be a multiple of 16 on CUDA, got ", key,
                       "; begin the part of the keys at one");
}

AttentionCall validate_attention(const TensorView& q, const TensorView& k, const TensorView& v,
                                 const cuattn_attention_options& o, bool check_data,
                                 CallKind kind) {
  try {
    return validated(q, k, v, o, check_data, kind);
  } catch (const InvalidArgument& refusal) {
    bool is_dense = o.cu_seqlens_q == nullptr && o.cu_seqlens_k == nullptr && !o.block_tables;
    throw InvalidArgument(refusal.what() + (is_dense ? other_layout(q, k, v, o) : ""));
  }
}

}  // namespace cuattn
