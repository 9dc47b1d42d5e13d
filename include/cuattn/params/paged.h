// SPDX-License-Identifier: Apache-2.0
// The problem of paged attention as every kernel receives it, CPU and CUDA alike. How its keys are
// dealt stands in deal.h. Next: cpu/paged.cpp (all of it in plain loops).
#pragma once

#include "cuattn/params/deal.h"
#include "cuattn/params/pages.h"
#include "cuattn/params/scores.h"

namespace cuattn {

// What mla_decode has beside: keys are [latent | rope], the rotated columns that all heads share
// with their own queries. head_dim is that of the latent, which is the value as well.
struct LatentParams {
  const void* q_rope;      // [num_seqs, q_len, num_heads_q, rope_dim]
  const void* rope_cache;  // [num_blocks, block_size, rope_dim]
  Strides q_strides;
  CacheStrides strides;
  int32_t rope_dim;  // 0: no such columns
  // Lists of tokens: each of `queries` of a sequence is a sequence of work, which pages.block_tables
  // gives slots (block * block_size + place in it), one a key; without block_tables keys are rows.
  // 0: it gives blocks.
  int32_t queries;
  bool is_used;       // the call is one of mla_decode
  bool own_values;    // v_cache is not k_cache
  int32_t* own_lens;  // work.context_lens, where keys are rows: as long as the capacity
};

// One decode step: O = softmax(mask(alibi + softcap(scale * Q K^T))) V over paged keys.
struct PagedParams {
  PagedWork work;
  int32_t* own_deal;  // work.deal, where this call makes it first; nullptr: the caller's, or none

  const void* q;        // [num_seqs, q_len, num_heads_q, head_dim]
  void* out;            // like q
  float* lse;           // [num_seqs, num_heads_q, q_len], natural log; or nullptr
  const void* k_cache;  // see KvLayout
  const void* v_cache;
  Strides q_strides, out_strides;  // batch = sequence, seq = query
  Strides lse_strides;
  // Ragged: q and out are [total_q, num_heads_q, head_dim], and sequence b has the rows from
  // cu_seqlens_q[b] to cu_seqlens_q[b + 1], the last of q_len queries; strides of batch are 0.
  const int32_t* cu_seqlens_q;  // [num_seqs + 1] or nullptr
  int64_t total_q;
  CacheStrides k_strides, v_strides;

  int32_t stages;  // the plan's: tiles of K and V on their way in a thread block

  DType dtype;     // of q and, on CUDA, out
  DType kv_dtype;  // of the caches: dtype, or e4m3 under 16-bit queries
  KvLayout kv_layout;
  int32_t num_heads_q, head_dim;
  Pages pages;  // block_tables [num_seqs, max_blocks_per_seq]; no entry past a context is read

  // value = stored * scale. The array, where given, replaces the number.
  float k_scale, v_scale;
  const float *k_scales, *v_scales;  // [batch, num_heads_kv] through strides, or nullptr
  int64_t k_scales_stride_batch, k_scales_stride_head;
  int64_t v_scales_stride_batch, v_scales_stride_head;

  // Partial results of units with more than one split, by slot: [slots, rows, head_dim] normalised
  // and times v_scale, [slots, rows] log-sum-exp in base 2 (-inf: no key; the output is then
  // anything). Without the sink.
  float* partial_out;
  float* partial_lse;

  // V2's own partial results instead, when exp_sums is given: one partition is one split, every
  // partition with a key is written. Where a sequence has one only, that task writes both.
  float* exp_sums;    // [num_seqs, num_heads_q, num_splits], sum of exp(score - max_logit)
  float* max_logits;  // like exp_sums, natural units
  void* tmp_out;      // [num_seqs, num_heads_q, num_splits, head_dim] of dtype, like partial_out

  ScoreParams scores;  // without a bias
  LatentParams latent;
  DType out_dtype;  // dtype or float32
};

// A packed batch in two: sequences with one query go by a decode kernel, the others by a kernel of
// attention. Lengths as each is to see them: the sequences of the other are empty.
struct DecodesApart {
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]
  const int32_t* lens;          // [num_seqs], keys
  int32_t num_seqs;
  int32_t *decode_starts, *decode_lens;  // [num_seqs + 1] like cu_seqlens_q, [num_seqs]
  int32_t *other_queries, *other_lens;   // [num_seqs]
};

// How many keys each sequence of packed rows has, by make_span.
struct KeyLengths {
  const int32_t *cu_seqlens, *seqused;  // [num_seqs + 1], [num_seqs] or nullptr
  int64_t total;
  int32_t num_seqs, max_seqlen;
  int32_t* lens;  // [num_seqs]
};

// Where query `query` of sequence b lies along the seq axis of q, out and lse. -1: nowhere, a
// ragged sequence may have fewer than q_len.
CUATTN_HOST_DEVICE int64_t query_row(const PagedParams& p, int32_t b, int32_t query) {
  if (p.cu_seqlens_q == nullptr) return query;
  Span span = make_span(p.cu_seqlens_q, nullptr, b, p.work.q_len, p.total_q);
  int32_t missing = p.work.q_len - span.stored;
  return query < missing ? -1 : span.start + query - missing;
}

// Where row (b, place, head) of q, out or lse begins; `place` is of query_row. With lists of tokens
// b counts queries, too.
CUATTN_HOST_DEVICE int64_t row_offset(const PagedParams& p, const Strides& strides, int32_t b,
                                      int64_t place, int32_t head) {
  int64_t sequence = b;
  if (p.latent.queries > 1) {
    sequence = b / p.latent.queries;
    place = b % p.latent.queries;
  }
  return sequence * strides.batch + place * strides.seq + head * strides.head;
}

// Whether each query has a list of tokens.
CUATTN_HOST_DEVICE bool has_lists(const PagedParams& p) {
  return p.latent.queries > 0 && p.pages.block_tables != nullptr;
}

// Where a latent key lies. In a list of tokens any slot that the cache does not have is no key.
struct LatentPlace {
  int64_t block, token;
  bool exists;
  CUATTN_HOST_DEVICE int64_t at(const CacheStrides& strides) const {
    return block * strides.block + token * strides.token;
  }
};

// Without block_tables sequence b is block b.
CUATTN_HOST_DEVICE LatentPlace latent_place(const PagedParams& p, int32_t b, int32_t key) {
  const Pages& pages = p.pages;
  if (pages.block_tables == nullptr) return {b, key, true};
  if (p.latent.queries == 0)
    return {pages.block(b, key / pages.block_size), key % pages.block_size, true};
  int32_t slot = *pages.entry(b, key);
  bool exists = slot >= 0 && slot < pages.num_blocks * pages.block_size;
  if (!exists) return {0, 0, false};
  return {slot / pages.block_size, slot % pages.block_size, true};
}

}  // namespace cuattn
