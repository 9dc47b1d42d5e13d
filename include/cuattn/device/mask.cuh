// SPDX-License-Identifier: Apache-2.0
// What a tile of scores goes through before the softmax: which key tiles a query tile visits, which
// of them need a mask, and the score functor (softcap, ALiBi, bias). Conventions:
// params/attention.h, docs/numerics.md. Next: cuda/attention/simt.cuh.
#pragma once

#include "cuattn/device/convert.cuh"
#include "cuattn/params/attention.h"

namespace cuattn::device {

// Key tiles of kTileN keys that the query rows [row_begin, row_end) visit: [begin, end). Every row
// sees all keys of the tiles [full_begin, full_end), so those run without a mask; the others test
// each element.
//
//     begin      full_begin      full_end       end
//       |   masked   |   unmasked   |   masked   |
//                                          <-----    walked right to left
struct TileRange {
  int32_t begin, end, full_begin, full_end;
};

// Key 0 lies at place `lead` of tile 0: nobody sees what lies before it.
template <int kTileN>
CUATTN_HOST_DEVICE TileRange tile_range(int32_t window_left, int32_t window_right,
                                        int32_t row_begin, int32_t row_end, int32_t queries,
                                        int32_t keys, int32_t lead = 0) {
  if (row_end <= row_begin || keys <= 0) return {0, 0, 0, 0};
  KeyRange first = visible_keys(window_left, window_right, row_begin, queries, keys);
  KeyRange last = visible_keys(window_left, window_right, row_end - 1, queries, keys);
  if (last.end <= first.begin) return {0, 0, 0, 0};
  TileRange range;
  range.begin = (first.begin + lead) / kTileN;
  range.end = (last.end + lead - 1) / kTileN + 1;
  range.full_begin = (last.begin + lead + kTileN - 1) / kTileN;
  range.full_end = (first.end + lead) / kTileN;
  return range;
}

// Split `split` of the tiles of `range`: an even share of `splits`, or, with a length, those from a
// fixed place on. Then the cuts do not depend on how many splits there are.
CUATTN_HOST_DEVICE TileRange split_of(TileRange range, int32_t split, int32_t splits,
                                      int32_t length) {
  if (length > 0) {
    int32_t first = split * length;
    if (range.begin < first) range.begin = first;
    if (range.end > first + length) range.end = first + length;
    return range;
  }
  int32_t all = range.end - range.begin, more = all % splits;
  range.begin += all / splits * split + (split < more ? split : more);
  range.end = range.begin + all / splits + (split < more);
  return range;
}

// The other way round: tiles of kTileM queries that see the keys [key_begin, key_end).
template <int kTileM>
CUATTN_HOST_DEVICE TileRange query_tile_range(int32_t window_left, int32_t window_right,
                                              int32_t key_begin, int32_t key_end, int32_t queries,
                                              int32_t keys) {
  if (key_end <= key_begin || queries <= 0) return {0, 0, 0, 0};
  KeyRange first = visible_queries(window_left, window_right, key_begin, queries, keys);
  KeyRange last = visible_queries(window_left, window_right, key_end - 1, queries, keys);
  if (last.end <= first.begin) return {0, 0, 0, 0};
  TileRange range;
  range.begin = first.begin / kTileM;
  range.end = (last.end - 1) / kTileM + 1;
  range.full_begin = (last.begin + kTileM - 1) / kTileM;
  range.full_end = first.end / kTileM;
  return range;
}

// tanh(score / softcap), which a softcap is multiplied by. Note: tanh_exp2 is right to 1e-7, not to
// 1e-7 of a small result; times a softcap of 30 that is several times the error of the plain formula
// in float32.
template <DType kType>
__device__ __forceinline__ float capped(float score, float softcap, float inv_softcap) {
  float ratio = score * inv_softcap;
  constexpr bool is_exact =
      kType == DType::f32 || kType == DType::e4m3;  // whose out may be float32
  return is_exact                  ? tanhf(ratio)
         : softcap > kLargeSoftcap ? tanh_of_small(ratio)
                                   : tanh_exp2(ratio);
}

// Scores from dot products. A result times `to_log2` is an exponent in base 2: identity leaves the
// scale to that one multiplication, scored returns natural units.
template <DType kType, ScoreKind kScore>
struct ScoreMod;

template <DType kType>
struct ScoreMod<kType, ScoreKind::identity> {
  float to_log2;  // score * to_log2 is the exponent in base 2; positive

  __device__ ScoreMod(const AttentionParams& p, int32_t, int32_t, int32_t, int32_t)
      : to_log2(p.scores.scale * kLog2e) {}
  __device__ float operator()(float dot, int32_t, int32_t) const { return dot; }
};

template <DType kType>
struct ScoreMod<kType, ScoreKind::scored> {
  static constexpr float to_log2 = kLog2e;
  float scale, softcap, inv_softcap, slope;
  int32_t diagonal;  // key position of query row 0
  const char* bias;  // of this batch and head, or nullptr
  DType bias_dtype;
  int64_t bias_stride_q, bias_stride_kv;

  __device__ ScoreMod(const AttentionParams& p, int32_t b, int32_t head, int32_t queries,
                      int32_t keys)
      : scale(p.scores.scale),
        softcap(p.scores.softcap),
        inv_softcap(p.scores.inv_softcap),
        slope(p.scores.slope(b, head)),
        diagonal(keys - queries),
        bias(nullptr),
        bias_dtype(p.scores.bias_dtype),
        bias_stride_q(p.scores.bias_stride_q),
        bias_stride_kv(p.scores.bias_stride_kv) {
    if (p.scores.bias != nullptr) {
      int64_t size = bias_dtype == DType::f32 ? 4 : bias_dtype == DType::boolean ? 1 : 2;
      bias = static_cast<const char*>(p.scores.bias) +
             (b * p.scores.bias_stride_batch + head * p.scores.bias_stride_head +
              first_key(p, b) * bias_stride_kv) *
                 size;
    }
  }

  // d(capped score) / d(scaled dot product), for the backward pass.
  __device__ float derivative(float dot) const {
    if (softcap <= 0.0f) return 1.0f;
    float tanh = capped<kType>(dot * scale, softcap, inv_softcap);
    return 1.0f - tanh * tanh;
  }

  // ds, by the score, as a gradient by the scaled dot product.
  __device__ float through(float ds, float dot, int32_t, int32_t) const {
    return ds * derivative(dot);
  }

  // How far the key lies from the query's own place, as ALiBi counts it.
  __device__ float distance(int32_t row, int32_t key) const {
    return fabsf(static_cast<float>(row + diagonal - key));
  }

  // `row` < queries and `key` < keys: callers clamp the padding of a tile before they ask.
  __device__ float operator()(float dot, int32_t row, int32_t key) const {
    float score = dot * scale;
    if (softcap > 0.0f) score = softcap * capped<kType>(score, softcap, inv_softcap);
    if (slope != 0.0f) score -= slope * distance(row, key);
    return bias == nullptr ? score : add_bias(score, row, key);
  }

  __device__ float add_bias(float score, int32_t row, int32_t key) const {
    int64_t at = row * bias_stride_q + key * bias_stride_kv;
    if (bias_dtype == DType::f32) return score + reinterpret_cast<const float*>(bias)[at];
    if (bias_dtype == DType::boolean) return bias[at] == 0 ? negative_infinity() : score;
    if constexpr (kType != DType::f32)
      score += to_float(reinterpret_cast<const Element<kType>*>(bias)[at]);
    return score;
  }
};

}  // namespace cuattn::device
