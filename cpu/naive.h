// SPDX-License-Identifier: Apache-2.0
// What the two plain kernels share: where a head's arrays begin, and the score of one query and one
// key. Next: attention.cpp, backward.cpp.
#pragma once

#include <cmath>
#include <cstdlib>

#include "cpu/convert.h"
#include "cuattn/params/attention.h"

namespace cuattn::cpu {

// One query head of one sequence: its rows, its keys, and where the first element of each lies.
struct Head {
  int32_t b, h, h_kv;
  Span queries, keys;
  int64_t q, k, v, out, lse;  // offsets in elements of row 0
};

inline Head find_head(const AttentionParams& p, int32_t b, int32_t h) {
  int32_t h_kv = h / (p.num_heads_q / p.num_heads_kv);
  Head head{b, h, h_kv, query_span(p, b), key_span(p, b), 0, 0, 0, 0, 0};
  auto first = [&](const Strides& strides, const Span& span, int32_t which) {
    return b * strides.batch + span.start * strides.seq + which * strides.head;
  };
  head.q = first(p.q_strides, head.queries, h);
  head.k = first(p.k_strides, head.keys, h_kv);
  head.v = first(p.v_strides, head.keys, h_kv);
  head.out = first(p.out_strides, head.queries, h);
  head.lse = first(p.lse_strides, head.queries, h);
  return head;
}

// Between a query and a key, as ALiBi counts it.
inline float distance(const Head& head, int32_t row, int32_t key) {
  int64_t keys = static_cast<int64_t>(row) + head.keys.used - head.queries.used - key;
  return static_cast<float>(std::abs(keys));
}

inline float bias_at(const AttentionParams& p, const Head& head, int32_t row, int32_t key) {
  int64_t index = head.b * p.scores.bias_stride_batch + head.h * p.scores.bias_stride_head +
                  row * p.scores.bias_stride_q +
                  (first_key(p, head.b) + key) * p.scores.bias_stride_kv;
  if (p.scores.bias_dtype == DType::boolean)
    return static_cast<const uint8_t*>(p.scores.bias)[index] != 0 ? 0.0f : -INFINITY;
  return load_element(p.scores.bias, index, p.scores.bias_dtype);
}

// After the score program that a user wrote (flex.h): s where there is none.
float flex_score(const AttentionParams& p, const Head& head, int32_t row, int32_t key, float s);

struct Score {
  float value;
  float slope;   // of the softcap: d(capped) / d(scaled)
  float capped;  // scaled and capped, as a score program takes it
};

// The score of a query and a key that it sees.
inline Score score(const AttentionParams& p, const Head& head, int32_t row, int32_t key) {
  int64_t q = head.q + row * p.q_strides.seq, k = head.k + key * p.k_strides.seq;
  double dot = 0.0;
  for (int32_t d = 0; d < p.head_dim; ++d) {
    dot +=
        static_cast<double>(load_element(p.q, q + d, p.dtype)) * load_element(p.k, k + d, p.dtype);
  }
  double scale = static_cast<double>(p.scores.scale) * p.float8.of_query(head.b, head.h, row) *
                 p.float8.of_key(head.b, head.h_kv, first_key(p, head.b) + key);
  float s = static_cast<float>(scale * dot), slope = 1.0f;
  if (p.scores.softcap != 0.0f) {
    float tanh = std::tanh(s / p.scores.softcap);
    s = p.scores.softcap * tanh;
    slope = 1.0f - tanh * tanh;
  }
  float capped = s;
  s = flex_score(p, head, row, key, s);
  if (p.scores.alibi_slopes != nullptr) {
    s -= p.scores.slope(head.b, head.h) * distance(head, row, key);
  }
  if (p.scores.bias != nullptr) s += bias_at(p, head, row, key);
  return {s, slope, capped};
}

// Of the probability of a query and a key: 0 where it is dropped. `dropout` is resolved.
inline float dropout_factor(const DropoutParams& dropout, const Head& head, int32_t row,
                            int32_t key) {
  return kept_factor(dropout, dropout.head(head.b, head.h), row, key);
}

}  // namespace cuattn::cpu
