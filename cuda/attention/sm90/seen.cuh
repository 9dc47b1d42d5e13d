// SPDX-License-Identifier: Apache-2.0
// Which scores of a tile a thread's two rows see: by their limits, and by the mask of a functor. Written
// by python/cuattn/flex/emit_sm90.py, a mask has
//
//   kKeys                                    how many keys a tile has
//   Keys, of_key(keys, place, params)        what hangs on the key alone
//   Rows, of_row(rows, place, params)        what hangs on the row alone
//   of_lane(keys, lane)                      the keys of another lane
//   sees(place, params, keys, rows)          whether the row sees the key
//   kLoads       `sees` loads an element for less than 64 keys
//   kAtOnce      then: how many of the 8 parts of a thread's scores are asked of without a branch
//
// A tile is asked in two steps. While wgmma multiplies, a thread finds what hangs on keys or rows alone;
// when S is there, it asks `sees` of each score and hides those that are not seen: a comparison and a
// select each. Where `sees` loads, it is asked in the first step, too, for so many loads would find no
// registers beside S; its answers wait as bits.
//
//              while S is multiplied (find)    when S is there (hide)
//   kLoads     `sees`, 64 answers as bits      select by the bits
//   else       keys and rows alone (Ahead)     `sees`, select
//
// Limits of the rows come last, and in tiles that they cut alone: modify of consumer.cuh, which asks for
// all of this.
#pragma once

#include "cuda/attention/sm90/functor.cuh"

namespace cuattn {

// A place in a tile of kKeys keys, 64 or 128: its number, and its keys counted in eights.
template <int kKeys>
struct TilePlace : device::ScorePlace {
  uint32_t tile, eight;
};

// That of score i of a thread, whose first is at `first`: 2 rows and a quarter of the keys.
template <int kPacked, int kKeys>
__device__ __forceinline__ TilePlace<kKeys> place_in_tile(const TilePlace<kKeys>& first, int i) {
  TilePlace<kKeys> at = first;
  move_place<kPacked>(at, i);
  at.eight += i >> 2;
  return at;
}

// at.k / kDivisor: of a multiple of kKeys that of the tile, of 8 that of eight keys.
template <int kDivisor, int kKeys>
__device__ __forceinline__ int32_t key_quotient(const TilePlace<kKeys>& at) {
  if constexpr (kDivisor % kKeys == 0) {
    return at.tile / (kDivisor / kKeys);
  } else if constexpr (kDivisor % 8 == 0 && kKeys % kDivisor == 0) {
    return at.tile * (kKeys / kDivisor) + at.eight / (kDivisor / 8);
  } else if constexpr (kDivisor % 8 == 0) {
    return (at.tile * (kKeys / 8) + at.eight) / (kDivisor / 8);
  } else {
    return static_cast<uint32_t>(at.k) / kDivisor;
  }
}

template <class Value>
__device__ __forceinline__ Value of_lane_value(Value own, int lane) {
  return __shfl_sync(0xffffffffu, own, lane);
}
__device__ __forceinline__ bool of_lane_value(bool own, int lane) {
  return __shfl_sync(0xffffffffu, static_cast<int>(own), lane) != 0;
}

// Score i has bit seen_bit(i) of the word of its row.
struct SeenBits {
  uint32_t of_row[2];
};
__device__ __forceinline__ int seen_bit(int i) { return (i >> 2) * 2 + (i & 1); }

// Those of a row's scores in front of a column of the tile, from the thread's first key on.
template <int kKeys>
__device__ __forceinline__ uint32_t bits_before(int32_t column) {
  const int32_t within = min(max(column, 0), kKeys);
  const int32_t count = (within >> 3) * 2 + min(within & 7, 2);
  return count >= 32 ? ~0u : (1u << count) - 1;
}

// What the limits of the rows leave. `first`: the thread's first key.
template <int kKeys>
__device__ __forceinline__ SeenBits bits_within(const KeyRange (&visible)[2], int32_t first) {
  SeenBits seen;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    seen.of_row[half] = bits_before<kKeys>(visible[half].end - first) &
                        ~bits_before<kKeys>(visible[half].begin - first);
  }
  return seen;
}

// What a thread holds of a tile that is asked. 7 other threads of a warp have the same keys: a lane
// computes what hangs on keys 16 * (lane / 4) + 2 * (lane % 4) + {0, 1, 8, 9}; of 64 two lanes the same.
template <class Functor>
struct Ahead {
  typename Functor::Keys keys[4];
  typename Functor::Rows rows[2];
};

template <int kKeys>
__device__ __forceinline__ TilePlace<kKeys> place_of_tile(const device::ScorePlace& first) {
  return {first, static_cast<uint32_t>(first.k) / kKeys, 0};
}

// Rows and keys past the last are asked about, too, for loads stay within their arrays.
template <class Functor>
__device__ __forceinline__ void find_ahead(Ahead<Functor>& to, const device::ScorePlace& first,
                                           const FunctorParams& p) {
  const int lane = threadIdx.x % 32, sixteen = lane / 4 % (Functor::kKeys / 16);
  const auto at = place_of_tile<Functor::kKeys>(first);
  auto own = at;
  own.eight = sixteen * 2;
  own.k += sixteen * 16;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    Functor::of_key(to.keys[j], place_in_tile<Functor::kPacked>(own, j / 2 * 4 + j % 2), p);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    Functor::of_row(to.rows[half], place_in_tile<Functor::kPacked>(at, 2 * half), p);
}

// Tells `hears`, of each score, whether its row sees its key.
template <class Functor, int kAtOnce, class Hears>
__device__ __forceinline__ void ask(const Ahead<Functor>& ahead, const device::ScorePlace& first,
                                    const FunctorParams& p, const Hears& hears) {
  const int lane = threadIdx.x % 32;
  const auto at = place_of_tile<Functor::kKeys>(first);
#pragma unroll kAtOnce
  for (int sixteen = 0; sixteen < Functor::kKeys / 16; ++sixteen) {  // keys, 8 scores
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = sixteen * 8 + j / 2 * 4 + j % 2;
      const auto key = Functor::of_lane(ahead.keys[j], sixteen * 4 + lane % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int score = i + 2 * half;
        const auto place = place_in_tile<Functor::kPacked>(at, score);
        hears(score, Functor::sees(place, p, key, ahead.rows[half]));
      }
    }
  }
}

template <int kCount>
__device__ __forceinline__ void hide_unseen(float (&scores)[kCount], const SeenBits& seen) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool is_seen = (seen.of_row[i >> 1 & 1] >> seen_bit(i) & 1) != 0;
    scores[i] = is_seen ? scores[i] : device::negative_infinity();
  }
}

// The answers of a mask for a tile: `find` is called while S is multiplied, `hide` when it is there.
// Neither is for a tile that is not asked. Without a mask there is nothing to do.
template <class Functor, bool kGiven = Functor::kMask>
struct Answers {
  static_assert(!kGiven);
  template <bool kIsFirst>
  __device__ __forceinline__ void find(const device::ScorePlace&, const FunctorParams&) {}
  template <int kCount>
  __device__ __forceinline__ void hide(float (&)[kCount], const device::ScorePlace&,
                                       const FunctorParams&) const {}
};

// Asked when S is there.
template <class Functor>
  requires(!Functor::kLoads)
struct Answers<Functor, true> {
  Ahead<Functor> ahead;

  template <bool kIsFirst>
  __device__ __forceinline__ void find(const device::ScorePlace& first, const FunctorParams& p) {
    find_ahead(ahead, first, p);
  }
  template <int kCount>
  __device__ __forceinline__ void hide(float (&scores)[kCount], const device::ScorePlace& first,
                                       const FunctorParams& p) const {
    ask<Functor, Functor::kKeys / 16>(ahead, first, p, [&](int i, bool sees) {
      scores[i] = sees ? scores[i] : device::negative_infinity();
    });
  }
};

// Asked while S is multiplied. Of the first tile one part at once, for it comes once and is code of its
// own.
template <class Functor>
  requires(Functor::kLoads)
struct Answers<Functor, true> {
  SeenBits seen;

  template <bool kIsFirst>
  __device__ __forceinline__ void find(const device::ScorePlace& first, const FunctorParams& p) {
    Ahead<Functor> ahead;
    find_ahead(ahead, first, p);
    seen = {};
    ask<Functor, kIsFirst ? 1 : Functor::kAtOnce>(ahead, first, p, [&](int i, bool sees) {
      if (sees) seen.of_row[i >> 1 & 1] |= 1u << seen_bit(i);
    });
  }
  template <int kCount>
  __device__ __forceinline__ void hide(float (&scores)[kCount], const device::ScorePlace&,
                                       const FunctorParams&) const {
    hide_unseen(scores, seen);
  }
};

}  // namespace cuattn
