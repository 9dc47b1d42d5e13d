// SPDX-License-Identifier: Apache-2.0
// cuattn from C++: attention, attention_varlen, paged_attention and merge_states over borrowed
// arrays on the CPU or a CUDA device. A thin wrapper over the C ABI (c_api.h) that throws; it never
// allocates and never waits for the device. Next: kv_cache.h, block_pool.h. Source of the
// mathematics: online softmax, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691.
//
//   cuattn::TensorView q(q_ptr, cuattn::DType::bf16, {batch, seqlen_q, num_heads_q, head_dim},
//                        {kDLCUDA, 0});
//   cuattn::AttentionOptions options;
//   options.causal = true;
//   cuattn::attention(q, k, v, out, options, {workspace, workspace_bytes}, stream);
#pragma once

#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "cuattn/c_api.h"
#include "cuattn/params/pages.h"
#include "cuattn/tensor.h"

namespace cuattn {

#ifndef CUATTN_INTERNAL
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct NotImplemented : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct OutOfBlocks : std::runtime_error {
  using std::runtime_error::runtime_error;
};
#endif

// bshd: [batch, seqlen, num_heads, head_dim]; bhsd: heads before sequence.
enum class Layout : int32_t {
  bshd = CUATTN_LAYOUT_BSHD,
  bhsd = CUATTN_LAYOUT_BHSD,
  nhd = CUATTN_LAYOUT_NHD,
  thd = CUATTN_LAYOUT_THD
};

// What arrays and caches of bytes (uint8) hold.
enum class KvDtype : int32_t {
  automatic = CUATTN_KV_DTYPE_AUTO,  // nothing: they have a dtype
  e4m3 = CUATTN_KV_DTYPE_E4M3        // float8_e4m3fn
};

// How products of float8 values are summed: those of a tile of keys by the tensor cores and tiles in
// float32, or all by the tensor cores, with about 13 bits. Kernels without such products: float32.
enum class Accumulate : int32_t { exact = CUATTN_ACCUMULATE_EXACT, fast = CUATTN_ACCUMULATE_FAST };

// The options of attention and attention_varlen; names, defaults and meaning are those of the
// Python functions. Tensor pointers are borrowed for the duration of the call.
struct AttentionOptions {
  Layout layout = Layout::bshd;
  bool causal =
      false;  // bottom-right aligned: query i sees key j when j <= i + seqlen_kv - seqlen_q
  int64_t window_left = kUnlimited;  // keys to the left of the diagonal
  int64_t window_right = kUnlimited;
  double scale = std::nan("");  // NaN here means the default, 1 / sqrt(head_dim)
  double softcap = 0.0;         // scores become softcap * tanh(scores / softcap); 0 = off
  const TensorView* alibi_slopes = nullptr;  // float32 [num_heads_q] or [batch, num_heads_q]
  const TensorView* sinks = nullptr;         // float32 [num_heads_q]
  const TensorView* bias =
      nullptr;  // q's dtype, float32 or bool; broadcastable to [batch, num_heads_q, sq, skv]
  const TensorView* seqused_q = nullptr;  // int32 [batch]
  const TensorView* seqused_k = nullptr;  // int32 [batch]
  const TensorView* kv_start = nullptr;   // int32 [batch]: the first key in use; attention alone
  const TensorView* lse =
      nullptr;  // float32 output [batch, num_heads_q, seqlen_q]; ragged [num_heads_q, total_q]
  // attention_varlen: k and v are caches in blocks, block_tables int32 [batch, max_blocks_per_seq].
  const TensorView* block_tables = nullptr;
  KvLayout kv_layout = KvLayout::nhd;
  bool batch_invariant = false;
  int32_t num_splits = 0;
  // Dropout of the probabilities, in steps of 1 / 256, with a seed >= 0 and the number of the call;
  // or dropout_state, int64 [2], instead of both. On CUDA served by sm90, sm80, simt and naive.
  double dropout_p = 0.0;
  int64_t dropout_seed = -1, dropout_offset = 0;
  const TensorView* dropout_state = nullptr;
  // Of a part of a greater call: the places there of its first row, key (on CUDA a multiple of 16)
  // and head, and how many heads a sequence has there; 0: num_heads_q.
  int64_t dropout_row = 0, dropout_key = 0, dropout_head = 0, dropout_heads = 0;
  // Of float8_e4m3fn arrays, for which bytes may stand: value = stored * scale, a number, or instead
  // float32 arrays of the shapes that c_api.h lists. out is bfloat16, float16 or float32.
  KvDtype dtype = KvDtype::automatic;
  double q_scale = 1.0, k_scale = 1.0, v_scale = 1.0;
  const TensorView *q_scales = nullptr, *k_scales = nullptr, *v_scales = nullptr;
  Accumulate accumulate = Accumulate::exact;
  const char* backend = "auto";
};

// Device memory lent for one call, 256-byte aligned; its size is given by
// attention_workspace_bytes.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

namespace detail {

// Turns a status into the matching exception; CUATTN_OK passes.
inline void check(cuattn_status status) {
  if (status == CUATTN_OK) return;
  std::string message = cuattn_last_error();
  switch (status) {
    case CUATTN_INVALID_ARGUMENT: throw std::invalid_argument(message);
    case CUATTN_NOT_IMPLEMENTED: throw NotImplemented(message);
    case CUATTN_CUDA_ERROR: throw CudaError(message);
    case CUATTN_OUT_OF_BLOCKS: throw OutOfBlocks(message);
    default: throw std::runtime_error(message);
  }
}

// DLTensors of an option struct; lives beside the C options that point into it.
struct COptions {
  DLTensor alibi_slopes, sinks, bias, seqused_q, seqused_k, kv_start, cu_seqlens_q, cu_seqlens_k,
      block_tables, dropout_state, q_scales, k_scales, v_scales;
  cuattn_attention_options c;

  explicit COptions(const AttentionOptions& o) {
    cuattn_attention_options_init(&c, sizeof c);
    c.layout = static_cast<int32_t>(o.layout);
    c.causal = o.causal;
    c.window_left = o.window_left;
    c.window_right = o.window_right;
    c.has_scale = !std::isnan(o.scale);
    c.scale = c.has_scale ? o.scale : 0.0;
    c.softcap = o.softcap;
    c.num_splits = o.num_splits;
    c.batch_invariant = o.batch_invariant;
    c.return_lse = o.lse != nullptr;
    c.backend = o.backend;
    c.alibi_slopes = borrow(o.alibi_slopes, alibi_slopes);
    c.sinks = borrow(o.sinks, sinks);
    c.bias = borrow(o.bias, bias);
    c.seqused_q = borrow(o.seqused_q, seqused_q);
    c.seqused_k = borrow(o.seqused_k, seqused_k);
    c.kv_start = borrow(o.kv_start, kv_start);
    c.block_tables = borrow(o.block_tables, block_tables);
    c.kv_layout = static_cast<int32_t>(o.kv_layout);
    c.dropout_p = o.dropout_p;
    c.dropout_seed = o.dropout_seed;
    c.dropout_offset = o.dropout_offset;
    c.dropout_row = o.dropout_row;
    c.dropout_key = o.dropout_key;
    c.dropout_head = o.dropout_head;
    c.dropout_heads = o.dropout_heads;
    c.dropout_state = borrow(o.dropout_state, dropout_state);
    c.dtype = static_cast<int32_t>(o.dtype);
    c.accumulate = static_cast<int32_t>(o.accumulate);
    c.q_scale = o.q_scale;
    c.k_scale = o.k_scale;
    c.v_scale = o.v_scale;
    c.q_scales = borrow(o.q_scales, q_scales);
    c.k_scales = borrow(o.k_scales, k_scales);
    c.v_scales = borrow(o.v_scales, v_scales);
  }
  COptions(const COptions&) = delete;

  // Makes the call ragged.
  void set_lengths(const TensorView& cu_q, const TensorView& cu_k, int64_t max_q, int64_t max_k) {
    c.cu_seqlens_q = borrow(&cu_q, cu_seqlens_q);
    if (cu_k.ndim != 0) c.cu_seqlens_k = borrow(&cu_k, cu_seqlens_k);
    c.max_seqlen_q = max_q;
    c.max_seqlen_k = max_k;
  }

  static const DLTensor* borrow(const TensorView* view, DLTensor& storage) {
    if (view == nullptr) return nullptr;
    storage = view->dl();
    return &storage;
  }
};

inline cuattn_attention_call prepare(const TensorView& q, const TensorView& k, const TensorView& v,
                                     const COptions& options) {
  cuattn_attention_call call;
  DLTensor dq = q.dl(), dk = k.dl(), dv = v.dl();
  check(cuattn_attention_prepare(&dq, &dk, &dv, &options.c, &call));
  return call;
}

inline void run(cuattn_attention_call& call, const TensorView& out, const TensorView* lse,
                Workspace workspace, void* stream) {
  DLTensor d_out = out.dl(), d_lse;
  const DLTensor* lse_pointer = COptions::borrow(lse, d_lse);
  check(cuattn_attention_run(&call, &d_out, lse_pointer, workspace.data, workspace.bytes, stream));
}

}  // namespace detail

// Bytes of workspace that attention() needs for these arguments; 0 for most kernels.
inline size_t attention_workspace_bytes(const TensorView& q, const TensorView& k,
                                        const TensorView& v, const AttentionOptions& options = {}) {
  detail::COptions c(options);
  return detail::prepare(q, k, v, c).workspace_bytes;
}

// out = softmax(mask(bias + alibi + softcap(scale * q k^T))) v.
// q [batch, seqlen_q, num_heads_q, head_dim], k [batch, seqlen_kv, num_heads_kv, head_dim], v and
// out alike with head_dim_v; float32, float16, bfloat16, or float8_e4m3fn with an out of another;
// out may be float32 where the others are not, and is not rounded then; stream is a
// cudaStream_t (ignored on the CPU). Throws std::invalid_argument, NotImplemented, CudaError or
// std::runtime_error; nothing is
// launched then.
inline void attention(const TensorView& q, const TensorView& k, const TensorView& v,
                      const TensorView& out, const AttentionOptions& options = {},
                      Workspace workspace = {}, void* stream = nullptr) {
  detail::COptions c(options);
  cuattn_attention_call call = detail::prepare(q, k, v, c);
  detail::run(call, out, options.lse, workspace, stream);
}

// Bytes of workspace that attention_varlen() needs for these arguments.
inline size_t attention_varlen_workspace_bytes(const TensorView& q, const TensorView& k,
                                               const TensorView& v, const TensorView& cu_seqlens_q,
                                               const TensorView& cu_seqlens_k, int64_t max_seqlen_q,
                                               int64_t max_seqlen_k,
                                               const AttentionOptions& options = {}) {
  detail::COptions c(options);
  c.set_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  return detail::prepare(q, k, v, c).workspace_bytes;
}

// The same over sequences packed end to end: q [total_q, num_heads_q, head_dim], k and v [total_kv,
// num_heads_kv, dim]; sequence b owns rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1]. max_seqlen_* are
// upper bounds of the lengths. With options.block_tables k and v are caches, and cu_seqlens_k may
// be TensorView{} where options.seqused_k says the lengths. Offsets that fall are refused on the CPU
// and under CUATTN_CHECK=1; else, on CUDA, rows may stay unwritten.
inline void attention_varlen(const TensorView& q, const TensorView& k, const TensorView& v,
                             const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k,
                             int64_t max_seqlen_q, int64_t max_seqlen_k, const TensorView& out,
                             const AttentionOptions& options = {}, Workspace workspace = {},
                             void* stream = nullptr) {
  detail::COptions c(options);
  c.set_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  cuattn_attention_call call = detail::prepare(q, k, v, c);
  detail::run(call, out, options.lse, workspace, stream);
}

// The options of paged_attention; names, defaults and meaning are those of the Python function.
struct PagedOptions {
  KvLayout kv_layout = KvLayout::nhd;
  KvDtype kv_dtype = KvDtype::automatic;
  bool causal = true;
  int64_t window_left = kUnlimited, window_right = kUnlimited;
  double scale = std::nan("");  // NaN here means the default, 1 / sqrt(head_dim)
  double softcap = 0.0;
  const TensorView* alibi_slopes = nullptr;  // float32 [num_heads_q] or [num_seqs, num_heads_q]
  const TensorView* sinks = nullptr;         // float32 [num_heads_q]
  double k_scale = 1.0, v_scale = 1.0;       // of float8 caches: value = stored * scale
  const TensorView *k_scales = nullptr, *v_scales = nullptr;  // instead: float32 [num_heads_kv] or
                                                              // [num_seqs, num_heads_kv]
  const TensorView* plan = nullptr;  // of paged_plan, for these context_lens
  const TensorView* lse = nullptr;   // float32 output [num_seqs, num_heads_q(, q_len)]
  bool batch_invariant = false;
  int32_t num_splits = 0;
  int32_t version = 0;  // 1, 2: PagedAttention V1, in one pass, and V2, in partitions; q of 3 axes
  // V2 alone reads these: 256, 512 or 1024 tokens; -1: what block_tables can name; and outputs from
  // the workspace if not given, float32 [num_seqs, num_heads_q, partitions], tmp_out of q's dtype
  // [..., head_dim]
  int64_t partition_size = 512, max_context_len = -1;
  const TensorView *exp_sums = nullptr, *max_logits = nullptr, *tmp_out = nullptr;
  const char* backend = "auto";
  double q_scale = 1.0;                  // of float8 queries, which go over float8 caches
  const TensorView* q_scales = nullptr;  // instead, as k_scales
};

// What the calls of one step have in common.
struct PagedShape {
  int64_t num_heads_q, num_heads_kv, head_dim, block_size;
  int64_t q_len = 1;
  DType dtype = DType::bf16;  // of q
};

namespace detail {

struct CPagedOptions {
  DLTensor alibi_slopes, sinks, q_scales, k_scales, v_scales, plan, exp_sums, max_logits, tmp_out;
  cuattn_paged_options c;

  explicit CPagedOptions(const PagedOptions& o) {
    cuattn_paged_options_init(&c, sizeof c);
    c.version = o.version;
    c.kv_layout = static_cast<int32_t>(o.kv_layout);
    c.kv_dtype = static_cast<int32_t>(o.kv_dtype);
    c.causal = o.causal;
    c.window_left = o.window_left;
    c.window_right = o.window_right;
    c.has_scale = !std::isnan(o.scale);
    c.scale = c.has_scale ? o.scale : 0.0;
    c.softcap = o.softcap;
    c.alibi_slopes = COptions::borrow(o.alibi_slopes, alibi_slopes);
    c.sinks = COptions::borrow(o.sinks, sinks);
    c.k_scale = o.k_scale;
    c.v_scale = o.v_scale;
    c.k_scales = COptions::borrow(o.k_scales, k_scales);
    c.v_scales = COptions::borrow(o.v_scales, v_scales);
    c.plan = COptions::borrow(o.plan, plan);
    c.partition_size = o.partition_size;
    c.max_context_len = o.max_context_len;
    c.exp_sums = COptions::borrow(o.exp_sums, exp_sums);
    c.max_logits = COptions::borrow(o.max_logits, max_logits);
    c.tmp_out = COptions::borrow(o.tmp_out, tmp_out);
    c.batch_invariant = o.batch_invariant;
    c.num_splits = o.num_splits;
    c.backend = o.backend;
    c.q_scale = o.q_scale;
    c.q_scales = COptions::borrow(o.q_scales, q_scales);
  }
  CPagedOptions(const CPagedOptions&) = delete;
};

inline cuattn_attention_call prepare_paged(const TensorView& q, const TensorView& k_cache,
                                           const TensorView& v_cache,
                                           const TensorView& block_tables,
                                           const TensorView& context_lens,
                                           const CPagedOptions& options) {
  cuattn_attention_call call;
  DLTensor dq = q.dl(), dk = k_cache.dl(), dv = v_cache.dl(), dt = block_tables.dl(),
           dl = context_lens.dl();
  check(cuattn_paged_prepare(&dq, &dk, &dv, &dt, &dl, &options.c, &call));
  return call;
}

inline cuattn_attention_call prepare_plan(const TensorView& block_tables,
                                          const TensorView& context_lens, const PagedShape& shape,
                                          const CPagedOptions& options) {
  cuattn_attention_call call;
  DLTensor dt = block_tables.dl(), dl = context_lens.dl();
  cuattn_paged_shape c{shape.q_len,    shape.num_heads_q, shape.num_heads_kv,
                       shape.head_dim, shape.block_size,  dl_dtype(shape.dtype)};
  check(cuattn_paged_plan_prepare(&dt, &dl, &c, &options.c, &call));
  return call;
}

}  // namespace detail

// Bytes of workspace that paged_attention() needs for these arguments; they depend on shapes alone.
inline size_t paged_attention_workspace_bytes(const TensorView& q, const TensorView& k_cache,
                                              const TensorView& v_cache,
                                              const TensorView& block_tables,
                                              const TensorView& context_lens,
                                              const PagedOptions& options = {}) {
  detail::CPagedOptions c(options);
  return detail::prepare_paged(q, k_cache, v_cache, block_tables, context_lens, c).workspace_bytes;
}

// Attention of the newest tokens of each sequence over its keys in a paged cache: q [num_seqs,
// num_heads_q, head_dim] or [num_seqs, q_len, num_heads_q, head_dim]; caches as kv_layout says;
// block_tables int32 [num_seqs, max_blocks_per_seq], context_lens int32 [num_seqs]; out as in
// attention(). Throws as attention() does. Source: PagedAttention, arXiv:2309.06180.
inline void paged_attention(const TensorView& q, const TensorView& k_cache,
                            const TensorView& v_cache, const TensorView& block_tables,
                            const TensorView& context_lens, const TensorView& out,
                            const PagedOptions& options = {}, Workspace workspace = {},
                            void* stream = nullptr) {
  detail::CPagedOptions c(options);
  cuattn_attention_call call =
      detail::prepare_paged(q, k_cache, v_cache, block_tables, context_lens, c);
  DLTensor d_out = out.dl(), d_lse;
  detail::check(cuattn_paged_run(&call, &d_out, detail::COptions::borrow(options.lse, d_lse),
                                 workspace.data, workspace.bytes, stream));
}

// PagedAttention V1 and V2 in the argument order of the Python functions: one query of each
// sequence, V1 in one pass, without workspace; V2 in partitions of options.partition_size keys.
// scale NaN means the default; options.version and options.scale are not read. options.kv_layout
// has to be said: in Python its default is "vllm" here, in PagedOptions it is nhd.
inline void paged_attention_v1(const TensorView& out, const TensorView& q,
                               const TensorView& key_cache, const TensorView& value_cache,
                               const TensorView& block_tables, const TensorView& context_lens,
                               double scale, PagedOptions options, void* stream = nullptr) {
  options.version = 1;
  options.scale = scale;
  paged_attention(q, key_cache, value_cache, block_tables, context_lens, out, options, {}, stream);
}

// Bytes of workspace that paged_attention_v2() needs: for those of exp_sums, max_logits and tmp_out
// that are not given.
inline size_t paged_attention_v2_workspace_bytes(const TensorView& q, const TensorView& key_cache,
                                                 const TensorView& value_cache,
                                                 const TensorView& block_tables,
                                                 const TensorView& context_lens,
                                                 PagedOptions options) {
  options.version = 2;
  return paged_attention_workspace_bytes(q, key_cache, value_cache, block_tables, context_lens,
                                         options);
}

inline void paged_attention_v2(const TensorView& out, const TensorView& q,
                               const TensorView& key_cache, const TensorView& value_cache,
                               const TensorView& block_tables, const TensorView& context_lens,
                               double scale, PagedOptions options, Workspace workspace = {},
                               void* stream = nullptr) {
  options.version = 2;
  options.scale = scale;
  paged_attention(q, key_cache, value_cache, block_tables, context_lens, out, options, workspace,
                  stream);
}

// Entries of the int32 array that paged_plan() fills.
inline int64_t paged_plan_size(const TensorView& block_tables, const TensorView& context_lens,
                               const PagedShape& shape, const PagedOptions& options = {}) {
  detail::CPagedOptions c(options);
  return detail::prepare_plan(block_tables, context_lens, shape, c).out_shape[0];
}

// Cuts the keys of a step into equal work, on the device, for all layers of the step. Of the
// options, kv_layout, kv_dtype (of any float8 cache), causal, window and backend count.
inline void paged_plan(const TensorView& block_tables, const TensorView& context_lens,
                       const PagedShape& shape, const TensorView& plan,
                       const PagedOptions& options = {}, void* stream = nullptr) {
  detail::CPagedOptions c(options);
  cuattn_attention_call call = detail::prepare_plan(block_tables, context_lens, shape, c);
  DLTensor d_plan = plan.dl();
  detail::check(cuattn_paged_plan_run(&call, &d_plan, stream));
}

// Merges two attention results over disjoint keys into the result over their union:
// out = (out_a exp(lse_a) + out_b exp(lse_b)) / (exp(lse_a) + exp(lse_b)). A side with lse = -inf
// has no keys. Of float32 parts out may be float16 or bfloat16. Layouts bshd and bhsd have outs of 4
// axes, nhd [n, num_heads, head_dim] with lse [n, num_heads], thd [total, num_heads, head_dim] with
// lse [num_heads, total].
inline void merge_states(const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
                         const TensorView& lse_b, const TensorView& out,
                         const TensorView* lse_out = nullptr, Layout layout = Layout::bshd,
                         void* stream = nullptr) {
  DLTensor oa = out_a.dl(), la = lse_a.dl(), ob = out_b.dl(), lb = lse_b.dl(), o = out.dl(), l;
  detail::check(cuattn_merge_states(&oa, &la, &ob, &lb, &o, detail::COptions::borrow(lse_out, l),
                                    static_cast<int32_t>(layout), stream));
}

// The same for any number of parts, stacked on a new first axis of outs and lses.
inline void merge_states(const TensorView& outs, const TensorView& lses, const TensorView& out,
                         const TensorView* lse_out = nullptr, Layout layout = Layout::bshd,
                         void* stream = nullptr) {
  DLTensor os = outs.dl(), ls = lses.dl(), o = out.dl(), l;
  detail::check(cuattn_merge_many(&os, &ls, &o, detail::COptions::borrow(lse_out, l),
                                  static_cast<int32_t>(layout), stream));
}

}  // namespace cuattn
