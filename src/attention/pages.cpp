// SPDX-License-Identifier: Apache-2.0
#include "src/attention/pages.h"

#include "src/check/arrays.h"

namespace cuattn {

void size_pages(AttentionCall& call) {
  const char* fn = call.function();
  AttentionParams& p = call.params;
  CacheGatherParams& g = call.gather;
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

namespace {

// Bytes of the gathered rows of one side, in whole pieces.
size_t page_bytes(const AttentionCall& call, const CacheSide& side) {
  return whole_pieces(checked_bytes(
      call.function(), {call.params.total_kv, side.row_token, itemsize(call.params.dtype)}));
}

}  // namespace

size_t gathered_bytes(const AttentionCall& call) {
  return page_bytes(call, call.gather.k) + page_bytes(call, call.gather.v);
}

void* gather_pages(AttentionCall& call, void* workspace, Stream stream) {
  AttentionParams& p = call.params;
  CacheGatherParams& g = call.gather;
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

void point_at_pages(AttentionCall& call) {
  AttentionParams& p = call.params;
  const CacheGatherParams& g = call.gather;
  p.pages = g.pages;
  p.k = g.k.cache;
  p.v = g.v.cache;
  p.k_strides = {g.k.strides.block, g.k.strides.token, g.k.strides.head};
  p.v_strides = {g.v.strides.block, g.v.strides.token, g.v.strides.head};
}

namespace {

// Where the keys of a step lie: in the blocks of a cache, or in rows.
void place_keys(const AttentionCall& call, void* workspace, PagedParams& to) {
  const AttentionParams& p = call.params;
  const CacheGatherParams& g = call.gather;
  if (call.paged) {
    to.work.context_lens = p.seqused_kv;
    to.k_cache = g.k.cache;
    to.v_cache = g.v.cache;
    to.k_strides = g.k.strides;
    to.v_strides = g.v.strides;
    to.kv_layout = g.kv_layout;
    to.pages = g.pages;
    return;
  }
  auto strides = [&](const Strides& s) {
    return CacheStrides{call.ragged ? s.seq : s.batch, s.head, s.seq};
  };
  to.k_cache = p.k;
  to.v_cache = p.v;
  to.k_strides = strides(p.k_strides);
  to.v_strides = strides(p.v_strides);
  to.kv_layout = KvLayout::nhd;
  if (call.ragged) {
    to.work.context_lens = static_cast<const int32_t*>(workspace);
    to.pages = {p.total_kv, kMostPackedRows, p.cu_seqlens_kv, 1, p.total_kv};
  } else {
    to.work.context_lens = p.seqused_kv;
    to.pages = {p.batch, kMostPackedRows, nullptr, 0, 0};
  }
}

}  // namespace

size_t packed_lengths_bytes(const AttentionCall& call) {
  if (!call.ragged) return 0;
  return whole_pieces(checked_bytes(call.function(), {sizeof(int32_t), call.params.batch}));
}

KeyLengths packed_lengths(const AttentionCall& call, void* workspace) {
  const AttentionParams& p = call.params;
  return {p.cu_seqlens_kv, p.seqused_kv, p.total_kv,
          p.batch,         p.seqlen_kv,  static_cast<int32_t*>(workspace)};
}

PagedCall step_of(const AttentionCall& call, void* workspace) {
  const AttentionParams& p = call.params;
  PagedCall step{};
  step.function = call.function();
  step.device = call.device;
  step.are_rows = !call.ragged;
  step.are_alike = step.are_rows && !call.uses_seqused;
  PagedParams& to = step.params;
  PagedWork& w = to.work;
  w.num_seqs = p.batch;
  w.q_len = p.seqlen_q;
  w.num_heads_kv = p.num_heads_kv;
  w.group = p.num_heads_kv > 0 ? p.num_heads_q / p.num_heads_kv : 1;
  w.capacity = p.seqlen_kv;
  w.mask = p.mask;
  to.q = p.q;
  to.out = p.out;
  to.out_dtype = p.out_dtype;
  to.lse = p.lse;
  place_keys(call, workspace, to);
  to.q_strides = p.q_strides;
  to.out_strides = p.out_strides;
  to.lse_strides = p.lse_strides;
  to.cu_seqlens_q = p.cu_seqlens_q;
  to.total_q = p.total_q;
  to.dtype = to.kv_dtype = p.dtype;
  if (call.paged) to.kv_dtype = call.gather.dtype;
  to.num_heads_q = p.num_heads_q;
  to.head_dim = p.head_dim;
  to.scores = p.scores;
  Float8Scales stored = stored_scales(call);
  to.k_scale = stored.k.number;
  to.k_scales = stored.k.data;
  to.k_scales_stride_batch = stored.k.strides[0];
  to.k_scales_stride_head = stored.k.strides[1];
  to.v_scale = stored.v.number;
  to.v_scales = stored.v.data;
  to.v_scales_stride_batch = stored.v.strides[0];
  to.v_scales_stride_head = stored.v.strides[1];
  return step;
}

size_t lengths_bytes(const AttentionCall& call) {
  int64_t most = call.params.batch + int64_t{1};
  return whole_pieces(checked_bytes(call.function(), {sizeof(int32_t), 4, most}));
}

Decodes decodes_of(const AttentionCall& call, void* workspace) {
  const AttentionParams& p = call.params;
  auto* lengths = static_cast<int32_t*>(workspace);
  auto take = [&](int64_t count) {
    int32_t* piece = lengths;
    if (lengths != nullptr) lengths += count;
    return piece;
  };
  Decodes decodes{step_of(call, nullptr), {}};
  DecodesApart& apart = decodes.apart;
  apart = {p.cu_seqlens_q, p.seqused_kv,  p.batch,      take(p.batch + int64_t{1}),
           take(p.batch),  take(p.batch), take(p.batch)};
  decodes.step.params.work.q_len = 1;
  decodes.step.params.work.context_lens = apart.decode_lens;
  decodes.step.params.cu_seqlens_q = apart.decode_starts;
  return decodes;
}

size_t decode_bytes(const AttentionCall& call, const Plan& step_plan) {
  return lengths_bytes(call) + whole_pieces(step_plan.workspace_bytes);
}

}  // namespace cuattn
