// SPDX-License-Identifier: Apache-2.0
// What the two kernels of the backward pass share: rows that take no part, whose gradients are 0.
// Next: backward.cpp, backward_units.cpp.
#pragma once

#include <cstring>
#include <vector>

#include "cpu/convert.h"
#include "cuattn/params/backward.h"

namespace cuattn::cpu {

inline int64_t item_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

inline char* element(void* base, int64_t index, DType dtype) {
  return static_cast<char*>(base) + index * item_bytes(dtype);
}
inline const char* element(const void* base, int64_t index, DType dtype) {
  return static_cast<const char*>(base) + index * item_bytes(dtype);
}

// Calls body(b, row) for each row of memory that takes no part: `row` counts from the first of
// sequence b, or of the array where it is ragged.
template <class SpanOf, class Body>
void each_unused_row(const int32_t* cu_seqlens, int32_t batch, int64_t total, SpanOf&& span_of,
                     Body&& body) {
  for (int32_t b = 0; b < batch; ++b) {
    Span span = span_of(b);
    for (int32_t row = 0; cu_seqlens == nullptr && row < span.start; ++row) body(b, row);
    for (int32_t row = span.used; row < span.stored; ++row) body(b, span.start + row);
  }
  if (cu_seqlens == nullptr) return;
  for (int64_t row = cu_seqlens[batch]; row < total; ++row) body(0, row);  // of no sequence
}

// Zeroes dq, dk and dv of rows that take no part; without heads or sequences, all there is.
inline void clear_unused(const BackwardParams& p) {
  const AttentionParams& f = p.forward;
  auto clear = [](void* base, const Strides& strides, int32_t b, int64_t row, int32_t heads,
                  int32_t dim, DType dtype) {
    if (base == nullptr) return;
    for (int32_t h = 0; h < heads; ++h) {
      int64_t offset = b * strides.batch + row * strides.seq + h * strides.head;
      std::memset(element(base, offset, dtype), 0, static_cast<size_t>(dim * item_bytes(dtype)));
    }
  };
  each_unused_row(
      f.cu_seqlens_q, f.batch, f.total_q, [&](int32_t b) { return query_span(f, b); },
      [&](int32_t b, int64_t row) {
        clear(p.dq, p.dq_strides, b, row, f.num_heads_q, f.head_dim, f.dtype);
      });
  each_unused_row(
      f.cu_seqlens_kv, f.batch, f.total_kv,
      [&](int32_t b) {
        Span span = key_span(f, b);
        if (f.num_heads_q == 0) span.used = 0;
        return span;
      },
      [&](int32_t b, int64_t row) {
        clear(p.dk, p.dk_strides, b, row, f.num_heads_kv, f.head_dim, p.dk_dtype);
        clear(p.dv, p.dv_strides, b, row, f.num_heads_kv, f.head_dim_v, p.dv_dtype);
      });
}

// Where row `index` of dbias begins, rows counted over batch, heads and queries.
inline int64_t bias_row(const BiasGradient& bias, int64_t index) {
  const int64_t* extents = bias.extents;
  int64_t head = index / extents[2];
  return head / extents[1] * bias.strides[0] + head % extents[1] * bias.strides[1] +
         index % extents[2] * bias.strides[2];
}

// Zeroes dbias.
inline void clear_dbias(const BackwardParams& p) {
  if (!p.needs(kNeedDbias)) return;
  const BiasGradient& bias = p.dbias;
  const int64_t* extents = bias.extents;
  for (int64_t row = 0; row < extents[0] * extents[1] * extents[2]; ++row) {
    int64_t to = bias_row(bias, row);
    for (int64_t j = 0; j < extents[3]; ++j)
      store_element(bias.data, to + j * bias.strides[3], p.forward.scores.bias_dtype, 0.0f);
  }
}

// One query head's terms of dsinks and dslopes.
struct HeadSums {
  double sink, slope;
};

// sums[batch, num_heads_q] to dsinks and dslopes.
inline void store_head_sums(const BackwardParams& p, const std::vector<HeadSums>& sums) {
  const AttentionParams& f = p.forward;
  for (int32_t h = 0; h < f.num_heads_q; ++h) {
    HeadSums total{};
    for (int32_t b = 0; b < f.batch; ++b) {
      const HeadSums& one = sums[static_cast<size_t>(int64_t{b} * f.num_heads_q + h)];
      total.sink += one.sink;
      total.slope += one.slope;
      if (p.needs(kNeedDslopes) && p.dslopes_per_batch) {
        p.dslopes[b * p.dslopes_stride_batch + h * p.dslopes_stride_head] =
            static_cast<float>(one.slope);
      }
    }
    if (p.needs(kNeedDsinks)) p.dsinks[h * p.dsinks_stride] = static_cast<float>(total.sink);
    if (p.needs(kNeedDslopes) && !p.dslopes_per_batch)
      p.dslopes[h * p.dslopes_stride_head] = static_cast<float>(total.slope);
  }
}

}  // namespace cuattn::cpu
