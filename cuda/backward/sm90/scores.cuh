// SPDX-License-Identifier: Apache-2.0
// Scores of the sm90 backward passes, a whole accumulator at a time: what the smooth form does to
// dot products before P is made of them. The general form is ScoreMod of device/mask.cuh, a score at
// a time. Used by queries.cuh and key_tiles.cuh.
#pragma once

#include "cuattn/device/mma_sm80.cuh"
#include "cuattn/device/scores.cuh"
#include "cuda/backward/sm90/tiles.cuh"

namespace cuattn::backward {

// `hidden` for scores that a row does not see. `first`: the column of score 0.
template <MaskKind kMask, int kCount>
__device__ __forceinline__ void hide_outside(float (&scores)[kCount], const KeyRange (&seen)[2],
                                             int32_t first, float hidden) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const KeyRange& columns = seen[i / 2 % 2];
    const int column = i / 4 * 8 + i % 2;
    bool sees = column < columns.end - first;
    if constexpr (kMask != MaskKind::none) sees = sees && column >= columns.begin - first;
    scores[i] = sees ? scores[i] : hidden;
  }
}

// A softcap, or ALiBi. `modify` leaves what is an exponent in base 2 when multiplied by to_log2: with
// a softcap the tanh, from which the derivative of a score comes, too; else a dot product with the
// slope in its units.
template <DType kType>
struct SmoothScores {
  const ScoreParams* s;
  int32_t b, head;

  __device__ SmoothScores(const AttentionParams& f, int32_t b, int32_t head, int32_t, int32_t)
      : s(&f.scores), b(b), head(head) {}
  __device__ __forceinline__ bool caps() const { return s->softcap > 0.0f; }
  __device__ __forceinline__ float to_log2() const {
    return (caps() ? s->softcap : s->scale) * device::kLog2e;
  }

  // Score i of a fragment lies i / 4 * 8 + i % 2 columns and i / 2 % 2 * 8 rows past score 0, whose
  // query is `distance` past the place of its key. kKeysInRows: rows are keys, columns queries.
  template <bool kKeysInRows, int kCount>
  __device__ __forceinline__ void modify(float (&scores)[kCount], int32_t distance) const {
    if (caps()) {
      const float ratio = s->scale * s->inv_softcap;
#pragma unroll
      for (float& score : scores) {  // tanh as the forward kernel makes it
        const float x = score * ratio;
        score = kType == DType::bf16 ? device::tanh_approx(x) : device::tanh_exp2(x);
      }
    } else {
      const float base = static_cast<float>(distance);
      const float slope = s->slope(b, head) * device::rcp_approx(s->scale);  // of dot products
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int column = i / 4 * 8 + i % 2, down = i / 2 % 2 * 8;
        const float past = static_cast<float>(kKeysInRows ? column - down : down - column);
        scores[i] = fmaf(-slope, fabsf(base + past), scores[i]);
      }
    }
  }

  // The terms of dslopes, of rows that are queries: of a tile of ds.
  template <int kCount>
  static __device__ __forceinline__ void add_slope_terms(float (&terms)[2],
                                                         const float (&ds)[kCount],
                                                         int32_t distance) {
    const float base = static_cast<float>(distance);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int half = i / 2 % 2;
      const float past = static_cast<float>(half * 8 - (i / 4 * 8 + i % 2));
      terms[half] = fmaf(-ds[i], fabsf(base + past), terms[half]);
    }
  }

  // What has the probability 0 and a finite derivative, for what a row does not see.
  __device__ __forceinline__ float hidden() const {
    return caps() ? -0x1p60f : device::negative_infinity();
  }

  // d(score) / d(scaled dot product), from the tanh.
  static __device__ __forceinline__ float derivative(float tanh) { return fmaf(-tanh, tanh, 1.0f); }
};

// A bias that comes with the tiles, panels of 64 keys (panel, query, 64). `add` leaves scores in
// natural units.
template <DType kType>
struct BiasedScores {
  static constexpr float to_log2 = device::kLog2e;
  float scale;

  __device__ BiasedScores(const AttentionParams& f, int32_t, int32_t, int32_t, int32_t)
      : scale(f.scores.scale) {}
  __device__ __forceinline__ float hidden() const { return device::negative_infinity(); }

  // A warp's rows of a tile of queries; of its 8 warps each has 16.
  template <int kRows, int kCount>
  __device__ __forceinline__ void add(float (&scores)[kCount], uint32_t tile) const {
    static_assert(kRows == 128);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 - 64 + lane % 16;
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {
      uint32_t words[4];
      device::ldmatrix_x4(
          words, tile + j / 4 * kRows * 128 + device::swizzled<128>(row, 2 * (j % 4) + lane / 16));
      add_words(&scores[8 * j], words);
    }
  }
  // The same where rows are keys, columns the kRows queries: a warp has 16 of 128 keys.
  template <int kRows, int kCount>
  __device__ __forceinline__ void add_transposed(float (&scores)[kCount], uint32_t tile) const {
    static_assert(kRows == 2 * kCount);
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    const int row = lane / 16 * 8 + lane % 8, chunk = warp % 4 * 2 + lane / 8 % 2;
    const uint32_t from = tile + warp / 4 * kRows * 128 + device::swizzled<128>(row, chunk);
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {
      uint32_t words[4];
      device::ldmatrix_x4_trans(words, from + j * 16 * 128);
      add_words(&scores[8 * j], words);
    }
  }
  // Adds the bias of two blocks of 8 columns.
  __device__ __forceinline__ void add_words(float* scores, const uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto& bias = reinterpret_cast<const device::Element<kType>(&)[2]>(words[i / 2]);
      scores[i] = fmaf(scores[i], scale, device::to_float(bias[i % 2]));
    }
  }
};

// `hidden()` for scores that a mask hides where rows are keys and nothing but `right` limits the queries
// that see them. The query of score 0 is `distance` past the place of its key.
template <int kCount, class Hidden>
__device__ __forceinline__ void hide_left(float (&scores)[kCount], int32_t distance, int32_t right,
                                          Hidden hidden) {
  const int32_t least =
      right < 0 ? INT32_MIN
                : static_cast<int32_t>(max(-int64_t{distance} - right, int64_t{INT32_MIN}));
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int past = i / 4 * 8 + i % 2 - i / 2 % 2 * 8;
    scores[i] = past >= least ? scores[i] : hidden();
  }
}

// What makes a modified score an exponent in base 2.
template <class Mod>
__device__ __forceinline__ float exponent_of(const Mod& mod) {
  return mod.to_log2;
}
template <DType kType>
__device__ __forceinline__ float exponent_of(const SmoothScores<kType>& mod) {
  return mod.to_log2();
}

// What a pass asks of its scores: ScoreMod, or a fragment's worth. Row ranges come with it.
template <DType kType, MaskKind kMask, ScoreForm kForm>
struct ScoresOf {
  using Type = device::ScoreMod<kType, kForm == ScoreForm::general ? ScoreKind::scored
                                                                   : ScoreKind::identity>;
};
template <DType kType, MaskKind kMask>
struct ScoresOf<kType, kMask, ScoreForm::smooth> {
  using Type = SmoothScores<kType>;
};
template <DType kType, MaskKind kMask>
struct ScoresOf<kType, kMask, ScoreForm::biased> {
  using Type = BiasedScores<kType>;
};
template <DType kType>
struct ScoresOf<kType, MaskKind::rows, ScoreForm::plain> {
  using Type = device::OptionPolicy<kType, MaskKind::rows, ScoreKind::identity>;
};

}  // namespace cuattn::backward
