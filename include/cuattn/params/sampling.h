// SPDX-License-Identifier: Apache-2.0
// The plain structs of sampling, and its arithmetic, which is the same bit for bit wherever it
// runs: probabilities are integers, so that their sums do not depend on an order. Clean under
// NVRTC. Next: cpu/sampling.cpp, cuda/fused/sample.cu.
#pragma once

#include "cuattn/params/dropout.h"
#include "cuattn/params/types.h"

namespace cuattn {

constexpr int64_t kMaxVocabulary = int64_t{1} << 22;  // its weights sum to less than 2^63
constexpr int kWeightBits = 40;                       // the weight of the likeliest token is 2^40

// A number for each row, or one for all.
template <class T>
struct PerRow {
  T number;
  const T* array;  // [rows], or nullptr
  int64_t stride;

  CUATTN_HOST_DEVICE T operator()(int64_t row) const {
    return array != nullptr ? array[row * stride] : number;
  }
};

// Whose random numbers: those of a request depend on its seed and offset, not on its row.
struct RandomParams {
  PerRow<int64_t> seed, offset;
};

// What a random number is for: a word of Philox's counter.
enum class DrawFor : uint32_t { sample, accept, residual };

CUATTN_HOST_DEVICE PhiloxWords random_words(const RandomParams& p, int64_t row, int64_t index,
                                            DrawFor purpose) {
  uint64_t offset = static_cast<uint64_t>(p.offset(row));
  return philox({static_cast<uint32_t>(index), static_cast<uint32_t>(purpose),
                 static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)},
                static_cast<uint64_t>(p.seed(row)));
}
CUATTN_HOST_DEVICE uint64_t random_bits(const RandomParams& p, int64_t row, int64_t place,
                                        DrawFor purpose) {
  PhiloxWords words = random_words(p, row, place, purpose);
  return words.x | static_cast<uint64_t>(words.y) << 32;
}

// sample: out[row] is drawn from softmax(logits / temperature) after its filters. A row with NaN,
// with +inf, or with nothing above -inf gives -1.
struct SampleParams {
  const void* logits;  // [rows, vocabulary]
  int64_t stride;      // between rows
  DType dtype;
  int64_t rows, vocabulary;
  PerRow<float> temperature;  // not above 0: the first of the largest
  PerRow<int32_t> top_k;      // below 1: off
  PerRow<float> top_p;        // 1 and more: off
  PerRow<float> min_p;        // 0: off
  bool joint;                 // top_p of all the mass; else of what top_k leaves
  RandomParams random;
  int32_t* out;
  int64_t out_stride;
};

// speculative_verify of a chain: draft token i is accepted with probability min(1, target / draft);
// in place of the first that is not, one is drawn from max(0, target - draft). If all are accepted,
// one more is drawn from the last row of target.
struct VerifyParams {
  const float *draft, *target;  // [rows, drafts, vocabulary], [rows, drafts + 1, vocabulary]
  int64_t draft_stride_row, draft_stride_token, target_stride_row, target_stride_token;
  const int32_t* draft_tokens;  // [rows, drafts]
  int64_t tokens_stride;
  int64_t rows, vocabulary;
  int32_t drafts;
  RandomParams random;
  int32_t* tokens;    // [rows, drafts + 1]: the accepted, the one drawn, then -1
  int32_t* accepted;  // [rows]
  int64_t out_stride, accepted_stride;
};

// Floats in the order of their values, as integers; -0 is 0.
CUATTN_HOST_DEVICE uint32_t ordered_bits(float x) {
  union {
    float value;
    uint32_t bits;
  } y = {x + 0.0f};
  return y.bits ^ (y.bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
constexpr uint32_t kOrderedMinusInfinity = 0x007fffffu, kOrderedInfinity = 0xff800000u;

// Note: a product and the sum after it must not become one operation, which rounds once. The
// compiler of cpu/sampling.cpp is told so.
CUATTN_HOST_DEVICE float product_then_sum(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(__fmul_rn(a, b), c);
#else
  return a * b + c;
#endif
}

// 2^x for x <= 0, in units of 2^-40, to 2^-23 of itself and half a unit; 0 for NaN.
CUATTN_HOST_DEVICE uint64_t weight_of_power(float x) {
  if (!(x > -41.0f)) return 0;
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: a sum keeps the whole part of x low
  union {
    float value;
    uint32_t bits;
  } shifted = {x + kShift};
  int32_t whole = static_cast<int32_t>(shifted.bits) - 0x4b400000;
  float f = x - (shifted.value - kShift);  // within [-0.5, 0.5], exact
  // The coefficients of cpu/vectors.h: minimax in the relative error, 1 at 0.
  float p = 1.5345812e-4f;
  p = product_then_sum(p, f, 1.3399931e-3f);
  p = product_then_sum(p, f, 9.6184891e-3f);
  p = product_then_sum(p, f, 5.5503286e-2f);
  p = product_then_sum(p, f, 2.4022646e-1f);
  p = product_then_sum(p, f, 6.9314718e-1f);
  p = product_then_sum(p, f, 1.0f);
  uint64_t mantissa = static_cast<uint64_t>(p * 16777216.0f);  // below 2^25: exact
  int32_t shift = kWeightBits - 24 + whole;
  return shift >= 0 ? mantissa << shift : mantissa >> -shift;
}

// A probability in the same units; what is none is 0. The sum of a vocabulary of 2s fits too.
CUATTN_HOST_DEVICE uint64_t weight_of_probability(float p) {
  if (!(p > 0.0f)) return 0;
  return static_cast<uint64_t>((p < 2.0f ? p : 2.0f) * 1099511627776.0f);
}

// The filters of a row.
struct RowFilter {
  bool greedy;
  float scale;  // logits to base 2
  int64_t top_k;
  double top_p;
  uint64_t least;  // weight, for min_p

  CUATTN_HOST_DEVICE bool has_top_k() const { return top_k > 0; }
  CUATTN_HOST_DEVICE bool has_top_p() const { return top_p < 1.0; }
  // The mass that the tokens kept by top_p have at least.
  CUATTN_HOST_DEVICE uint64_t target(uint64_t total) const {
    double wanted = static_cast<double>(total) * top_p;
    uint64_t whole = static_cast<uint64_t>(wanted);
    if (static_cast<double>(whole) < wanted) ++whole;
    return whole < 1 ? 1 : whole < total ? whole : total;
  }
};

CUATTN_HOST_DEVICE RowFilter filter_of(const SampleParams& p, int64_t row) {
  float temperature = p.temperature(row), top_p = p.top_p(row);
  int32_t top_k = p.top_k(row);
  RowFilter filter;
  filter.greedy = !(temperature > 0.0f);
  constexpr float kLargest = 3.4028235e38f;
  float scale = 1.44269504f / temperature;
  filter.scale = scale < kLargest ? scale : kLargest;
  filter.top_k = top_k >= 1 && top_k < p.vocabulary ? top_k : 0;
  filter.top_p = top_p > 0.0f ? static_cast<double>(top_p) : 0.0;
  if (!(top_p == top_p)) filter.top_p = 1.0;
  filter.least = weight_of_probability(p.min_p(row));
  if (filter.least > uint64_t{1} << kWeightBits) filter.least = uint64_t{1} << kWeightBits;
  return filter;
}

// A uniform number below `mass`.
CUATTN_HOST_DEVICE uint64_t below(uint64_t bits, uint64_t mass) {
#ifdef __CUDA_ARCH__
  return __umul64hi(bits, mass);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(bits) * mass) >> 64);
#endif
}

// Whether a draft token is accepted.
CUATTN_HOST_DEVICE bool is_accepted(const RandomParams& p, int64_t row, int32_t place, float draft,
                                    float target) {
  uint32_t word = random_words(p, row, place, DrawFor::accept).x;
  return static_cast<float>(word >> 8) * 0x1p-24f * draft < target;
}

}  // namespace cuattn
