// SPDX-License-Identifier: Apache-2.0
// gather_cache: the tokens of sequences out of their blocks into packed rows, as bytes. One launch
// for K and V. The same on the CPU: cpu/cache.cpp. Next: cache_tile.cuh, cache_write.cu.
#include "cache_tile.cuh"
#include "launchers.h"

namespace cuattn {
namespace {

using namespace device;

// T stands for any element of its size.
template <class T>
__device__ void gather_rows(const CacheGatherParams& p, const CacheSide& side,
                            const CacheTile& tile, int64_t first, int first_head) {
  constexpr int kVec = 16 / sizeof(T);
  const auto* cache = static_cast<const T*>(side.cache);
  auto* rows = static_cast<T*>(side.rows);
  int chunks = side.head_dim / kVec;
  bool tokens_first = side.run < side.head_dim;  // neighbouring threads read neighbouring memory
  int heads = min(p.num_heads - first_head, kHeadsPerThread);
  for (int item = threadIdx.x; item < kRowTokens * chunks; item += kCacheThreads) {
    int t = tokens_first ? item % kRowTokens : item / chunks;
    int d = (tokens_first ? item / kRowTokens : item % chunks) * kVec;
    if (tile.slot[CacheTile::kMargin + t] < 0) continue;
    const T* from = cache + tile.place[CacheTile::kMargin + t] + first_head * side.strides.head +
                    side.run_of(d);
    T* to = rows + side.row(first + t, first_head) + d;
    uint4 x[kHeadsPerThread];
#pragma unroll
    for (int h = 0; h < kHeadsPerThread; ++h) {
      if (h < heads) x[h] = *reinterpret_cast<const uint4*>(from + h * side.strides.head);
    }
#pragma unroll
    for (int h = 0; h < kHeadsPerThread; ++h) {
      if (h < heads) *reinterpret_cast<uint4*>(to + h * side.row_head) = x[h];
    }
  }
}

// V of the vLLM layout: squares of kTokens x kVec.
template <class T>
__device__ void gather_columns(const CacheSide& side, const CacheTile& tile, int64_t first,
                               int head) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr int kTokens = kVec < kMaxColumnVector ? kVec : kMaxColumnVector;
  constexpr int kGroups = kColumnTokens / kTokens;
  using Row = CacheChunk<T, kVec>;
  using Column = CacheChunk<T, kTokens>;
  const auto* cache = static_cast<const T*>(side.cache) + head * side.strides.head;
  auto* rows = static_cast<T*>(side.rows);
  for (int item = threadIdx.x; item < kGroups * (side.head_dim / kVec); item += kCacheThreads) {
    int group = item % kGroups * kTokens, d = item / kGroups * kVec;
    const int64_t* slot = tile.slot + CacheTile::kMargin + group;
    const int64_t* place = tile.place + CacheTile::kMargin + group;
    T* to = rows + side.row(first + group, head) + d;
    CacheSquares<kTokens> squares(slot);
    if (squares.own >= 0) {
      const T* from = cache + place[squares.own] + d * side.run_stride;
      Column x[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j)
        x[j] = *reinterpret_cast<const Column*>(from + j * side.run_stride);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        Row row;
#pragma unroll
        for (int j = 0; j < kVec; ++j) row.x[j] = x[j].x[i];
        *reinterpret_cast<Row*>(to + (squares.own + i) * side.row_token) = row;
      }
    }
    for (int i = 0; i < kTokens; ++i) {
      if (slot[i] < 0 || squares.hold(i)) continue;
      const T* from = cache + place[i] + d * side.run_stride;
      Row row;
#pragma unroll
      for (int j = 0; j < kVec; ++j) row.x[j] = from[j * side.run_stride];
      *reinterpret_cast<Row*>(to + i * side.row_token) = row;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kCacheThreads)
    cache_gather(const __grid_constant__ CacheGatherParams p, unsigned k_blocks) {
  __shared__ CacheTile tile;
  bool is_k = blockIdx.x < k_blocks;
  const CacheSide& side = is_k ? p.k : p.v;
  int index = static_cast<int>(is_k ? blockIdx.x : blockIdx.x - k_blocks);
  bool columns = side.run == 1;
  int head_groups = columns ? p.num_heads : ceil_div(p.num_heads, kHeadsPerThread);
  int tokens = columns ? kColumnTokens : kRowTokens;
  int64_t first = int64_t{index / head_groups} * tokens;
  int head = index % head_groups * (columns ? 1 : kHeadsPerThread);
  tile.fill(side, p.block_size, first, tokens, p.num_tokens, [&](int64_t token) {
    CachedToken from = cached_token(p, token);
    return from.seq < 0 ? int64_t{-1} : from.block * p.block_size + from.at;
  });
  if (columns) {
    gather_columns<T>(side, tile, first, head);
  } else {
    gather_rows<T>(p, side, tile, first, head);
  }
}

}  // namespace

void launch_cache_gather(const CacheGatherParams& p, cudaStream_t stream) {
  int64_t k_blocks = cache_blocks(p.k, p.num_tokens, p.num_heads);
  unsigned blocks =
      cache_grid("gather_cache", k_blocks + cache_blocks(p.v, p.num_tokens, p.num_heads));
  auto* kernel = p.dtype == DType::f32    ? cache_gather<uint32_t>
                 : p.dtype == DType::e4m3 ? cache_gather<uint8_t>
                                          : cache_gather<uint16_t>;
  kernel<<<blocks, kCacheThreads, 0, stream>>>(p, static_cast<unsigned>(k_blocks));
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
