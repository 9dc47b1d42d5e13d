// SPDX-License-Identifier: Apache-2.0
// What the kernels between rows and caches share: how the work is cut, and where the tokens of one
// thread block lie in the cache. Next: write.cu, gather.cu.
//
// A thread block takes a tile: some tokens and kTileHeads heads of K or of V. Where a cache keeps
// neighbouring d together (all but V of the vLLM layout), a thread moves 16 bytes of a row for each
// head. V of the vLLM layout keeps neighbouring tokens together: there a warp turns pieces of
// tokens x d of one head, if the tokens fill an aligned part of a block, and single elements
// otherwise. Memory moves sectors of 32 bytes and is slow where a part of one is written, so in the
// vLLM layout the thread block in whose tokens a piece begins moves all of it.
#pragma once

#include <algorithm>

#include "cuattn/device/math.cuh"
#include "cuattn/params/cache.h"
#include "cuda/host/launch.h"

namespace cuattn {

constexpr int kCacheThreads = 256;
constexpr int kTileHeads = 4;  // a thread has as many rows in flight
constexpr int kMaxTileTokens = 64;
constexpr int kPieceTokens = 8;  // of K in the vLLM layout they are a line of memory

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

// Where K of the vLLM layout has tokens side by side, neighbouring threads take 2^token_bits() of
// them, enough to fill a line of memory there, few enough to read half a line of each row.
inline __device__ int token_bits(const CacheSide& side, int tokens) {
  return side.run == side.head_dim ? 0 : tokens == kFewTokens ? 1 : 3;
}
static_assert(kFewTokens == 1 << 1 && kPieceTokens == 1 << 3);

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

// V of the vLLM layout goes through shared memory: 16 tokens of two pieces x kTileDims of one head
// for each warp. A thread turns 8 tokens x kDims in registers, a column for each d; between shared
// and global memory neighbouring threads take neighbouring cells, so that whole lines are moved.
template <class C, int kDims>
struct PairTile {
  static constexpr int kChunks = 16;  // of kDims; two threads take a chunk, one piece each
  static constexpr int kTileDims = kChunks * kDims;
  static constexpr int kCellTokens = 16 / sizeof(C) < kPieceTokens ? 16 / sizeof(C) : kPieceTokens;
  static constexpr int kCells = kPieceTokens / kCellTokens;  // of one d in one piece
  using Column = CacheChunk<C, kPieceTokens>;
  using Cell = CacheChunk<C, kCellTokens>;

  // One more than there are d in a chunk, so that neighbouring chunks begin in other banks.
  Column columns[kChunks][kDims + 1][2];

  // The cells that a lane moves, one in each step: of which piece, and where in each column; of d
  // in the first step, and kStepDims further in each next.
  static constexpr int kSteps = kTileDims * 2 * kCells / 32;
  static constexpr int kStepDims = kTileDims / kSteps;
  struct Cells {
    int d, piece, cell;
  };
  static __device__ Cells cells_of_lane() {
    int lane = static_cast<int>(threadIdx.x % 32);
    return {lane / (2 * kCells), lane / kCells % 2, lane % kCells};
  }
  __device__ Cell& cell(Cells of, int step) {
    unsigned d = of.d + step * kStepDims;
    return reinterpret_cast<Cell*>(&columns[d / kDims][d % kDims][of.piece])[of.cell];
  }
};

// The tile of a thread block: `tokens` from `first` on, `heads` from `first_head` on. There is a
// margin of tokens on both sides, for pieces that begin or end there.
struct CacheTile {
  static constexpr int kMargin = 2 * kPieceTokens;
  static constexpr int kSlots = kMaxTileTokens + 2 * kMargin;
  static constexpr int kMaxGroups = kMaxTileTokens / kPieceTokens;

  bool is_k;
  int64_t first;
  int tokens, first_head, heads;
  int items;  // of token()

  // In shared memory. slot -1: no place in the cache. place: the offset of head 0, d 0, in
  // elements.
  struct Places {
    int64_t slot[kSlots], place[kSlots];
    // In each group of 8 tokens, the first from which 8 tokens fill an aligned piece of a block, or
    // -1; also in one group in front of the tile, and one behind.
    int start[kMaxGroups + 2];
    // The pieces of this tile, two by two: tokens, -1 for none. The first of two is aligned to
    // both. A second in the group behind the tile is with its first.
    int pairs[kMaxGroups][2], num_pairs;
  };
  Places* places;

  __device__ CacheTile(Places* places, int tokens, int num_heads)
      : tokens(tokens), items(tokens), places(places) {
    // K and V ask for different things, so both run at any time, also on each multiprocessor: the
    // order changes after about as many blocks as there are multiprocessors.
    is_k = ((blockIdx.x ^ blockIdx.x / 128) & 1) == 0;
    unsigned index = blockIdx.x / 2, head_groups = device::ceil_div(num_heads, kTileHeads);
    first = int64_t{index / head_groups} * tokens;
    first_head = static_cast<int>(index % head_groups) * kTileHeads;
    heads = min(num_heads - first_head, kTileHeads);
  }

  // Slot and place of token `first` + i, which may lie in the margins.
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
  __device__ bool find_pieces() {
    int i = static_cast<int>(threadIdx.x), groups = tokens / kPieceTokens;
    if (i < groups + 2) {
      int group = (i - 1) * kPieceTokens;
      int start = static_cast<int>(-slot(group) & (kPieceTokens - 1));
      bool whole = tokens > kFewTokens && slot(group) >= 0 && slot(group + start) >= 0 &&
                   slot(group + start) % kPieceTokens == 0;
      for (int j = 1; j < kPieceTokens; ++j)
        whole = whole && slot(group + start + j) == slot(group + start) + j;
      places->start[i] = whole ? start : -1;
    }
    __syncthreads();
    if (i < 32) {
      int start = i < groups ? places->start[i + 1] : -1, token = i * kPieceTokens + start;
      bool is_second = start >= 0 && slot(token) % (2 * kPieceTokens) != 0;
      bool is_mine = start >= 0 && !(is_second && has_second(i - 1));
      unsigned mine = __ballot_sync(0xffffffff, is_mine);
      if (is_mine) {
        int* pair = places->pairs[__popc(mine & ((1u << i) - 1))];
        pair[0] = is_second ? -1 : token;
        pair[1] = is_second ? token : has_second(i) ? token + kPieceTokens : -1;
      }
      if (i == 0) places->num_pairs = __popc(mine);
    }
    bool some_alone = __syncthreads_or(i < tokens && is_alone(i));
    items = some_alone ? 2 * tokens : tokens;
    return some_alone;
  }

  // Whether the piece that begins in a group is a first one, and the next group begins its second.
  __device__ bool has_second(int group) const {
    int start = places->start[group + 1], token = group * kPieceTokens + start;
    return start >= 0 && places->start[group + 2] == start &&
           slot(token) % (2 * kPieceTokens) == 0 &&
           slot(token + kPieceTokens) == slot(token) + kPieceTokens;
  }

  // Whether a token has a place, but neither the piece that begins in its group holds it, nor the
  // one that begins in the group before.
  __device__ bool is_alone(int token) const {
    if (slot(token) < 0) return false;
    int own = places->start[token / kPieceTokens + 1], before = places->start[token / kPieceTokens];
    int in_group = token % kPieceTokens;
    return !(own >= 0 && in_group >= own) && in_group >= before;
  }

  // The token of an item, or -1. Where pieces were sought, theirs come first, side by side, then
  // those that are alone.
  template <bool kPieces>
  __device__ int token(int item) const {
    if (!kPieces || tokens == kFewTokens) return slot(item) >= 0 ? item : -1;
    if (item >= tokens) return is_alone(item - tokens) ? item - tokens : -1;
    int start = places->start[item / kPieceTokens + 1];
    return start >= 0 ? item + start : -1;
  }
};

// How the items of a thread block, tokens x `chunks`, are dealt to threads: 2^token_bits tokens
// first, then chunks, then further tokens.
struct CacheItem {
  int token, chunk;

  __device__ CacheItem(unsigned item, unsigned chunks, int token_bits) {
    unsigned rest = item >> token_bits, group = rest / chunks;
    token = static_cast<int>(group << token_bits | (item & ((1u << token_bits) - 1)));
    chunk = static_cast<int>(rest - group * chunks);
  }
};

// What a warp turns, one after the other: a pair of pieces, kTileDims of one head of the tile.
template <class Pair>
class PairItem {
 public:
  int begin, head;  // first d; head within the tile
  const int* pair;  // the tokens at which its two pieces begin

  __device__ PairItem(const CacheSide& side, const CacheTile& tile)
      : tile_(tile),
        parts_(device::ceil_div(side.head_dim, Pair::kTileDims)),
        index_(static_cast<int>(threadIdx.x / 32) - kCacheThreads / 32) {}
  __device__ bool next() {
    index_ += kCacheThreads / 32;
    if (index_ >= tile_.places->num_pairs * tile_.heads * parts_) return false;
    begin = index_ % parts_ * Pair::kTileDims;
    head = index_ / parts_ % tile_.heads;
    pair = tile_.places->pairs[index_ / parts_ / tile_.heads];
    return true;
  }

 private:
  const CacheTile& tile_;
  int parts_, index_;
};

}  // namespace cuattn
