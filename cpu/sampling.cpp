// SPDX-License-Identifier: Apache-2.0
// sample and speculative_verify, row by row: the same integers as on the GPU, so the same tokens.
// Next: cuda/fused/sample.cu.
#include "cuattn/params/sampling.h"

#include <array>
#include <vector>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace cuattn::cpu {
namespace {

constexpr int kBins = 2048;
constexpr double kFlopsPerToken = 40.0;

// Memory of one row: of each token the bits in the order of the logits, and the weight.
struct RowMemory {
  std::vector<float> logits;
  std::vector<uint32_t> keys;
  std::vector<uint64_t> weights;

  explicit RowMemory(int64_t vocabulary)
      : logits(static_cast<size_t>(vocabulary)),
        keys(static_cast<size_t>(vocabulary)),
        weights(static_cast<size_t>(vocabulary)) {}
};

// The first token whose weight, with those before it, is above a random number below their sum; -1:
// no weight.
int32_t draw(const std::vector<uint64_t>& weights, uint64_t bits) {
  uint64_t sum = 0;
  for (uint64_t weight : weights) sum += weight;
  if (sum == 0) return -1;
  uint64_t wanted = below(bits, sum);
  sum = 0;
  size_t token = 0;
  while ((sum += weights[token]) <= wanted) ++token;
  return static_cast<int32_t>(token);
}

// The largest key that, with all above it, measures `target` at least; of the keys from `least` on.
template <class Measure>
uint32_t nth_key(const RowMemory& row, const Measure& measure, uint64_t target, uint32_t least) {
  uint32_t prefix = 0;
  int shift = 32;
  for (int width : {11, 11, 10}) {
    shift -= width;
    std::array<uint64_t, kBins> bins{};
    for (size_t i = 0; i < row.keys.size(); ++i) {
      uint32_t key = row.keys[i];
      bool matches = shift + width == 32 || key >> (shift + width) == prefix;
      if (matches && key >= least) bins[key >> shift & ((1u << width) - 1)] += measure(i);
    }
    uint32_t bin = (1u << width) - 1;
    while (bin > 0 && bins[bin] < target) target -= bins[bin--];
    prefix = prefix << width | bin;
  }
  return prefix;
}

uint64_t mass_from(const RowMemory& row, uint32_t least) {
  uint64_t mass = 0;
  for (size_t i = 0; i < row.keys.size(); ++i) mass += row.keys[i] >= least ? row.weights[i] : 0;
  return mass;
}

int32_t sample_row(const SampleParams& p, int64_t index, RowMemory& row) {
  RowFilter filter = filter_of(p, index);
  size_t best = 0;
  bool is_row = true;
  for (size_t i = 0; i < row.keys.size(); ++i) {
    float x = load_element(p.logits, index * p.stride + static_cast<int64_t>(i), p.dtype);
    row.logits[i] = x;
    row.keys[i] = ordered_bits(x);
    is_row &= x == x;
    if (row.keys[i] > row.keys[best]) best = i;
  }
  is_row &= row.keys[best] > kOrderedMinusInfinity && row.keys[best] < kOrderedInfinity;
  if (!is_row) return -1;
  if (filter.greedy) return static_cast<int32_t>(best);
  float maximum = row.logits[best];
  for (size_t i = 0; i < row.keys.size(); ++i)
    row.weights[i] = weight_of_power((row.logits[i] - maximum) * filter.scale);

  uint32_t least = 0;
  if (filter.has_top_k()) {
    auto one = [](size_t) { return uint64_t{1}; };
    least = nth_key(row, one, static_cast<uint64_t>(filter.top_k), 0);
  }
  if (filter.has_top_p()) {
    uint32_t floor = p.joint ? 0 : least;
    auto weight = [&](size_t i) { return row.weights[i]; };
    uint32_t key = nth_key(row, weight, filter.target(mass_from(row, floor)), floor);
    least = key > least ? key : least;
  }
  for (size_t i = 0; i < row.keys.size(); ++i) {
    if (row.keys[i] < least || row.weights[i] < filter.least) row.weights[i] = 0;
  }
  return draw(row.weights, random_bits(p.random, index, 0, DrawFor::sample));
}

int32_t draw_after(const VerifyParams& p, int64_t index, int32_t accepted) {
  const float* target = p.target + index * p.target_stride_row + accepted * p.target_stride_token;
  bool residual = accepted < p.drafts;
  const float* draft =
      residual ? p.draft + index * p.draft_stride_row + accepted * p.draft_stride_token : nullptr;
  uint64_t bits =
      random_bits(p.random, index, accepted, residual ? DrawFor::residual : DrawFor::sample);
  std::vector<uint64_t> weights(static_cast<size_t>(p.vocabulary));
  for (; true; draft = nullptr) {
    for (int64_t i = 0; i < p.vocabulary; ++i) {
      uint64_t weight = weight_of_probability(target[i]);
      uint64_t taken = draft == nullptr ? 0 : weight_of_probability(draft[i]);
      weights[static_cast<size_t>(i)] = weight > taken ? weight - taken : 0;
    }
    int32_t token = draw(weights, bits);
    // Target is nowhere above draft: they are equal but for noise.
    if (token >= 0 || draft == nullptr) return token;
  }
}

}  // namespace

void sample(const SampleParams& p) {
  double work = kFlopsPerToken * static_cast<double>(p.rows) * static_cast<double>(p.vocabulary);
  parallel_for(p.rows, work, [&](int64_t index) {
    RowMemory row(p.vocabulary);
    p.out[index * p.out_stride] = sample_row(p, index, row);
  });
}

void verify(const VerifyParams& p) {
  double work = kFlopsPerToken * static_cast<double>(p.rows) * static_cast<double>(p.vocabulary);
  parallel_for(p.rows, work, [&](int64_t index) {
    const int32_t* drafts = p.draft_tokens + index * p.tokens_stride;
    int32_t accepted = 0;
    for (; accepted < p.drafts; ++accepted) {
      int32_t token = drafts[accepted];
      if (token < 0 || token >= p.vocabulary) break;
      const float* draft = p.draft + index * p.draft_stride_row + accepted * p.draft_stride_token;
      const float* target =
          p.target + index * p.target_stride_row + accepted * p.target_stride_token;
      if (!is_accepted(p.random, index, accepted, draft[token], target[token])) break;
    }
    int32_t token = draw_after(p, index, accepted);
    int32_t* out = p.tokens + index * p.out_stride;
    for (int32_t i = 0; i <= p.drafts; ++i)
      out[i] = i < accepted ? drafts[i] : i == accepted ? token : -1;
    p.accepted[index * p.accepted_stride] = accepted;
  });
}

}  // namespace cuattn::cpu
