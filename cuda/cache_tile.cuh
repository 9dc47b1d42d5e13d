// SPDX-License-Identifier: Apache-2.0
// What the kernels between rows and caches share: how the work is cut, and where the tokens of one
// thread block lie in the cache. Next: cache_write.cu, cache_gather.cu.
//
// Where a cache keeps neighbouring d together (all but V of the vLLM layout), a thread moves 16
// bytes of a row for some heads. V of the vLLM layout keeps neighbouring tokens together: there a
// thread moves a square of tokens x d, turned in registers, if the tokens fill an aligned piece of
// a block, and single elements otherwise.
#pragma once

#include <algorithm>

#include "cuattn/cache_params.h"
#include "cuattn/device/math.cuh"
#include "launch.h"

namespace cuattn {

constexpr int kCacheThreads = 256;
constexpr int kRowTokens = 32;       // of a thread block that moves rows
constexpr int kColumnTokens = 128;   // of one that moves squares, for one head
constexpr int kHeadsPerThread = 4;   // rows that a thread has in flight
constexpr int kMaxColumnVector = 8;  // tokens of a square at most

template <class T, int kSize>
struct alignas(kSize * sizeof(T)) CacheChunk {
  T x[kSize];
};

// Thread blocks for one side of a call; V of the vLLM layout has run 1.
inline int64_t cache_blocks(const CacheSide& side, int64_t num_tokens, int64_t num_heads) {
  if (side.run == 1) return device::ceil_div<int64_t>(num_tokens, kColumnTokens) * num_heads;
  return device::ceil_div<int64_t>(num_tokens, kRowTokens) *
         device::ceil_div<int64_t>(num_heads, kHeadsPerThread);
}

// The grid over K and V, K first.
inline unsigned cache_grid(const char* function, int64_t blocks) {
  CUATTN_REQUIRE(blocks <= 0x7fffffff, function, ": num_tokens must fit one CUDA grid, got ",
                 blocks, " thread blocks of at most 2147483647; split the call");
  return static_cast<unsigned>(blocks);
}

// The tokens of a thread block, with a margin on both sides for squares that begin or end there.
// slot -1: no place in the cache. place: the offset of head 0, d 0, in elements.
struct CacheTile {
  static constexpr int kMargin = kMaxColumnVector;
  static constexpr int kTokens = kColumnTokens + 2 * kMargin;
  int64_t slot[kTokens], place[kTokens];

  // slot_of(token) gives the slot of a token within [0, num_tokens), or -1.
  template <class SlotOf>
  __device__ void fill(const CacheSide& side, int32_t block_size, int64_t first, int count,
                       int64_t num_tokens, SlotOf slot_of) {
    for (int i = threadIdx.x; i < count + 2 * kMargin; i += kCacheThreads) {
      int64_t token = first + i - kMargin;
      int64_t at = token < 0 || token >= num_tokens ? -1 : slot_of(token);
      slot[i] = at;
      place[i] = at < 0 ? 0 : side.place(at / block_size, at % block_size, 0);
    }
    __syncthreads();
  }
};

// Of the tokens [0, kVec) from `slot` on and those behind them: the first from which kVec tokens
// fill an aligned piece of a block, or -1.
template <int kVec>
__device__ int square_start(const int64_t* slot) {
  if (slot[0] < 0) return -1;
  int start = static_cast<int>(-slot[0] & (kVec - 1));
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (slot[start + i] != slot[0] + start + i) return -1;
  }
  return start;
}

// The squares that touch kVec tokens: their own, and the one that begins among the kVec before.
template <int kVec>
struct CacheSquares {
  int own, before;

  __device__ explicit CacheSquares(const int64_t* slot)
      : own(square_start<kVec>(slot)), before(square_start<kVec>(slot - kVec)) {}
  __device__ bool hold(int token) const { return (own >= 0 && token >= own) || token < before; }
};

}  // namespace cuattn
