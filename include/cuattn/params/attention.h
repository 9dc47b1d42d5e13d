// SPDX-License-Identifier: Apache-2.0
// The plain structs that kernels receive, CPU and CUDA alike, and the few rules both must share:
// which rows a sequence holds and which keys a query sees. Clean under NVRTC: no includes of the
// standard library there. Next: plan.h (which kernel), cpu/attention.cpp (the mathematics in plain
// loops).
#pragma once

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

#ifdef __CUDACC__
#define CUATTN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CUATTN_HOST_DEVICE inline
#endif

namespace cuattn {

enum class DType : int32_t { f32, f16, bf16, e4m3, boolean, i32, i64 };
enum class MaskKind : int32_t { none, causal, window };  // causal: right limit 0, no left limit
enum class ScoreKind : int32_t { identity, scored };     // scored: any of softcap, ALiBi, bias

constexpr int64_t kUnlimited = -1;  // a window side without limit

// Strides in elements. Ragged tensors have no batch axis: batch = 0 and rows are found through
// cu_seqlens.
struct Strides {
  int64_t batch, seq, head;
};

// Keys and values in blocks of a paged cache: token t of sequence b lies in block
// block_tables[b][t / block_size], at place t % block_size. The strides of k and v then step over
// blocks (batch), places (seq) and heads.
struct Pages {
  const int32_t* block_tables;  // [batch, columns]; nullptr: keys are rows
  int64_t block_tables_stride;
  int64_t num_blocks;
  int32_t block_size;

  CUATTN_HOST_DEVICE const int32_t* entry(int32_t b, int32_t column) const {
    return block_tables + b * block_tables_stride + column;
  }
  // Any id is read as one that exists.
  CUATTN_HOST_DEVICE int32_t existing(int32_t id) const {
    return id < 0 ? 0 : id < num_blocks ? id : static_cast<int32_t>(num_blocks - 1);
  }
  CUATTN_HOST_DEVICE int32_t block(int32_t b, int32_t column) const {
    return existing(*entry(b, column));
  }
};

// Forward attention: O = softmax(mask(bias + alibi + softcap(scale * Q K^T))) V, one row per query
// and head.
struct PrefillParams {
  // Shapes: dense                                       ragged
  // q       [batch, seqlen_q, num_heads_q, head_dim]    [total_q, num_heads_q, head_dim]
  // k       [batch, seqlen_kv, num_heads_kv, head_dim]  [total_kv, num_heads_kv, head_dim]
  // lse     [batch, num_heads_q, seqlen_q]              [num_heads_q, total_q]
  const void* q;
  const void* k;
  const void* v;  // like k, last dimension head_dim_v
  void* out;      // like q, last dimension head_dim_v
  float* lse;     // natural log; or nullptr
  Strides q_strides, k_strides, v_strides, out_strides;
  Strides lse_strides;  // of lse: batch, seq (query row), head

  DType dtype;  // of q, k, v and out
  int32_t batch, num_heads_q, num_heads_kv, head_dim, head_dim_v;
  int32_t seqlen_q, seqlen_kv;  // dense: the lengths; ragged: max_seqlen_q, max_seqlen_k
  int64_t total_q, total_kv;    // rows stored: dense batch * seqlen, ragged the first extent

  const int32_t* cu_seqlens_q;   // [batch + 1] or nullptr (dense)
  const int32_t* cu_seqlens_kv;  // [batch + 1] or nullptr
  const int32_t* seqused_q;      // [batch] or nullptr: rows in use
  const int32_t* seqused_kv;     // [batch] or nullptr
  Pages pages;                   // read by sm90 alone: for the others the keys are gathered

  MaskKind mask;
  int32_t window_left, window_right;  // in keys around the diagonal, kUnlimited = no limit; causal
                                      // is already folded in
  float scale;                        // of the scores, natural units

  ScoreKind score;
  float softcap;              // 0 = off
  float inv_softcap;          // see inverse_softcap
  const float* alibi_slopes;  // [num_heads_q] or [batch, num_heads_q], or nullptr
  int64_t alibi_stride_batch, alibi_stride_head;
  const void* bias;  // broadcast to [batch, num_heads_q, seqlen_q, seqlen_kv], or nullptr
  DType bias_dtype;  // f32, the dtype of q, or boolean (true = keep)
  int64_t bias_stride_batch, bias_stride_head, bias_stride_q, bias_stride_kv;

  const float* sinks;  // [num_heads_q] logits in natural units, or nullptr
  int64_t sinks_stride;

  int32_t num_splits;      // the plan's: parts of the keys
  int32_t packed_heads;    // the plan's: query heads of a group that share a tile; 1 = none
  int32_t tile_m, tile_n;  // the plan's, where a kernel is compiled for several
  int32_t num_ctas;        // the plan's: grid of a persistent kernel; 0 = one CTA per tile
  bool draws_tiles;        // the plan's: the next tile of a CTA is drawn from a counter

  void* workspace;  // as large as the plan says, 256-byte aligned; contents undefined
};

// Whether the TMA of sm_90 can bring the bias: a legal tensor map, and a warp that is free for it.
CUATTN_HOST_DEVICE bool has_bias_map(const PrefillParams& p) {
  return p.pages.block_size == 0 && p.bias_dtype == p.dtype && p.bias_stride_kv == 1 &&
         p.bias_stride_q > 0 && p.bias_stride_batch >= 0 && p.bias_stride_head >= 0 &&
         reinterpret_cast<uint64_t>(p.bias) % 16 == 0 &&
         (p.bias_stride_batch | p.bias_stride_head | p.bias_stride_q) % 8 == 0;
}

// The rows of one sequence: [start, start + stored) lie in memory and are written; the first `used`
// take part.
struct Span {
  int64_t start;
  int32_t stored, used;
};

CUATTN_HOST_DEVICE Span make_span(const int32_t* cu_seqlens, const int32_t* seqused, int32_t b,
                                  int32_t max_seqlen, int64_t total) {
  Span span{0, max_seqlen, max_seqlen};
  if (cu_seqlens != nullptr) {  // clamped to [0, total]: whatever a device tensor holds, no access
                                // leaves the buffers
    int64_t begin = cu_seqlens[b], end = cu_seqlens[b + 1];
    begin = begin < 0 ? 0 : begin > total ? total : begin;
    end = end < begin ? begin : end > total ? total : end;
    span.start = begin;
    span.stored = end - begin < max_seqlen ? static_cast<int32_t>(end - begin) : max_seqlen;
    span.used = span.stored;
  }
  if (seqused != nullptr) {
    int32_t used = seqused[b];
    span.used = used < 0 ? 0 : used < span.stored ? used : span.stored;
  }
  return span;
}

CUATTN_HOST_DEVICE Span query_span(const PrefillParams& p, int32_t b) {
  return make_span(p.cu_seqlens_q, p.seqused_q, b, p.seqlen_q, p.total_q);
}

CUATTN_HOST_DEVICE Span key_span(const PrefillParams& p, int32_t b) {
  return make_span(p.cu_seqlens_kv, p.seqused_kv, b, p.seqlen_kv, p.total_kv);
}

// The keys that query `row` sees, as a half-open range [begin, end) within [0, keys). The diagonal
// is bottom-right aligned: query `row` stands at key row + keys - queries, with queries and keys
// the lengths in use.
struct KeyRange {
  int32_t begin, end;
};

CUATTN_HOST_DEVICE KeyRange visible_keys(int32_t window_left, int32_t window_right, int32_t row,
                                         int32_t queries, int32_t keys) {
  int64_t diagonal = static_cast<int64_t>(row) + keys - queries;
  int64_t begin = 0, end = keys;
  if (window_left >= 0 && diagonal - window_left > begin) begin = diagonal - window_left;
  if (window_right >= 0 && diagonal + window_right + 1 < end) end = diagonal + window_right + 1;
  if (begin > keys) begin = keys;
  if (end < begin) end = begin;
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

// Whether a dot product times scale * log2 e is an exponent, and the largest dot product the
// largest score. Other scales are for kernels that make a score before they take its maximum.
CUATTN_HOST_DEVICE bool is_plain_scale(float scale) { return scale > 0.0f && scale < 0x1p127f; }

// 1 / softcap, or so little less that times the scale it is a float: no infinity, which times a
// score of 0 would be NaN. Beyond, tanh is at 1.
CUATTN_HOST_DEVICE float inverse_softcap(float softcap, float scale) {
  float size = scale < 0.0f ? -scale : scale;
  float most = 1e38f / (size > 1.0f ? size : 1.0f);
  if (softcap <= 0.0f) return 0.0f;
  return softcap * most > 1.0f ? 1.0f / softcap : most;
}

// A sink of +inf counts as the largest float: out is 0, its limit, and lse a number. NaN stays.
CUATTN_HOST_DEVICE float finite_sink(float sink) {
  constexpr float kLargest = 3.4028234664e38f;
  return sink > kLargest ? kLargest : sink;
}

// out = sum_i out_i exp(lse_i) / sum_i exp(lse_i); lse = log sum_i exp(lse_i). A part with lse =
// -inf has no weight, nor has one with +inf, which other libraries write for a row without keys.
// Two parts may lie apart (outs[0], outs[1]); many parts are stacked: part i at outs[0] + i *
// out_part_stride.
struct MergeParams {
  const void* outs[2];  // rows [batch, seqlen, num_heads] of head_dim elements
  const float* lses[2];
  Strides out_strides[2], lse_strides[2];
  int64_t out_part_stride, lse_part_stride;
  int32_t num_parts;
  bool stacked;  // false: exactly two parts

  void* merged_out;
  float* merged_lse;  // or nullptr
  Strides merged_out_strides, merged_lse_strides;

  DType dtype;       // of merged_out
  DType part_dtype;  // of outs: dtype, or f32
  int64_t batch, seqlen, num_heads;
  int32_t head_dim;
};

}  // namespace cuattn
