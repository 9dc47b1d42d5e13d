// SPDX-License-Identifier: Apache-2.0
// What stands between the two products of attention: a policy says which keys a row sees and what
// becomes of a dot product; `apply_policy` does that to a lane's share of a tile. Kernels take the
// policy as a type and ask nothing else about masks and scores. A policy has
//
//   Policy(params, batch, head, queries, keys)   of one head; queries and keys are rows in use
//   kPlain                 a score is its dot product times to_log2, and no more
//   kBegins                a row may see no key in front of some key: the left edge is tested
//   kHeavyLast             later rows see more keys: their tiles are taken first
//   kLoads                 it reads arrays of its own, whose addresses want registers
//   to_log2                a score times this is an exponent in base 2; positive
//   range<n>(begin, end)   the tiles of n keys that rows [begin, end) visit
//   walk<n>(begin, end)    the same as a TileWalk, or what walks likewise
//   visible(row)           the keys that a row sees, [begin, end)
//   (dot, row, key)        the score, of a row and a key in use
//   kAsks, sees(row, key)  whether the masks of a tile that is `masked` are more than visible(row);
//                          of a row and a key in use
//   kMaskKind, kScoreKind  of the options that it knows
//
// and for the backward pass
//
//   through(ds, dot, row, key)   ds, by the score, as a gradient by scale * dot
//   kIsFunctor             it is made of FunctorBackwardParams (device/functor_gradient.cuh), and
//     lists(row, key, masked)      tells the tiles of a pass
//   kGives, give(ds, dot, row, key)  arrays that it reads have gradients
//
// and one that a user writes has the same. Next: mask.cuh (the formula and the tiles), finish.cuh.
#pragma once

#include "cuattn/device/mask.cuh"

namespace cuattn::device {

// The tiles of a range from right to left, as every forward kernel takes them.
struct TileWalk {
  TileRange range;
  int32_t tile;

  __device__ __forceinline__ explicit TileWalk(const TileRange& range)
      : range(range), tile(range.end - 1) {}
  __device__ __forceinline__ bool more() const { return tile >= range.begin; }
  __device__ __forceinline__ bool has_next() const { return tile > range.begin; }
  __device__ __forceinline__ int32_t next_tile() const { return tile - 1; }
  __device__ __forceinline__ void next() { --tile; }
  // Whether some row does not see all keys of the tile.
  __device__ __forceinline__ bool masked() const {
    return tile >= range.full_end || tile < range.full_begin;
  }
};

// The options of the API: mask and scores that are known when a kernel is compiled.
template <DType kType, MaskKind kMask, ScoreKind kScore>
struct OptionPolicy : ScoreMod<kType, kScore> {
  static constexpr bool kPlain = kScore == ScoreKind::identity;
  static constexpr bool kBegins = kMask == MaskKind::window;
  static constexpr bool kHeavyLast = kMask != MaskKind::none;
  static constexpr bool kLoads = false, kAsks = false, kIsFunctor = false, kGives = false;
  static constexpr MaskKind kMaskKind = kMask;
  static constexpr ScoreKind kScoreKind = kScore;
  const MaskParams& mask;
  int32_t queries, keys;

  __device__ __forceinline__ OptionPolicy(const AttentionParams& p, int32_t batch, int32_t head,
                                          int32_t queries, int32_t keys)
      : ScoreMod<kType, kScore>(p, batch, head, queries, keys),
        mask(p.mask),
        queries(queries),
        keys(keys) {}

  __device__ __forceinline__ int32_t left() const {
    return kMask == MaskKind::window ? mask.left : static_cast<int32_t>(kUnlimited);
  }
  __device__ __forceinline__ int32_t right() const {
    return kMask == MaskKind::none ? static_cast<int32_t>(kUnlimited) : mask.right;
  }
  template <int kTileN>
  __device__ __forceinline__ TileRange range(int32_t row_begin, int32_t row_end) const {
    return tile_range<kTileN>(left(), right(), row_begin, row_end, queries, keys);
  }
  template <int kTileN>
  __device__ __forceinline__ TileWalk walk(int32_t row_begin, int32_t row_end) const {
    return TileWalk(range<kTileN>(row_begin, row_end));
  }
  __device__ __forceinline__ KeyRange visible(int32_t row) const {
    if constexpr (kMask == MaskKind::none) return {0, keys};
    return visible_keys(left(), right(), row, queries, keys);
  }
};

// Row ranges, from two arrays, with every other mask.
template <DType kType, ScoreKind kScore>
struct OptionPolicy<kType, MaskKind::rows, kScore> : ScoreMod<kType, kScore> {
  static constexpr bool kPlain = kScore == ScoreKind::identity;
  static constexpr bool kBegins = true;
  static constexpr bool kHeavyLast = false;
  static constexpr bool kLoads = true, kAsks = false, kIsFunctor = false, kGives = false;
  static constexpr MaskKind kMaskKind = MaskKind::rows;
  static constexpr ScoreKind kScoreKind = kScore;
  const AttentionParams& p;
  int32_t queries, keys, batch, head;

  __device__ __forceinline__ OptionPolicy(const AttentionParams& p, int32_t batch, int32_t head,
                                          int32_t queries, int32_t keys)
      : ScoreMod<kType, kScore>(p, batch, head, queries, keys),
        p(p),
        queries(queries),
        keys(keys),
        batch(batch),
        head(head) {}

  // A row past the last is as the last: no load leaves the arrays.
  __device__ __forceinline__ KeyRange visible(int32_t row) const {
    row = min(row, queries - 1);
    return p.rows.limit(p.mask.visible(row, queries, keys), batch, head,
                        query_span(p, batch).start + row);
  }

  // The lanes of a warp share the rows out; all of them ask.
  template <int kTileN>
  __device__ __forceinline__ TileRange range(int32_t row_begin, int32_t row_end) const {
    if (row_end <= row_begin || keys <= 0) return {0, 0, 0, 0};
    int32_t begin = keys, end = 0, last_begin = 0, first_end = keys;
    for (int32_t row = row_begin + threadIdx.x % 32; row < row_end; row += 32) {
      KeyRange seen = visible(row);
      if (seen.begin < seen.end) begin = min(begin, seen.begin), end = max(end, seen.end);
      last_begin = max(last_begin, seen.begin);
      first_end = min(first_end, seen.end);
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
      begin = min(begin, __shfl_xor_sync(0xffffffffu, begin, lane));
      end = max(end, __shfl_xor_sync(0xffffffffu, end, lane));
      last_begin = max(last_begin, __shfl_xor_sync(0xffffffffu, last_begin, lane));
      first_end = min(first_end, __shfl_xor_sync(0xffffffffu, first_end, lane));
    }
    if (end <= begin) return {0, 0, 0, 0};
    int32_t full_begin =
        last_begin / kTileN + (last_begin % kTileN > 0);  // any number may stand there
    return {begin / kTileN, (end - 1) / kTileN + 1, full_begin, first_end / kTileN};
  }
  template <int kTileN>
  __device__ __forceinline__ TileWalk walk(int32_t row_begin, int32_t row_end) const {
    return TileWalk(range<kTileN>(row_begin, row_end));
  }
};

// Dot products become scores in the policy's units, and -inf where a row does not see the key, in
// tiles that are `masked`. `Where` maps a lane's share, kRows x kKeys scores, to rows and keys:
//
//   row(r)            the query row; may lie past the last
//   first, column(j)  the key is first + column(j), of which column(j) is known to the compiler
//   at(scores, r, j)  the score
template <class Policy, class Where, class Scores>
__device__ __forceinline__ void apply_policy(const Policy& policy, Scores& scores,
                                             const Where& where, bool masked) {
  if constexpr (!Policy::kPlain) {
#pragma unroll
    for (int r = 0; r < Where::kRows; ++r) {
      int32_t row = min(where.row(r), policy.queries - 1);  // clamped: no load leaves a bias
#pragma unroll
      for (int j = 0; j < Where::kKeys; ++j) {
        float& score = Where::at(scores, r, j);
        score = policy(score, row, min(where.first + Where::column(j), policy.keys - 1));
      }
    }
  }
  if (!masked) return;
#pragma unroll
  for (int r = 0; r < Where::kRows; ++r) {
    KeyRange visible = policy.visible(where.row(r));
    int32_t begin = visible.begin - where.first, end = visible.end - where.first;
#pragma unroll
    for (int j = 0; j < Where::kKeys; ++j) {
      bool seen = Where::column(j) < end && (!Policy::kBegins || Where::column(j) >= begin);
      if constexpr (Policy::kAsks) {
        int32_t row = min(where.row(r), policy.queries - 1);
        seen = seen && policy.sees(row, min(where.first + Where::column(j), policy.keys - 1));
      }
      float& score = Where::at(scores, r, j);
      score = seen ? score : negative_infinity();
    }
  }
}

}  // namespace cuattn::device
