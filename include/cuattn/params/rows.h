// SPDX-License-Identifier: Apache-2.0
// Which rows a sequence has, and which keys a query sees: the rules that CPU and CUDA share. Next:
// pages.h (rows in blocks), scores.h (what a score goes through).
#pragma once

#include "cuattn/params/types.h"

namespace cuattn {

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

// The span without the first `rows` of those in use.
CUATTN_HOST_DEVICE Span without_first(const Span& span, int32_t rows) {
  int32_t gone = rows < 0 ? 0 : rows < span.used ? rows : span.used;
  return {span.start + gone, span.stored - gone, span.used - gone};
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

// The other way round: the rows [begin, end) within [0, queries) that see a key.
CUATTN_HOST_DEVICE KeyRange visible_queries(int32_t window_left, int32_t window_right, int32_t key,
                                            int32_t queries, int32_t keys) {
  int64_t diagonal = static_cast<int64_t>(key) + queries - keys;
  int64_t begin = 0, end = queries;
  if (window_right >= 0 && diagonal - window_right > begin) begin = diagonal - window_right;
  if (window_left >= 0 && diagonal + window_left + 1 < end) end = diagonal + window_left + 1;
  if (begin > queries) begin = queries;
  if (end < begin) end = begin;
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

// Keys around the diagonal that a query sees: `left` before it, `right` after it, kUnlimited = no
// limit. Causal is right = 0.
struct MaskParams {
  int32_t left, right;

  CUATTN_HOST_DEVICE MaskKind kind() const {
    if (left >= 0) return MaskKind::window;
    return right < 0 ? MaskKind::none : right == 0 ? MaskKind::causal : MaskKind::window;
  }
  CUATTN_HOST_DEVICE KeyRange visible(int32_t row, int32_t queries, int32_t keys) const {
    return visible_keys(left, right, row, queries, keys);
  }
};

}  // namespace cuattn
