// SPDX-License-Identifier: Apache-2.0
// mla_decode: arrays and options to PagedParams. Its run is that of paged attention, with one kv
// head whose values are the latents that its keys begin with. Next: paged/call.cpp, paged/work.cpp.
#include <algorithm>
#include <cmath>

#include "src/cache/checks.h"
#include "src/check/arrays.h"
#include "src/check/options.h"
#include "src/mla/mla.h"
#include "src/paged/call.h"
#include "src/paged/work.h"

namespace cuattn {
namespace {

constexpr const char* kName = "mla_decode";
constexpr int32_t kMaxRope = 128;

void check_columns(const char* name, const char* axis, int64_t got, int64_t step, int64_t most) {
  CUATTN_REQUIRE(got >= step && got <= most && got % step == 0, kName, ": ", name, " must have ",
                 axis, " a multiple of ", step, " up to ", most, ", got ", got,
                 "; pad it with zeros, or cut it and merge nothing: project to keys and values and "
                 "call attention");
}

// [num_seqs, num_heads, columns] or [num_seqs, q_len, num_heads, columns].
Strides read_queries(const char* name, const TensorView& q, bool check_data) {
  CUATTN_REQUIRE(q.ndim == 3 || q.ndim == 4, kName, ": ", name,
                 " must have axes [num_seqs, num_heads, columns] or [num_seqs, q_len, num_heads, "
                 "columns], got ",
                 q.ndim, " with shape ", shape_text(q), "; reshape it");
  require_rows(kName, name, q, false, check_data);
  int32_t head = q.ndim - 2;
  return {stride_of(q, 0), q.ndim == 3 ? 0 : stride_of(q, 1), stride_of(q, head)};
}

void read_nope(PagedCall& call, const TensorView& q, bool check_data) {
  PagedParams& p = call.params;
  p.dtype = p.kv_dtype = attention_dtype(kName, "q_nope", q);
  p.q_strides = read_queries("q_nope", q, check_data);
  call.is_decode = q.ndim == 3;
  int32_t head = q.ndim - 2;
  call.q_shape[0] = q.shape[0];
  call.q_shape[1] = call.is_decode ? 1 : q.shape[1];
  p.work.num_seqs = checked_extent(kName, "q_nope", "num_seqs", q.shape[0]);
  p.work.q_len = call.is_decode ? 1 : checked_length(kName, "q_nope", "q_len", q.shape[1]);
  p.num_heads_q = checked_extent(kName, "q_nope", "num_heads", q.shape[head]);
  check_columns("q_nope", "a latent (last axis)", q.shape[head + 1], 16, kMaxLatent);
  p.head_dim = static_cast<int32_t>(q.shape[head + 1]);
  p.q = q.data;
}

// The rope columns of q: as many axes, sequences, queries and heads.
void read_rope_queries(PagedCall& call, const TensorView& nope, const TensorView& q,
                       bool check_data) {
  LatentParams& latent = call.params.latent;
  require_dtype(kName, "q_pe", q, call.params.dtype, "q_nope");
  require_device(kName, "q_pe", q, call.device, "q_nope");
  CUATTN_REQUIRE(q.ndim == nope.ndim, kName, ": q_pe must have as many axes as q_nope, ", nope.ndim,
                 ", got ", q.ndim, " with shape ", shape_text(q), "; reshape it");
  latent.q_strides = read_queries("q_pe", q, check_data);
  constexpr const char* kAxes[] = {"num_seqs", "q_len", "num_heads"};
  for (int32_t axis = 0; axis < q.ndim - 1; ++axis) {
    const char* word = q.ndim == 3 && axis == 1 ? "num_heads" : kAxes[axis];
    require_extent(kName, "q_pe", word, q.shape[axis], nope.shape[axis], "q_nope");
  }
  check_columns("q_pe", "rope columns (last axis)", q.shape[q.ndim - 1], 8, kMaxRope);
  latent.rope_dim = static_cast<int32_t>(q.shape[q.ndim - 1]);
  latent.q_rope = q.data;
}

// [num_blocks, block_size, columns], or rows [num_seqs, seqlen, columns].
CacheStrides read_latents(PagedCall& call, const char* name, const TensorView& view,
                          int64_t columns, const char* like, bool check_data) {
  CUATTN_REQUIRE(view.ndim == 3, kName, ": ", name,
                 " must have axes [num_blocks, block_size, columns], got ", view.ndim,
                 " with shape ", shape_text(view),
                 "; all heads share it, so it has no axis of heads: drop that of one head");
  require_dtype(kName, name, view, call.params.dtype, "q_nope");
  require_device(kName, name, view, call.device, "q_nope");
  require_extent(kName, name, "columns", view.shape[2], columns, like);
  require_rows(kName, name, view, false, check_data);
  return {stride_of(view, 0), 0, stride_of(view, 1)};
}

// FlashMLA's cache of 656 bytes a token, which has the rope columns, too.
void read_packed(PagedCall& call, const LatentArrays& a, bool check_data) {
  PagedParams& p = call.params;
  const TensorView& cache = a.ckv_cache;
  CUATTN_REQUIRE(a.q_pe != nullptr && a.kpe_cache == nullptr && a.v_cache == nullptr, kName,
                 ": kpe_cache must be None and q_pe an array where ckv_cache is uint8, packed "
                 "latents of 512 columns with their 64 rope columns, got another");
  CUATTN_REQUIRE(p.dtype == DType::bf16, kName,
                 ": q_nope must be bfloat16 over packed latents (ckv_cache of uint8), got ",
                 dtype_name(p.dtype), "; cast it");
  require_rank(kName, "ckv_cache", cache, 3, "[num_blocks, block_size, 656]");
  require_device(kName, "ckv_cache", cache, call.device, "q_nope");
  check_packed(kName, cache, p.head_dim, p.latent.rope_dim, "q_nope", "q_pe", false, check_data);
  p.kv_dtype = DType::e4m3;
  p.pages.num_blocks = checked_extent(kName, "ckv_cache", "num_blocks", cache.shape[0]);
  p.k_cache = p.v_cache = cache.data;
  p.k_strides = p.v_strides = {stride_of(cache, 0), 0, stride_of(cache, 1)};
  p.latent.strides = {p.k_strides.block / 2, 0, p.k_strides.token / 2};
  if (cache.data != nullptr)
    p.latent.rope_cache = static_cast<const char*>(cache.data) + PackedLatent::kRopeAt;
}

void read_caches(PagedCall& call, const LatentArrays& a, bool check_data) {
  if (is_packed(a.ckv_cache)) return read_packed(call, a, check_data);
  PagedParams& p = call.params;
  LatentParams& latent = p.latent;
  p.k_strides = read_latents(call, "ckv_cache", a.ckv_cache, p.head_dim, "q_nope", check_data);
  p.v_strides = p.k_strides;
  p.k_cache = p.v_cache = a.ckv_cache.data;
  p.pages.num_blocks = checked_extent(kName, "ckv_cache", "num_blocks", a.ckv_cache.shape[0]);
  auto same_places = [&](const char* name, const TensorView& view) {
    for (int32_t axis = 0; axis < 2; ++axis) {
      require_extent(kName, name, axis == 0 ? "num_blocks" : "block_size", view.shape[axis],
                     a.ckv_cache.shape[axis], "ckv_cache");
    }
  };
  if (a.kpe_cache != nullptr) {
    latent.strides =
        read_latents(call, "kpe_cache", *a.kpe_cache, latent.rope_dim, "q_pe", check_data);
    latent.rope_cache = a.kpe_cache->data;
    same_places("kpe_cache", *a.kpe_cache);
  }
  if (a.v_cache == nullptr) return;
  p.v_strides = read_latents(call, "v_cache", *a.v_cache, p.head_dim, "q_nope", check_data);
  p.v_cache = a.v_cache->data;
  same_places("v_cache", *a.v_cache);
  latent.own_values = p.v_cache != p.k_cache || p.v_strides.block != p.k_strides.block ||
                      p.v_strides.token != p.k_strides.token;
}

// An array of int32 with the axes of q_nope before its columns, whose lists lie at equal distances.
int64_t read_lists(const PagedCall& call, const TensorView& nope, const char* name,
                   const TensorView& view, bool has_columns, bool check_data) {
  int32_t axes = nope.ndim - 2;
  const char* words = has_columns ? axes == 1 ? "[num_seqs, topk]" : "[num_seqs, q_len, topk]"
                      : axes == 1 ? "[num_seqs]"
                                  : "[num_seqs, q_len]";
  require_rank(kName, name, view, axes + (has_columns ? 1 : 0), words);
  require_dtype(kName, name, view, DType::i32);
  require_device(kName, name, view, call.device, "q_nope");
  for (int32_t axis = 0; axis < axes; ++axis)
    require_extent(kName, name, axis == 0 ? "num_seqs" : "q_len", view.shape[axis],
                   nope.shape[axis], "q_nope");
  require_strided(kName, name, view, false, check_data);
  if (has_columns) require_last_axis(kName, name, view);
  bool is_single = axes == 2 && view.shape[1] == 1;
  int64_t stride = stride_of(view, is_single ? 0 : axes - 1), lists = 1;
  for (int32_t axis = 0; axis < axes; ++axis) lists *= view.shape[axis];
  bool is_even =
      axes == 1 || is_single || view.shape[0] <= 1 || stride_of(view, 0) == view.shape[1] * stride;
  bool is_dense = has_columns || stride == 1 || lists == 1;
  CUATTN_REQUIRE(view.size() == 0 || (is_even && is_dense), kName, ": ", name,
                 " must be contiguous over sequences and queries, got strides ", strides_text(view),
                 "; make a contiguous copy");
  return stride;
}

// Each query becomes a sequence of one query, whose keys are its list.
void read_indices(PagedCall& call, const LatentArrays& a, bool check_data) {
  PagedParams& p = call.params;
  PagedWork& w = p.work;
  const TensorView &nope = a.q_nope, &lists = *a.indices;
  CUATTN_REQUIRE(a.block_tables == nullptr && a.context_lens == nullptr, kName,
                 ": block_tables and context_lens must be None where indices are given, got ",
                 a.block_tables != nullptr && a.context_lens != nullptr ? "both" : "one",
                 "; indices name tokens by their slots, and topk_lens says how many of each list");
  p.pages.block_size = checked_length(kName, "ckv_cache", "block_size", a.ckv_cache.shape[1]);
  CUATTN_REQUIRE(p.pages.num_blocks > 0 && p.pages.block_size > 0, kName,
                 ": ckv_cache must hold at least one token, got shape ", shape_text(a.ckv_cache),
                 "; allocate a block");
  p.pages.block_tables_stride = read_lists(call, nope, "indices", lists, true, check_data);
  p.pages.block_tables = static_cast<const int32_t*>(lists.data);
  w.capacity = checked_length(kName, "indices", "topk", lists.shape[lists.ndim - 1]);
  call.has_equal_lens = a.topk_lens == nullptr;
  if (a.topk_lens != nullptr) {
    read_lists(call, nope, "topk_lens", *a.topk_lens, false, check_data);
    w.context_lens = static_cast<const int32_t*>(a.topk_lens->data);
  }
  p.latent.queries = std::max(w.q_len, 1);
  w.num_seqs = checked_extent(kName, "q_nope", "num_seqs * q_len", int64_t{w.num_seqs} * w.q_len);
  w.q_len = 1;
}

void read_keys(PagedCall& call, const LatentArrays& a, bool check_data) {
  PagedParams& p = call.params;
  CUATTN_REQUIRE(a.indices != nullptr || a.topk_lens == nullptr, kName,
                 ": topk_lens must be given with indices, whose lengths they are, got it alone; "
                 "leave it out");
  if (a.indices != nullptr) return read_indices(call, a, check_data);
  int64_t block_size = a.ckv_cache.shape[1];
  CUATTN_REQUIRE((a.block_tables == nullptr) == (a.context_lens == nullptr), kName,
                 ": block_tables and context_lens must be given together, got one; rows without "
                 "pages have neither");
  if (a.block_tables != nullptr) {
    require_block_size(kName, "ckv_cache", block_size, KvLayout::nhd);
    p.pages.block_size = static_cast<int32_t>(block_size);
    read_tables(call, *a.block_tables, *a.context_lens, -1, "q_nope", check_data);
    CUATTN_REQUIRE(p.pages.num_blocks > 0 || p.work.capacity == 0, kName,
                   ": ckv_cache must hold at least one block, got 0; allocate one");
    return;
  }
  require_extent(kName, "ckv_cache", "num_seqs", p.pages.num_blocks, p.work.num_seqs, "q_nope");
  p.work.capacity = checked_length(kName, "ckv_cache", "seqlen", block_size);
  p.pages.block_size = p.work.capacity > 0 ? p.work.capacity : 1;
  call.has_equal_lens = true;
}

void refuse_options(const LatentArrays& a, const cuattn_paged_options& o) {
  CUATTN_REQUIRE(a.indices == nullptr || (o.window_left == -1 && o.window_right == -1), kName,
                 ": window must be (-1, -1) where indices are given, got (", o.window_left, ", ",
                 o.window_right, "); what a query sees is its list: leave tokens out of it");
  CUATTN_REQUIRE(o.has_scale, kName,
                 ": scale must be given, got None; it is 1 / sqrt(nope + rope columns of a head "
                 "before the projection), 1 / sqrt(192) for DeepSeek, and not that of the latent");
  CUATTN_REQUIRE(std::isfinite(static_cast<float>(o.scale)), kName,
                 ": scale must be finite in float32, got ", o.scale,
                 "; pass 1 / sqrt(nope + rope columns of a head before the projection)");
  CUATTN_REQUIRE(o.alibi_slopes == nullptr && o.plan == nullptr && o.version == 0 &&
                     o.kv_layout == CUATTN_KV_NHD && o.kv_dtype == CUATTN_KV_DTYPE_AUTO &&
                     o.q_scale == 1.0 && o.k_scale == 1.0 && o.v_scale == 1.0 &&
                     o.q_scales == nullptr && o.k_scales == nullptr && o.v_scales == nullptr,
                 kName,
                 ": options must leave alibi_slopes, plan, version, kv_layout, kv_dtype, q_scale, "
                 "k_scale and v_scale at their defaults, got one of them; no kernel has them");
}

}  // namespace

PagedCall validate_latent(const LatentArrays& a, const cuattn_paged_options& o, bool check_data) {
  PagedCall call{};
  call.function = kName;
  call.k_name = "ckv_cache";
  call.v_name = a.v_cache != nullptr ? "v_cache" : "ckv_cache";
  call.device = a.q_nope.device;
  PagedParams& p = call.params;
  refuse_options(a, o);
  p.latent.is_used = true;
  require_known_device(kName, "q_nope", call.device);
  read_nope(call, a.q_nope, check_data);
  CUATTN_REQUIRE((a.q_pe == nullptr) == (a.kpe_cache == nullptr) || is_packed(a.ckv_cache), kName,
                 ": q_pe and kpe_cache must be given together, got one; leave out both where there "
                 "are no rope columns");
  if (a.q_pe != nullptr) read_rope_queries(call, a.q_nope, *a.q_pe, check_data);
  read_caches(call, a, check_data);
  p.work.num_heads_kv = 1;
  check_rows(call);
  read_keys(call, a, check_data);
  fill_mask(call, o);
  p.scores = read_scores(kName, o, false, {p.work.num_seqs, p.num_heads_q, p.head_dim, "num_seqs"},
                         call.device, check_data);
  p.k_scale = p.v_scale = 1.0f;
  read_splits(call, o);
  call.request = request_of(call, o);
  call.request.has_pages = a.block_tables != nullptr;
  return call;
}

}  // namespace cuattn
