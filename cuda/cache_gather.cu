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
__device__ void gather_rows(const CacheSide& side, const CacheTile& tile) {
  constexpr int kVec = 16 / sizeof(T);
  const auto* cache = static_cast<const T*>(side.cache);
  auto* rows = static_cast<T*>(side.rows);
  int chunks = side.head_dim / kVec, lanes = token_lanes(side, tile.tokens);
  for (int index = threadIdx.x; index < tile.tokens * chunks; index += kCacheThreads) {
    CacheItem item(index, chunks, lanes);
    int d = item.chunk * kVec;
    if (tile.slot(item.token) < 0) continue;
    const T* from =
        cache + tile.place(item.token) + tile.first_head * side.strides.head + side.run_of(d);
    T* to = rows + side.row(tile.first + item.token, tile.first_head) + d;
    uint4 x[kTileHeads];
#pragma unroll
    for (int h = 0; h < kTileHeads; ++h) {
      if (h < tile.heads) x[h] = *reinterpret_cast<const uint4*>(from + h * side.strides.head);
    }
#pragma unroll
    for (int h = 0; h < kTileHeads; ++h) {
      if (h < tile.heads) *reinterpret_cast<uint4*>(to + h * side.row_head) = x[h];
    }
  }
}

template <class T>
constexpr int kPieceTokens = 16 / sizeof(T) < kMaxPieceTokens ? 16 / sizeof(T) : kMaxPieceTokens;

// V of the vLLM layout, by pieces.
template <class T>
__device__ void gather_pieces(const CacheSide& side, const CacheTile& tile) {
  constexpr int kTokens = kPieceTokens<T>;
  constexpr int kDims = 64 / (kTokens * sizeof(T));  // 64 bytes in flight in a thread
  using Row = CacheChunk<T, kDims>;
  using Column = CacheChunk<T, kTokens>;
  int num_pieces = tile.places->num_pieces, items = num_pieces * (side.head_dim / kDims);
  for (int index = threadIdx.x; index < items * tile.heads; index += kCacheThreads) {
    PieceItem item(index, side.head_dim / kDims, num_pieces);
    int token = tile.places->pieces[item.piece];
    if (token < 0) continue;
    int head = tile.first_head + item.head, d = item.chunk * kDims;
    const T* from = static_cast<const T*>(side.cache) + tile.place(token) +
                    head * side.strides.head + d * side.run_stride;
    T* to = static_cast<T*>(side.rows) + side.row(tile.first + token, head) + d;
    Column x[kDims];
#pragma unroll
    for (int j = 0; j < kDims; ++j)
      x[j] = *reinterpret_cast<const Column*>(from + j * side.run_stride);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      Row row;
#pragma unroll
      for (int j = 0; j < kDims; ++j) row.x[j] = x[j].x[i];
      *reinterpret_cast<Row*>(to + i * side.row_token) = row;
    }
  }
}

// The tokens of no piece. A warp takes a row, so that a load reaches four sectors of each line.
template <class T>
__device__ void gather_scattered(const CacheSide& side, const CacheTile& tile) {
  constexpr int kCount = 4;  // elements that a lane has in flight
  int lane = threadIdx.x % 32;
  for (int index = threadIdx.x / 32; index < tile.tokens * tile.heads;
       index += kCacheThreads / 32) {
    int token = index / tile.heads, head = tile.first_head + index % tile.heads;
    if (!tile.is_alone<kPieceTokens<T>>(token)) continue;
    const T* from =
        static_cast<const T*>(side.cache) + tile.place(token) + head * side.strides.head;
    T* to = static_cast<T*>(side.rows) + side.row(tile.first + token, head);
    for (int begin = lane; begin < side.head_dim; begin += 32 * kCount) {
      T x[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        int d = begin + 32 * i;
        if (d < side.head_dim) x[i] = from[d * side.run_stride];
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        int d = begin + 32 * i;
        if (d < side.head_dim) to[d] = x[i];
      }
    }
  }
}

// kVllm: the layout whose V goes by pieces.
template <class T, bool kVllm>
__global__ void __launch_bounds__(kCacheThreads, 4)
    cache_gather(const __grid_constant__ CacheGatherParams p, int tokens) {
  __shared__ CacheTile::Places places;
  CacheTile tile(&places, tokens, p.num_heads);
  bool is_k = tile.is_k;
  const CacheSide& side = is_k ? p.k : p.v;
  tile.fill(side, p.block_size, p.num_tokens, [&](int64_t token) {
    CachedToken from = cached_token(p, token);
    return from.seq < 0 ? int64_t{-1} : from.block * p.block_size + from.at;
  });
  if (!kVllm || is_k) {
    gather_rows<T>(side, tile);
  } else {
    if (tile.find_pieces<kPieceTokens<T>>()) gather_scattered<T>(side, tile);
    gather_pieces<T>(side, tile);
  }
}

template <class T>
void launch(const CacheGatherParams& p, cudaStream_t stream) {
  int tokens = tile_tokens(p.num_tokens, p.num_heads, kTileTokens<T>);
  dim3 grid = cache_grid("gather_cache", p.num_tokens, p.num_heads, tokens);
  auto* kernel = p.kv_layout == KvLayout::vllm ? cache_gather<T, true> : cache_gather<T, false>;
  kernel<<<grid, kCacheThreads, 0, stream>>>(p, tokens);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace

void launch_cache_gather(const CacheGatherParams& p, cudaStream_t stream) {
  switch (itemsize(p.dtype)) {
    case 4: return launch<uint32_t>(p, stream);
    case 2: return launch<uint16_t>(p, stream);
    default: return launch<uint8_t>(p, stream);
  }
}

}  // namespace cuattn
