// SPDX-License-Identifier: Apache-2.0
// Which scores of a tile a thread's two rows see, a bit each: by their limits, and by the mask of a
// functor. Bits are found while wgmma multiplies, where scores would have no registers left. Written by
// python/cuattn/flex/emit_sm90.py, a mask has
//
//   Keys, of_key(keys, place, params)        what hangs on the key alone
//   Rows, of_row(rows, place, params)        what hangs on the row alone
//   of_lane(keys, lane)                      the keys of another lane
//   sees(place, params, keys, rows)          whether the row sees the key
//   kAtOnce                                  eights of scores that are asked without a branch
//
// Used by consumer.cuh.
#pragma once

#include "cuattn/device/functor.cuh"

namespace cuattn {

// A place in a tile of 128 keys: its number, and its keys counted in eights.
struct TilePlace : device::ScorePlace {
  static constexpr int kKeys = 128;
  uint32_t tile, eight;
};

// That of score i of a thread, whose first is at `first`: 2 rows and 32 keys.
__device__ __forceinline__ TilePlace place_in_tile(const TilePlace& first, int i) {
  TilePlace at = first;
  const int row = (i >> 1 & 1) * 8, key = (i >> 2) * 8 + (i & 1);
  at.q += row;
  at.k += key;
  at.ahead += static_cast<float>(row - key);
  at.eight += i >> 2;
  return at;
}

// at.k / kDivisor: of a multiple of 128 that of the tile, of 8 that of eight keys.
template <int kDivisor>
__device__ __forceinline__ int32_t key_quotient(const TilePlace& at) {
  constexpr int kKeys = TilePlace::kKeys;
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
__device__ __forceinline__ uint32_t bits_before(int32_t column) {
  const int32_t within = min(max(column, 0), TilePlace::kKeys);
  const int32_t count = (within >> 3) * 2 + min(within & 7, 2);
  return count >= 32 ? ~0u : (1u << count) - 1;
}

// What the limits of the rows leave. `first`: the thread's first key.
__device__ __forceinline__ SeenBits bits_within(const KeyRange (&visible)[2], int32_t first) {
  SeenBits seen;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    seen.of_row[half] =
        bits_before(visible[half].end - first) & ~bits_before(visible[half].begin - first);
  }
  return seen;
}

// Leaves of `seen` what the mask does; rows and keys past the last are asked about, too, for loads
// stay within their arrays. 7 other threads of a warp have the same keys: a lane computes what
// hangs on keys 16 * (lane / 4) + 2 * (lane % 4) + {0, 1, 8, 9}.
template <class Functor, int kAtOnce>
__device__ __forceinline__ void ask_mask(SeenBits& seen, const device::ScorePlace& first,
                                         const FunctorParams& p) {
  const int lane = threadIdx.x % 32;
  const TilePlace at{first, static_cast<uint32_t>(first.k) / TilePlace::kKeys, 0};
  TilePlace own = at;
  own.eight = lane / 4 * 2;
  own.k += lane / 4 * 16;
  typename Functor::Keys keys[4];
  typename Functor::Rows rows[2];
#pragma unroll
  for (int j = 0; j < 4; ++j) Functor::of_key(keys[j], place_in_tile(own, j / 2 * 4 + j % 2), p);
#pragma unroll
  for (int half = 0; half < 2; ++half) Functor::of_row(rows[half], place_in_tile(at, 2 * half), p);
  uint32_t left[2] = {0, 0};
#pragma unroll kAtOnce
  for (int sixteen = 0; sixteen < TilePlace::kKeys / 16; ++sixteen) {  // keys, 8 scores
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = sixteen * 8 + j / 2 * 4 + j % 2;
      const auto key = Functor::of_lane(keys[j], sixteen * 4 + lane % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (Functor::sees(place_in_tile(at, i + 2 * half), p, key, rows[half]))
          left[half] |= 1u << seen_bit(i);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) seen.of_row[half] &= left[half];
}

template <int kCount>
__device__ __forceinline__ void hide_unseen(float (&scores)[kCount], const SeenBits& seen) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool is_seen = (seen.of_row[i >> 1 & 1] >> seen_bit(i) & 1) != 0;
    scores[i] = is_seen ? scores[i] : device::negative_infinity();
  }
}

}  // namespace cuattn
