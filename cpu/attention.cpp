// SPDX-License-Identifier: Apache-2.0
// THE mathematics of attention in plain loops: out = softmax(mask(bias + alibi + softcap(scale * q
// k^T))) v. Kernel cpu_naive: every option, every dtype, scores in memory. Sums are kept in double,
// so that what is left against exact arithmetic is the rounding of scores and weights that each
// faster kernel has too. Next: backward.cpp (the gradients), flash.cpp (the same with tiles and the
// online softmax), cuda/attention/naive.cu.
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "cpu/convert.h"
#include "cpu/flex.h"
#include "cpu/kernels.h"
#include "cpu/naive.h"
#include "cpu/parallel.h"
#include "cuattn/error.h"

namespace cuattn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One row of the output. `scores` is that row of the workspace, indexed by key; `acc` holds
// head_dim_v sums.
void attend_row(const AttentionParams& p, const DropoutParams& dropout, const Head& head,
                int32_t row, float* scores, double* acc) {
  KeyRange visible = p.mask.visible(row, head.queries.used, head.keys.used);
  float max = -kInfinity, sink = -kInfinity;
  if (row >= head.queries.used) {
    visible = {0, 0};
  } else if (p.scores.sinks != nullptr) {
    max = sink = finite_sink(p.scores.sinks[head.h * p.scores.sinks_stride]);
  }
  visible = p.rows.limit(visible, head.b, head.h, head.queries.start + row);
  for (int32_t key = visible.begin; key < visible.end; ++key) {
    scores[key] = flex_sees(p, head, row, key) ? score(p, head, row, key).value : -kInfinity;
    if (scores[key] > max) max = scores[key];
  }

  // A score of -inf is a key not seen: it has no weight, and its value is not read. exp(NaN) stays
  // NaN.
  double sum = sink == -kInfinity ? 0.0 : std::exp(sink - max);
  for (int32_t d = 0; d < p.head_dim_v; ++d) acc[d] = 0.0;
  for (int32_t key = visible.begin; key < visible.end; ++key) {
    if (scores[key] == -kInfinity) continue;
    float weight = std::exp(scores[key] - max);
    sum += weight;
    weight *= dropout_factor(dropout, head, row, key);
    int64_t v = head.v + key * p.v_strides.seq;
    for (int32_t d = 0; d < p.head_dim_v; ++d)
      acc[d] += weight * load_element(p.v, v + d * p.v_channel_stride, value_dtype(p.dtype));
  }

  bool empty = sum == 0.0;
  int64_t out = head.out + row * p.out_strides.seq;
  for (int32_t d = 0; d < p.head_dim_v; ++d) {
    double value = acc[d] * p.float8.of_value(head.b, head.h_kv, d);
    store_element(p.out, out + d, p.out_dtype, empty ? 0.0f : static_cast<float>(value / sum));
  }
  if (p.lse != nullptr) {
    float lse = empty ? -kInfinity : static_cast<float>(max + std::log(sum));
    p.lse[head.lse + row * p.lse_strides.seq] = lse;
  }
}

void check_cu_seqlens(const char* op, const char* name, const int32_t* cu_seqlens, int32_t batch,
                      const char* max_name, int32_t max_seqlen, const char* array, int64_t total) {
  CUATTN_REQUIRE(cu_seqlens[0] == 0, op, ": ", name, " must start at 0, got ", cu_seqlens[0],
                 "; element i is where sequence i begins");
  for (int32_t b = 0; b < batch; ++b) {
    int32_t begin = cu_seqlens[b], end = cu_seqlens[b + 1];
    CUATTN_REQUIRE(end >= begin, op, ": ", name, " must not decrease, got ", end, " after ", begin,
                   " at index ", b + 1, "; pass the running sum of the sequence lengths");
  }
  CUATTN_REQUIRE(cu_seqlens[batch] <= total, op, ": ", name, " must end within the rows of ", array,
                 ", got ", cu_seqlens[batch], " with ", total,
                 " rows; the last element is the total length");
  for (int32_t b = 0; b < batch; ++b) {
    int32_t length = cu_seqlens[b + 1] - cu_seqlens[b];
    CUATTN_REQUIRE(length <= max_seqlen, op, ": ", max_name,
                   " must be at least the longest sequence, got ", max_seqlen, " with a length of ",
                   length, " in ", name, " at index ", b, "; pass the largest difference");
  }
}

void check_seqused(const char* op, const char* name, const int32_t* seqused,
                   const int32_t* cu_seqlens, int32_t batch, int32_t seqlen) {
  for (int32_t b = 0; b < batch; ++b) {
    int32_t length = cu_seqlens != nullptr ? cu_seqlens[b + 1] - cu_seqlens[b] : seqlen;
    CUATTN_REQUIRE(seqused[b] >= 0 && seqused[b] <= length, op, ": ", name, " must lie within [0, ",
                   length, "], got ", seqused[b], " at index ", b,
                   "; it counts the rows in use of each sequence");
  }
}

void check_scale(const char* op, const char* name, const Float8Scale& scale) {
  if (scale.data == nullptr) return;
  for (int64_t b = 0; b < scale.extents[0]; ++b) {
    for (int64_t h = 0; h < scale.extents[1]; ++h) {
      for (int64_t i = 0; i < scale.extents[2]; ++i) {
        float x = scale.data[b * scale.strides[0] + h * scale.strides[1] + i * scale.strides[2]];
        CUATTN_REQUIRE(std::isfinite(x) && x >= 0.0f, op, ": ", name,
                       " must hold finite numbers that are not negative, got ", x, " at (", b, ", ",
                       h, ", ", i, "), axes that it lacks counted as 0; value = stored * scale");
      }
    }
  }
}

}  // namespace

void naive_attention(const AttentionParams& p, float* scores) {
  double flops =
      2.0 * p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_kv * (p.head_dim + p.head_dim_v);
  int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads_q;
  DropoutParams dropout = p.dropout.resolved();
  parallel_for(heads, flops, [&](int64_t index) {
    Head head = find_head(p, static_cast<int32_t>(index / p.num_heads_q),
                          static_cast<int32_t>(index % p.num_heads_q));
    std::vector<double> acc(static_cast<size_t>(p.head_dim_v));
    for (int32_t row = 0; row < head.queries.stored; ++row) {
      attend_row(p, dropout, head, row, scores + (index * p.seqlen_q + row) * p.seqlen_kv,
                 acc.data());
    }
  });
}

void check_attention(const char* op, const AttentionParams& p) {
  if (p.cu_seqlens_q != nullptr) {
    check_cu_seqlens(op, "cu_seqlens_q", p.cu_seqlens_q, p.batch, "max_seqlen_q", p.seqlen_q, "q",
                     p.total_q);
  }
  if (p.cu_seqlens_kv != nullptr) {
    check_cu_seqlens(op, "cu_seqlens_k", p.cu_seqlens_kv, p.batch, "max_seqlen_k", p.seqlen_kv, "k",
                     p.total_kv);
  }
  if (p.seqused_q != nullptr)
    check_seqused(op, "seqused_q", p.seqused_q, p.cu_seqlens_q, p.batch, p.seqlen_q);
  if (p.seqused_kv != nullptr)
    check_seqused(op, "seqused_k", p.seqused_kv, p.cu_seqlens_kv, p.batch, p.seqlen_kv);
  for (int32_t b = 0; p.kv_start != nullptr && b < p.batch; ++b) {
    CUATTN_REQUIRE(p.kv_start[b] >= 0 && p.kv_start[b] <= p.seqlen_kv, op,
                   ": kv_start must lie within [0, ", p.seqlen_kv, "], got ", p.kv_start[b],
                   " at index ", b,
                   "; it is the first key in use, and seqlen_kv where there is none");
  }
  check_scale(op, "q_scale", p.float8.q);
  check_scale(op, "k_scale", p.float8.k);
  check_scale(op, "v_scale", p.float8.v);
  if (p.dropout.state != nullptr) {
    int64_t offset = p.dropout.state[1];
    CUATTN_REQUIRE(offset >= 0 && offset <= kMaxDropoutOffset, op,
                   ": dropout_state must hold an offset in [0, 2^32), got ", offset,
                   "; count calls, and change the seed when they are used up");
  }
}

}  // namespace cuattn::cpu
