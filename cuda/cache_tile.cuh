// SPDX-License-Identifier: Apache-2.0
// What the kernels between rows and caches share: how the work is cut, and where the tokens of one
// thread block lie in the cache. Next: cache_write.cu, cache_gather.cu.
//
// A thread block takes a tile: some tokens and kTileHeads heads of K or of V. Where a cache keeps
// neighbouring d together (all but V of the vLLM layout), a thread moves 16 bytes of a row for each
// head. V of the vLLM layout keeps neighbouring tokens together: there a thread moves a square of
// tokens x d of one head, turned in registers, if the tokens fill an aligned piece of a block, and
// single elements otherwise.
#pragma once

#include <algorithm>

#include "cuattn/cache_params.h"
#include "cuattn/device/math.cuh"
#include "launch.h"

namespace cuattn {

constexpr int kCacheThreads = 256;
constexpr int kTileHeads = 4;  // a thread has as many rows in flight
constexpr int kMaxTileTokens = 64;
constexpr int kMaxSquareTokens = 8;

// Tokens of a tile, of which two to four on a multiprocessor keep enough bytes in flight: 32 KB for
// d = 128, 16 KB where elements are bytes.
template <class T>
constexpr int kTileTokens = sizeof(T) == 1 ? 64 : 32;

// A small call is spread over all multiprocessors. It moves V of the vLLM layout element by
// element: a decode step has nothing else, and in a small one squares are not missed.
constexpr int kFewTokens = 2;
constexpr int64_t kManyRows = 4096;  // num_tokens * num_heads

inline int tile_tokens(int64_t num_tokens, int64_t num_heads, int many) {
  return num_tokens * num_heads < kManyRows ? kFewTokens : many;
}

// Neighbouring threads that take neighbouring tokens: where the cache has these side by side,
// enough to fill a line of memory there, few enough to read half a line of each row.
constexpr int kTokenLanes = 8;   // K of the vLLM layout
constexpr int kSquareLanes = 4;  // V: squares

inline __device__ int token_lanes(const CacheSide& side, int tokens) {
  return side.run < side.head_dim ? min(kTokenLanes, tokens) : 1;
}

template <class T, int kSize>
struct alignas(kSize * sizeof(T)) CacheChunk {
  T x[kSize];
};

// Thread blocks along x for the tiles of one side, along y for K and V.
inline dim3 cache_grid(const char* function, int64_t num_tokens, int64_t num_heads, int tokens) {
  int64_t blocks = device::ceil_div<int64_t>(num_tokens, tokens) *
                   device::ceil_div<int64_t>(num_heads, kTileHeads);
  CUATTN_REQUIRE(blocks <= 0x7fffffff, function, ": num_tokens must fit one CUDA grid, got ",
                 blocks, " thread blocks of at most 2147483647; split the call");
  return dim3(static_cast<unsigned>(blocks), 2);
}

// The tile of a thread block: `tokens` from `first` on, `heads` from `first_head` on. There is a
// margin of tokens on both sides, for squares that begin or end there.
struct CacheTile {
  static constexpr int kMargin = kMaxSquareTokens;
  static constexpr int kSlots = kMaxTileTokens + 2 * kMargin;

  int64_t first;
  int tokens, first_head, heads;

  // In shared memory. slot -1: no place in the cache. place: the offset of head 0, d 0, in
  // elements. square: of each kVec tokens, the first from which kVec tokens fill an aligned piece
  // of a block, or -1; one more in front, for the square that begins in the margin.
  struct Places {
    int64_t slot[kSlots], place[kSlots];
    int square[kMaxTileTokens / 4 + 1];
  };
  Places* places;

  __device__ CacheTile(Places* places, int tokens, int num_heads) : tokens(tokens), places(places) {
    int head_groups = device::ceil_div(num_heads, kTileHeads);
    first = int64_t{blockIdx.x / head_groups} * tokens;
    first_head = static_cast<int>(blockIdx.x % head_groups) * kTileHeads;
    heads = min(num_heads - first_head, kTileHeads);
  }

  // Of token `first` + i; i may lie in the margins.
  __device__ int64_t slot(int i) const { return places->slot[kMargin + i]; }
  __device__ int64_t place(int i) const { return places->place[kMargin + i]; }

  // slot_of(token) gives the slot of a token within [0, num_tokens), or -1.
  template <class SlotOf>
  __device__ void fill(const CacheSide& side, int32_t block_size, int64_t num_tokens,
                       SlotOf slot_of) {
    for (int i = threadIdx.x; i < tokens + 2 * kMargin; i += kCacheThreads) {
      int64_t token = first + i - kMargin;
      int64_t at = token < 0 || token >= num_tokens ? -1 : slot_of(token);
      places->slot[i] = at;
      places->place[i] = at < 0 ? 0 : side.place(at / block_size, at % block_size, 0);
    }
    __syncthreads();
  }

  // Finds the squares; true where some token with a place is in none.
  template <int kVec>
  __device__ bool find_squares() {
    for (int i = threadIdx.x; i <= max(tokens / kVec, 1); i += kCacheThreads) {
      int group = (i - 1) * kVec, start = group + static_cast<int>(-slot(group) & (kVec - 1));
      bool whole =
          tokens > kFewTokens && slot(group) >= 0 && slot(start) >= 0 && slot(start) % kVec == 0;
      for (int j = 1; j < kVec; ++j) whole = whole && slot(start + j) == slot(start) + j;
      places->square[i] = whole ? start - group : -1;
    }
    __syncthreads();
    int i = static_cast<int>(threadIdx.x);
    return __syncthreads_or(i < tokens && is_alone<kVec>(i));
  }

  // The first token of the square that begins in a group of kVec tokens, or -1.
  template <int kVec>
  __device__ int square(int group) const {
    int start = places->square[group + 1];
    return start < 0 ? -1 : group * kVec + start;
  }

  // Whether a token has a place, but neither the square that begins among its kVec tokens holds it,
  // nor the one that begins among the kVec before.
  template <int kVec>
  __device__ bool is_alone(int token) const {
    if (slot(token) < 0) return false;
    int own = places->square[token / kVec + 1], before = places->square[token / kVec];
    int in_group = token % kVec;
    return !(own >= 0 && in_group >= own) && in_group >= before;
  }
};

// How the items of a thread block, `tokens` x `chunks`, are dealt to threads: `kLanes` tokens
// first, then chunks, then further tokens.
struct CacheItem {
  int token, chunk;

  __device__ CacheItem(int item, int chunks, int lanes)
      : token(item / (lanes * chunks) * lanes + item % lanes), chunk(item / lanes % chunks) {}
};

}  // namespace cuattn
