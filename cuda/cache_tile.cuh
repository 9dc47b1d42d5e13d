// SPDX-License-Identifier: Apache-2.0
// What the kernels between rows and caches share: how the work is cut, and where the tokens of one
// thread block lie in the cache. Next: cache_write.cu, cache_gather.cu.
//
// A thread block takes a tile: some tokens and kTileHeads heads of K or of V. Where a cache keeps
// neighbouring d together (all but V of the vLLM layout), a thread moves 16 bytes of a row for each
// head. V of the vLLM layout keeps neighbouring tokens together: there a thread moves a piece of
// tokens x d of one head, turned in registers, if the tokens fill an aligned part of a block, and
// single elements otherwise. Memory moves sectors of 32 bytes and is slow where a part of one is
// written, so the two pieces that share sectors go to neighbouring threads.
#pragma once

#include <algorithm>

#include "cuattn/cache_params.h"
#include "cuattn/device/math.cuh"
#include "launch.h"

namespace cuattn {

constexpr int kCacheThreads = 256;
constexpr int kTileHeads = 4;  // a thread has as many rows in flight
constexpr int kMaxTileTokens = 64;
constexpr int kMaxPieceTokens = 8;

// Tokens of a tile: 32 KB for d = 128, 16 KB where elements are bytes. A small call is cut smaller,
// to be spread over all multiprocessors. A smallest one moves V of the vLLM layout element by
// element: a decode step has nothing else, and in a short prompt pieces are not missed.
template <class T>
constexpr int kTileTokens = sizeof(T) == 1 ? 64 : 32;
constexpr int kFewTokens = 2;

inline int tile_tokens(int64_t num_tokens, int64_t num_heads, int many) {
  int64_t rows = num_tokens * num_heads;
  return rows < 4096 ? kFewTokens : rows < 32768 ? 8 : many;
}

// Where K of the vLLM layout has tokens side by side, neighbouring threads take so many of them,
// enough to fill a line of memory there, few enough to read half a line of each row.
inline __device__ int token_lanes(const CacheSide& side, int tokens) {
  return side.run < side.head_dim ? min(8, tokens) : 1;
}

template <class T, int kSize>
struct alignas(kSize * sizeof(T)) CacheChunk {
  T x[kSize];
};

// Thread blocks for the tiles of K and of V, two by two.
inline dim3 cache_grid(const char* function, int64_t num_tokens, int64_t num_heads, int tokens) {
  int64_t blocks = 2 * device::ceil_div<int64_t>(num_tokens, tokens) *
                   device::ceil_div<int64_t>(num_heads, kTileHeads);
  CUATTN_REQUIRE(blocks <= 0x7fffffff, function, ": num_tokens must fit one CUDA grid, got ",
                 blocks, " thread blocks of at most 2147483647; split the call");
  return dim3(static_cast<unsigned>(blocks));
}

// The tile of a thread block: `tokens` from `first` on, `heads` from `first_head` on. There is a
// margin of tokens on both sides, for pieces that begin or end there.
struct CacheTile {
  static constexpr int kMargin = 2 * kMaxPieceTokens;
  static constexpr int kSlots = kMaxTileTokens + 2 * kMargin;
  static constexpr int kMaxGroups = kMaxTileTokens / kMaxPieceTokens;

  bool is_k;
  int64_t first;
  int tokens, first_head, heads;

  // In shared memory. slot -1: no place in the cache. place: the offset of head 0, d 0, in
  // elements.
  struct Places {
    int64_t slot[kSlots], place[kSlots];
    // Of each group of kTokens tokens, the first from which kTokens tokens fill an aligned piece
    // of a block, or -1; also of one group in front of the tile, and one behind.
    int start[kMaxGroups + 2];
    // The pieces of this tile, two by two: tokens, -1 for none. The first of two is aligned to
    // both. A second in the group behind the tile is with its first.
    int pieces[2 * kMaxGroups], num_pieces;
  };
  Places* places;

  __device__ CacheTile(Places* places, int tokens, int num_heads) : tokens(tokens), places(places) {
    // K and V ask for different things, so both run at any time, also on each multiprocessor: the
    // order changes after about as many blocks as there are multiprocessors.
    is_k = ((blockIdx.x ^ blockIdx.x / 128) & 1) == 0;
    unsigned index = blockIdx.x / 2, head_groups = device::ceil_div(num_heads, kTileHeads);
    first = int64_t{index / head_groups} * tokens;
    first_head = static_cast<int>(index % head_groups) * kTileHeads;
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

  // Finds the pieces; true where some token with a place is in none.
  template <int kTokens>
  __device__ bool find_pieces() {
    int i = static_cast<int>(threadIdx.x), groups = tokens / kTokens;
    if (i < groups + 2) {
      int group = (i - 1) * kTokens, start = static_cast<int>(-slot(group) & (kTokens - 1));
      bool whole = tokens > kFewTokens && slot(group) >= 0 && slot(group + start) >= 0 &&
                   slot(group + start) % kTokens == 0;
      for (int j = 1; j < kTokens; ++j)
        whole = whole && slot(group + start + j) == slot(group + start) + j;
      places->start[i] = whole ? start : -1;
    }
    __syncthreads();
    if (i < 32) {
      int start = i < groups ? places->start[i + 1] : -1, token = i * kTokens + start;
      bool is_second = start >= 0 && slot(token) % (2 * kTokens) != 0;
      bool is_mine = start >= 0 && !(is_second && has_second<kTokens>(i - 1));
      unsigned mine = __ballot_sync(0xffffffff, is_mine);
      if (is_mine) {
        int* pair = places->pieces + 2 * __popc(mine & ((1u << i) - 1));
        pair[0] = is_second ? -1 : token;
        pair[1] = is_second ? token : has_second<kTokens>(i) ? token + kTokens : -1;
      }
      if (i == 0) places->num_pieces = 2 * __popc(mine);
    }
    return __syncthreads_or(i < tokens && is_alone<kTokens>(i));
  }

  // Whether the piece that begins in a group is a first one, and the next group begins its second.
  template <int kTokens>
  __device__ bool has_second(int group) const {
    int start = places->start[group + 1], token = group * kTokens + start;
    return start >= 0 && places->start[group + 2] == start && slot(token) % (2 * kTokens) == 0 &&
           slot(token + kTokens) == slot(token) + kTokens;
  }

  // Whether a token has a place, but neither the piece that begins in its group holds it, nor the
  // one that begins in the group before.
  template <int kTokens>
  __device__ bool is_alone(int token) const {
    if (slot(token) < 0) return false;
    int own = places->start[token / kTokens + 1], before = places->start[token / kTokens];
    int in_group = token % kTokens;
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

// The same for pieces x chunks x heads: the two pieces of a pair first, then chunks.
struct PieceItem {
  int piece, chunk, head;

  __device__ PieceItem(int item, int chunks, int num_pieces)
      : piece(item / (2 * chunks) % (num_pieces / 2) * 2 + item % 2),
        chunk(item / 2 % chunks),
        head(item / (chunks * num_pieces)) {}
};

}  // namespace cuattn
