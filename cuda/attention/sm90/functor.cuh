// SPDX-License-Identifier: Apache-2.0
// What forward.cuh asks of a functor, masks and scores that a user wrote (device/functor.cuh): its
// lists of blocks, and its scores over a whole wgmma accumulator. The kernel is compiled with one by
// NVRTC (python/cuattn/flex/emit.py); those of the library have NoFunctor. Next: seen.cuh (its mask).
#pragma once

#include "cuattn/device/functor.cuh"

namespace cuattn {

struct NoFunctor {
  static constexpr bool kGiven = false, kScore = false, kMask = false, kLists = false;
  static constexpr bool kPages = true;
  static constexpr int kPacked = 1;
};

// Query heads that share a tile, of which the schedule says `packed`: a functor is compiled for them.
template <class Functor>
__device__ __forceinline__ int32_t packed_heads(int32_t packed) {
  return Functor::kGiven ? Functor::kPacked : packed;
}

// The key tiles of a work item, by their places: the tiles themselves, or those of the listed blocks,
// from left to right. kN: keys of a tile.
template <class Functor, int kN>
struct Sm90Walk {
  struct Stop {
    int32_t tile;
    bool asks;  // the mask function is to be run
  };
  __device__ __forceinline__ Sm90Walk(const AttentionParams&, int32_t) {}
  __device__ __forceinline__ Stop at(int32_t place) const { return {place, Functor::kMask}; }
};

// Blocks are listed from right to left: place 0 is of the last entry. Of that a work item has the
// number.
template <class Functor, int kN>
  requires(Functor::kLists)
struct Sm90Walk<Functor, kN> {
  struct Stop {
    int32_t tile;
    bool asks;
  };
  const int32_t* last;
  int32_t parts;  // tiles of a block

  __device__ __forceinline__ Sm90Walk(const AttentionParams& p, int32_t last_entry)
      : last(lists(p).entries + last_entry), parts(lists(p).key_block / kN) {}
  static __device__ __forceinline__ const FlexLists& lists(const AttentionParams& p) {
    return static_cast<const FunctorParams&>(p).lists;
  }
  __device__ __forceinline__ Stop at(int32_t place) const {
    int32_t block = parts == 1 ? place : place / parts;
    int32_t entry = __ldg(last - block);
    return {(entry >> 1) * parts + place - block * parts, (entry & 1) != 0};
  }

  // How many of the first `count` places have tiles in front of `tile`.
  __device__ __forceinline__ int32_t places_before(int32_t tile, int32_t count) const {
    int32_t begin = 0, end = count;
    while (begin < end) {
      int32_t middle = (begin + end) / 2;
      if (at(middle).tile < tile) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin;
  }
};

// Turns a range of tiles into one of places, of the list of the row block at row0; returns its last
// entry. Every lane of a warp asks the same. Heads whose rows are packed have the same lists.
template <class Functor, int kN>
__device__ __forceinline__ int32_t list_places(device::TileRange& range, const AttentionParams& p,
                                               int32_t batch, int32_t head, int32_t token0) {
  const FlexLists& lists = static_cast<const FunctorParams&>(p).lists;
  const int32_t* starts = lists.starts + batch * lists.stride_batch + head * lists.stride_head +
                          token0 / lists.query_block;
  int32_t first = __ldg(starts), last = __ldg(starts + 1) - 1;
  if (first > last || range.begin >= range.end) {
    range.begin = range.end = 0;
    return 0;
  }
  const Sm90Walk<Functor, kN> walk(p, last);
  int32_t count = (last - first + 1) * walk.parts;
  // Most lists lie in their range, but for what the last block has beyond the last key.
  int32_t left = walk.at(0).tile, right = walk.at(count - 1).tile;
  int32_t begin = left >= range.begin ? 0 : walk.places_before(range.begin, count);
  int32_t end = right < range.end ? count : walk.places_before(range.end, count);
  range.begin = begin;
  range.end = end;
  return last;
}

// A score is what its function makes of the scaled dot product, in natural units.
struct Sm90FunctorMod {
  static constexpr float to_log2 = device::kLog2e;
  float scale;
  __device__ Sm90FunctorMod(const AttentionParams& p, int32_t, int32_t, int32_t, int32_t)
      : scale(p.scores.scale) {}
};

// A thread's share of a tile: score i is of its row i / 2 % 2, the second of which lies 8 below the first,
// and of key `place.k` + i / 4 * 8 + i % 2. Rows are those of kPacked heads: row = token * kPacked + head,
// and a thread's first row has no 8 in it. Rows and keys past the last are asked about, too, for loads
// stay within their arrays.
template <int kPacked>
__device__ __forceinline__ void move_place(device::ScorePlace& place, int i) {
  static_assert((kPacked & (kPacked - 1)) == 0);
  const int below = (i >> 1 & 1) * 8, key = (i >> 2) * 8 + (i & 1);
  const int token = kPacked > 8 ? 0 : below / kPacked;
  if (kPacked > 8) place.h += below;
  place.q += token;
  place.k += key;
  place.ahead += static_cast<float>(token - key);  // no conversion for each score
}

template <class Functor, int kCount>
__device__ __forceinline__ void call_score(float (&scores)[kCount], float scale,
                                           const device::ScorePlace& first,
                                           const FunctorParams& p) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    device::ScorePlace place = first;
    move_place<Functor::kPacked>(place, i);
    scores[i] = Functor::score(scores[i] * scale, place, p);
  }
}

}  // namespace cuattn
