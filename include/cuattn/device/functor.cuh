// SPDX-License-Identifier: Apache-2.0
// The policy of a functor: masks and scores that a user wrote in Python, compiled by NVRTC for the
// call (python/cuattn/flex/emit.py writes it). A functor has
//
//   kScore, score(score, place, params)  the score, in natural units, from the capped one
//   kMask, sees(place, params)           whether a key is seen; in sm90 of a place in a tile and what
//                                        was computed of its key and row (sm90/seen.cuh)
//   kAlone                               there is no softcap, ALiBi, bias nor dropout
//   kPlain                               nor a score function
//   kRows, kLists                        whether row ranges and lists of blocks are given
//
// and is asked at places that are in use, in sm90 also past the last row and key, where what it answers
// is of no account. Next: scores.cuh, cuda/attention/sm80/forward.cuh, cuda/attention/sm90/seen.cuh.
#pragma once

#include "cuattn/device/scores.cuh"
#include "cuattn/params/functor.h"

namespace cuattn::device {

struct ScorePlace {
  int32_t b, h, q, k, q_len, kv_len;
  float ahead;  // q - k
};

// 1. What functors call

// The element of a captured array; an index beyond it reads its nearest element.
template <class Value>
struct Stored {
  using Type = Value;
};
template <>
struct Stored<bool> {
  using Type = uint8_t;
};

// In elements, of which an array spans no more than int32 counts (src/attention/flex.cpp).
__device__ __forceinline__ int32_t axis_offset(const FlexArray& array, int axis, int32_t at) {
  return min(max(at, 0), array.extents[axis] - 1) * static_cast<int32_t>(array.strides[axis]);
}
template <class Value>
__device__ __forceinline__ Value element(const FlexArray& array, int32_t offset) {
  return static_cast<Value>(static_cast<const typename Stored<Value>::Type*>(array.data)[offset]);
}
template <class Value>
__device__ __forceinline__ Value load(const FlexArray& array) {
  return element<Value>(array, 0);
}
template <class Value>
__device__ __forceinline__ Value load(const FlexArray& array, int32_t x) {
  return element<Value>(array, axis_offset(array, 0, x));
}
template <class Value>
__device__ __forceinline__ Value load(const FlexArray& array, int32_t x, int32_t y) {
  return element<Value>(array, axis_offset(array, 0, x) + axis_offset(array, 1, y));
}

// Of scores of 16-bit types, right to 2e-6 of themselves. Those of C have branches, which would be
// compiled for each of a thread's scores and take two to four times as long.
__device__ __forceinline__ float score_tanh(float x) { return tanh_of_small(x); }
__device__ __forceinline__ float score_sqrt(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float score_quotient(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// By a positive number, rounded down as in Python.
__device__ __forceinline__ int32_t floor_div(int32_t x, int32_t d) {
  return x / d - (x % d < 0 ? 1 : 0);
}
__device__ __forceinline__ int32_t floor_mod(int32_t x, int32_t d) {
  int32_t rest = x % d;
  return rest < 0 ? rest + d : rest;
}

// 2. Walks

// Without lists every tile is asked about.
struct AskingWalk : TileWalk {
  using TileWalk::TileWalk;
  __device__ __forceinline__ bool masked() const { return true; }
};

// The tiles of listed blocks that lie in a range, from right to left, as the lists are ordered.
struct ListWalk {
  struct Place {
    int32_t at, part, tile;  // entry, tile of its block; -1: there is none
    bool asks;
  };
  TileRange range;
  const int32_t* entries;
  int32_t count, parts;  // entries; tiles of a block
  Place following;
  int32_t tile;
  bool asks;

  __device__ __forceinline__ ListWalk(const TileRange& range, const int32_t* entries, int32_t count,
                                      int32_t parts)
      : range(range), entries(entries), count(count), parts(parts) {
    following = find(0, parts - 1);
    next();
  }

  // The first tile from a place on that lies in the range.
  __device__ __forceinline__ Place find(int32_t at, int32_t part) const {
    for (; at < count; ++at, part = parts - 1) {
      int32_t entry = entries[at], first = (entry >> 1) * parts;
      part = min(part, range.end - 1 - first);
      if (part < 0) continue;
      if (first + part < range.begin) break;
      return {at, part, first + part, (entry & 1) != 0};
    }
    return {count, 0, -1, false};
  }

  __device__ __forceinline__ bool more() const { return tile >= 0; }
  __device__ __forceinline__ bool has_next() const { return following.tile >= 0; }
  __device__ __forceinline__ int32_t next_tile() const { return following.tile; }
  __device__ __forceinline__ void next() {
    tile = following.tile;
    asks = following.asks;
    if (tile >= 0) following = find(following.at, following.part - 1);
  }
  __device__ __forceinline__ bool masked() const {
    return asks || tile >= range.full_end || tile < range.full_begin;
  }
};

// 3. The policy

template <DType kType, class Functor>
using FunctorOptions = OptionPolicy<kType, Functor::kRows ? MaskKind::rows : MaskKind::window,
                                    Functor::kPlain ? ScoreKind::identity : ScoreKind::scored>;

template <DType kType, class Functor>
struct FunctorPolicy : FunctorOptions<kType, Functor> {
  using Options = FunctorOptions<kType, Functor>;
  static constexpr bool kLoads = true, kAsks = Functor::kMask, kIsFunctor = true;
  const FunctorParams& given;
  int32_t b, h;

  __device__ __forceinline__ FunctorPolicy(const AttentionParams& p, int32_t batch, int32_t head,
                                           int32_t queries, int32_t keys)
      : Options(p, batch, head, queries, keys),
        given(static_cast<const FunctorParams&>(p)),
        b(batch),
        h(head) {}

  __device__ __forceinline__ ScorePlace place(int32_t row, int32_t key) const {
    return {b, h, row, key, this->queries, this->keys, static_cast<float>(row - key)};
  }

  // What the score function takes.
  __device__ __forceinline__ float capped_score(float dot) const {
    float score = dot * this->scale;
    if constexpr (Functor::kAlone) return score;
    return this->softcap > 0.0f
               ? this->softcap * capped<kType>(score, this->softcap, this->inv_softcap)
               : score;
  }

  // As ScoreMod, with the functor between softcap and ALiBi.
  __device__ __forceinline__ float operator()(float dot, int32_t row, int32_t key) const {
    float score = capped_score(dot);
    if constexpr (Functor::kScore) score = Functor::score(score, place(row, key), given);
    if constexpr (Functor::kAlone) return score;
    if (this->slope != 0.0f) score -= this->slope * this->distance(row, key);
    return this->bias == nullptr ? score : this->add_bias(score, row, key);
  }
  __device__ __forceinline__ bool sees(int32_t row, int32_t key) const {
    return Functor::sees(place(row, key), given);
  }

  template <int kTileN>
  __device__ __forceinline__ auto walk(int32_t row_begin, int32_t row_end) const {
    TileRange range = this->template range<kTileN>(row_begin, row_end);
    if constexpr (Functor::kLists) {
      const FlexLists& lists = given.lists;
      const int32_t* starts = lists.starts + b * lists.stride_batch + h * lists.stride_head +
                              row_begin / lists.query_block;
      int32_t count = row_begin < row_end ? starts[1] - starts[0] : 0;
      return ListWalk(range, lists.entries + starts[0], count, lists.key_block / kTileN);
    } else if constexpr (Functor::kMask) {
      return AskingWalk(range);
    } else {
      return TileWalk(range);
    }
  }
};

}  // namespace cuattn::device
