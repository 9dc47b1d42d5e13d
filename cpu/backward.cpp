// SPDX-License-Identifier: Apache-2.0
// THE mathematics of attention's gradients in plain loops. Kernel cpu_naive: every option, every
// dtype, three numbers of each pair (query, key) in memory; sums are kept in double. With x = scale
// q k, t = softcap(x), s = t + alibi + bias, P = exp(s - lse) and Z the factor of dropout:
//   delta = dout . out - dlse           ds = P (Z (dout . v) - delta)       dx = ds dt/dx
//   dq = scale sum_j dx k               dk = scale sum_i dx q               dv = sum_i P Z dout
//   dbias = sum ds                      dslope = - sum ds |distance|
//   dsink = - sum exp(sink - lse) delta
// Where a user wrote the score f, s = f(t) + alibi + bias and dx = ds df/dt dt/dx. Next: backward_flash.cpp (the same in tiles).
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/flex.h"
#include "cpu/gradients.h"
#include "cpu/kernels.h"
#include "cpu/naive.h"
#include "cpu/parallel.h"

namespace cuattn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Of one query and one key; all 0 where it is not seen. What is multiplied by 0 is not read: rows
// that nobody sees may hold NaN.
struct Pair {
  float weight;  // P Z
  float ds, dx;
};

double dot(const void* a, int64_t a_first, const void* b, int64_t b_first, int32_t dim,
           DType dtype) {
  double sum = 0.0;
  for (int32_t d = 0; d < dim; ++d) {
    sum += static_cast<double>(load_element(a, a_first + d, dtype)) *
           load_element(b, b_first + d, dtype);
  }
  return sum;
}

struct Backward {
  const BackwardParams& p;
  const AttentionParams& f;
  DropoutParams dropout;
  Pair* pairs;

  Pair* row_pairs(const Head& head, int32_t row) const {
    int64_t index = (int64_t{head.b} * f.num_heads_q + head.h) * f.seqlen_q + row;
    return pairs + index * f.seqlen_kv;
  }
  static int64_t first(const Strides& strides, const Head& head) {
    return head.b * strides.batch + head.queries.start * strides.seq + head.h * strides.head;
  }

  // The pairs of one query with all keys.
  HeadSums differentiate_row(const Head& head, int32_t row) const {
    Pair* pair = row_pairs(head, row);
    std::fill(pair, pair + head.keys.used, Pair{});
    float lse = f.lse[head.lse + row * f.lse_strides.seq];
    if (lse == -kInfinity) return {};  // a dead row
    int64_t dout = first(p.dout_strides, head) + row * p.dout_strides.seq;
    double delta =
        dot(p.dout, dout, f.out, head.out + row * f.out_strides.seq, f.head_dim_v, f.dtype);
    if (p.dlse != nullptr) delta -= p.dlse[first(p.dlse_strides, head) + row * p.dlse_strides.seq];
    HeadSums sums{};
    if (f.scores.sinks != nullptr) {
      float sink = finite_sink(f.scores.sinks[head.h * f.scores.sinks_stride]);
      sums.sink = -std::exp(static_cast<double>(sink) - lse) * delta;
    }
    KeyRange visible = f.mask.visible(row, head.queries.used, head.keys.used);
    visible = f.rows.limit(visible, head.b, head.h, head.queries.start + row);
    for (int32_t key = visible.begin; key < visible.end; ++key) {
      if (!flex_sees(f, head, row, key)) continue;
      Score s = score(f, head, row, key);
      if (s.value == -kInfinity) continue;
      float exponent = s.value - lse;
      float weight = std::exp(exponent > 0.0f ? 0.0f : exponent);  // NaN stays NaN
      if (weight == 0.0f) continue;
      float factor = dropout_factor(dropout, head, row, key);
      double dweight =
          dot(p.dout, dout, f.v, head.v + key * f.v_strides.seq, f.head_dim_v, f.dtype);
      float ds = static_cast<float>(weight * (factor * dweight - delta));
      pair[key] = {weight * factor, ds, ds * s.slope};
      if (p.flex != nullptr && ds != 0.0f)
        pair[key].dx *= flex_slope(f, *p.flex, head, row, key, s.capped, ds, nullptr);
      sums.slope -= static_cast<double>(ds) * distance(head, row, key);
    }
    return sums;
  }

  void store_dq(const Head& head, int32_t row, double* sums) const {
    const Pair* pair = row_pairs(head, row);
    std::fill(sums, sums + f.head_dim, 0.0);
    for (int32_t key = 0; key < head.keys.used; ++key) {
      if (pair[key].dx == 0.0f) continue;
      int64_t k = head.k + key * f.k_strides.seq;
      for (int32_t d = 0; d < f.head_dim; ++d)
        sums[d] += static_cast<double>(pair[key].dx) * load_element(f.k, k + d, f.dtype);
    }
    int64_t to = first(p.dq_strides, head) + row * p.dq_strides.seq;
    for (int32_t d = 0; d < f.head_dim; ++d)
      store_element(p.dq, to + d, f.dtype, static_cast<float>(f.scores.scale * sums[d]));
  }

  // dk (rows: q) or dv (rows: dout) of one key, summed over the queries of the head's group.
  void store_of_key(const Head& first_head, int32_t key, float Pair::* weight, const void* rows,
                    const Strides& row_strides, int32_t dim, double factor, void* to,
                    const Strides& to_strides, DType to_dtype, double* sums) const {
    int32_t group = f.num_heads_q / f.num_heads_kv;
    std::fill(sums, sums + dim, 0.0);
    Head head = first_head;
    for (int32_t g = 0; g < group; ++g, ++head.h) {
      int64_t row_first = first(row_strides, head);
      for (int32_t row = 0; row < head.queries.used; ++row) {
        double w = row_pairs(head, row)[key].*weight;
        if (w == 0.0) continue;
        for (int32_t d = 0; d < dim; ++d)
          sums[d] += w * load_element(rows, row_first + row * row_strides.seq + d, f.dtype);
      }
    }
    int64_t offset = head.b * to_strides.batch + (head.keys.start + key) * to_strides.seq +
                     first_head.h / group * to_strides.head;
    for (int32_t d = 0; d < dim; ++d)
      store_element(to, offset + d, to_dtype, static_cast<float>(factor * sums[d]));
  }

  void store_keys(const Head& first_head, double* sums) const {
    for (int32_t key = 0; key < first_head.keys.used; ++key) {
      if (p.dk != nullptr) {
        store_of_key(first_head, key, &Pair::dx, f.q, f.q_strides, f.head_dim, f.scores.scale, p.dk,
                     p.dk_strides, p.dk_dtype, sums);
      }
      if (p.dv != nullptr) {
        store_of_key(first_head, key, &Pair::weight, p.dout, p.dout_strides, f.head_dim_v, 1.0,
                     p.dv, p.dv_strides, p.dv_dtype, sums);
      }
    }
  }

  // What all pairs give the arrays that a score program reads, in order.
  void store_arrays() const {
    std::vector<double> sums(static_cast<size_t>(p.flex->num_sums), 0.0);
    for (int32_t b = 0; b < f.batch; ++b) {
      for (int32_t h = 0; h < f.num_heads_q; ++h) {
        Head head = find_head(f, b, h);
        for (int32_t row = 0; row < head.queries.used; ++row) {
          for (int32_t key = 0; key < head.keys.used; ++key) {
            float ds = row_pairs(head, row)[key].ds;
            if (ds == 0.0f) continue;
            float capped = score(f, head, row, key).capped;
            flex_slope(f, *p.flex, head, row, key, capped, ds, sums.data());
          }
        }
      }
    }
    store_array_gradients(*f.flex, *p.flex, sums.data(), 1);
  }

  // The sum of ds over what the bias is broadcast over, for the row (b, h, i) of dbias.
  void store_dbias_row(int64_t b, int64_t h, int64_t i) const {
    const BiasGradient& bias = p.dbias;
    auto range = [&](int32_t axis, int64_t index, int64_t all) {
      return bias.extents[axis] == 1 ? std::pair(int64_t{0}, all) : std::pair(index, index + 1);
    };
    std::vector<double> sums(static_cast<size_t>(bias.extents[3]), 0.0);
    auto [b_begin, b_end] = range(0, b, f.batch);
    auto [h_begin, h_end] = range(1, h, f.num_heads_q);
    auto [i_begin, i_end] = range(2, i, f.seqlen_q);
    for (int64_t at_b = b_begin; at_b < b_end; ++at_b) {
      for (int64_t at_h = h_begin; at_h < h_end; ++at_h) {
        Head head = find_head(f, static_cast<int32_t>(at_b), static_cast<int32_t>(at_h));
        for (int64_t at_i = i_begin; at_i < i_end && at_i < head.queries.used; ++at_i) {
          const Pair* pair = row_pairs(head, static_cast<int32_t>(at_i));
          int64_t column = first_key(f, head.b);
          for (int32_t key = 0; key < head.keys.used; ++key)
            sums[bias.extents[3] == 1 ? 0 : static_cast<size_t>(column + key)] += pair[key].ds;
        }
      }
    }
    int64_t to = b * bias.strides[0] + h * bias.strides[1] + i * bias.strides[2];
    for (int64_t j = 0; j < bias.extents[3]; ++j) {
      store_element(bias.data, to + j * bias.strides[3], f.scores.bias_dtype,
                    static_cast<float>(sums[static_cast<size_t>(j)]));
    }
  }
};

}  // namespace

void naive_backward(const BackwardParams& p, float* memory) {
  const AttentionParams& f = p.forward;
  static_assert(sizeof(Pair) == 3 * sizeof(float), "as the plan counts them");
  Backward backward{p, f, f.dropout.resolved(), reinterpret_cast<Pair*>(memory)};
  int64_t heads = int64_t{f.batch} * f.num_heads_q;
  double flops = 4.0 * heads * f.seqlen_q * f.seqlen_kv * (f.head_dim + f.head_dim_v);
  auto head_at = [&](int64_t index) {
    return find_head(f, static_cast<int32_t>(index / f.num_heads_q),
                     static_cast<int32_t>(index % f.num_heads_q));
  };
  clear_unused(p);
  if (heads == 0) {
    clear_dbias(p);
    if (p.flex != nullptr) store_array_gradients(*f.flex, *p.flex, nullptr, 0);
    return store_head_sums(p, {});
  }
  std::vector<HeadSums> sums(static_cast<size_t>(heads));
  parallel_for(heads, flops, [&](int64_t index) {
    Head head = head_at(index);
    std::vector<double> row_sums(static_cast<size_t>(f.head_dim));
    for (int32_t row = 0; row < head.queries.used; ++row) {
      HeadSums of_row = backward.differentiate_row(head, row);
      sums[static_cast<size_t>(index)].sink += of_row.sink;
      sums[static_cast<size_t>(index)].slope += of_row.slope;
      if (p.dq != nullptr) backward.store_dq(head, row, row_sums.data());
    }
  });
  int32_t group = f.num_heads_q / f.num_heads_kv;
  parallel_for(int64_t{f.batch} * f.num_heads_kv, flops, [&](int64_t index) {
    std::vector<double> row_sums(static_cast<size_t>(std::max(f.head_dim, f.head_dim_v)));
    backward.store_keys(head_at(index * group), row_sums.data());
  });
  if (p.needs(kNeedDbias)) {
    const int64_t* extents = p.dbias.extents;
    parallel_for(extents[0] * extents[1] * extents[2], flops, [&](int64_t index) {
      int64_t head = index / extents[2];
      backward.store_dbias_row(head / extents[1], head % extents[1], index % extents[2]);
    });
  }
  if (p.flex != nullptr) backward.store_arrays();
  store_head_sums(p, sums);
}

}  // namespace cuattn::cpu
