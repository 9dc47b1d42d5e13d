// SPDX-License-Identifier: Apache-2.0
// Merges partial attention results over disjoint keys: out = sum_i out_i exp(lse_i) / sum_i
// exp(lse_i). Online softmax, arXiv:1805.02867. Next: cuda/merge/states.cu.
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace cuattn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Part i of one (batch, row, head).
struct Parts {
  const MergeParams& p;
  int64_t b, row, h;

  int64_t offset(const Strides& strides) const {
    return b * strides.batch + row * strides.seq + h * strides.head;
  }
  // -inf: the part saw no key. +inf too, as FlashAttention-2 and vLLM write rows without keys.
  float lse(int32_t part) const {
    int32_t side = p.stacked ? 0 : part;
    int64_t first = p.stacked ? part * p.lse_part_stride : 0;
    float lse = p.lses[side][first + offset(p.lse_strides[side])];
    return lse == kInfinity ? -kInfinity : lse;
  }
  void add_out(int32_t part, float weight, float* acc) const {
    int32_t side = p.stacked ? 0 : part;
    int64_t first = (p.stacked ? part * p.out_part_stride : 0) + offset(p.out_strides[side]);
    for (int32_t d = 0; d < p.head_dim; ++d)
      acc[d] += weight * load_element(p.outs[side], first + d, p.part_dtype);
  }
};

void merge_row(const Parts& parts, float* acc) {
  const MergeParams& p = parts.p;
  float max = -kInfinity;
  for (int32_t i = 0; i < p.num_parts; ++i) max = std::fmax(max, parts.lse(i));

  // A part without keys has no weight, and its out is not read.
  float sum = 0.0f;
  // -0.0 adds nothing, not even to the sign of a lone part's zero.
  for (int32_t d = 0; d < p.head_dim; ++d) acc[d] = -0.0f;
  for (int32_t i = 0; i < p.num_parts; ++i) {
    float lse = parts.lse(i);
    if (lse == -kInfinity) continue;
    float weight = std::exp(lse - max);
    sum += weight;
    parts.add_out(i, weight, acc);
  }

  bool empty = sum == 0.0f;
  int64_t out = parts.offset(p.merged_out_strides);
  for (int32_t d = 0; d < p.head_dim; ++d) {
    store_element(p.merged_out, out + d, p.dtype, empty ? 0.0f : acc[d] / sum);
  }
  if (p.merged_lse != nullptr) {
    p.merged_lse[parts.offset(p.merged_lse_strides)] = empty ? -kInfinity : max + std::log(sum);
  }
}

}  // namespace

void merge_states(const MergeParams& p) {
  double flops = 2.0 * p.batch * p.seqlen * p.num_heads * p.num_parts * p.head_dim;
  parallel_for(p.batch * p.seqlen, flops, [&](int64_t index) {
    std::vector<float> acc(static_cast<size_t>(p.head_dim));
    for (int64_t h = 0; h < p.num_heads; ++h) {
      merge_row({p, index / p.seqlen, index % p.seqlen, h}, acc.data());
    }
  });
}

}  // namespace cuattn::cpu
