// SPDX-License-Identifier: Apache-2.0
// gather_cache: the tokens of sequences out of their blocks into packed rows, as bytes. One launch
// for K and V: by 16 bytes where all starts allow that, else by the widest unit that they do. For a
// prefill of 16 bits over float8 blocks codes become numbers on the way. The same on the CPU:
// cpu/cache.cpp. Next: tile.cuh, write.cu.
#include "cuattn/device/convert.cuh"
#include "cuattn/names.h"
#include "cuda/cache/tile.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using namespace device;

// T stands for any element of its size.
template <class T>
__device__ void gather_rows(const CacheSide& side, const CacheTile& tile) {
  constexpr int kVec = 16 / sizeof(T);
  const auto* cache = static_cast<const T*>(side.cache);
  auto* rows = static_cast<T*>(side.rows);
  int chunks = side.head_dim / kVec, bits = token_bits(side, tile.tokens);
  for (int index = threadIdx.x; index < tile.items * chunks; index += kCacheThreads) {
    CacheItem item(index, chunks, bits);
    int d = item.chunk * kVec, token = tile.token<false>(item.token);
    if (token < 0) continue;
    const T* from =
        cache + tile.place(token) + tile.first_head * side.strides.head + side.run_of(d);
    T* to = rows + side.row(tile.first + token, tile.first_head) + d;
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
using Pairs = PairTile<T, 8 / sizeof(T) < 4 ? 8 / sizeof(T) : 4>;  // 64 bytes, or 32, in flight

// V of the vLLM layout, by pairs of pieces.
template <class T>
__device__ void gather_pairs(const CacheSide& side, const CacheTile& tile, Pairs<T>* warp_tiles) {
  using Pair = Pairs<T>;
  constexpr int kDims = Pair::kTileDims / Pair::kChunks;
  using Row = CacheChunk<T, kDims>;
  int warp = threadIdx.x / 32, piece = threadIdx.x % 2, chunk = threadIdx.x % 32 / 2;
  typename Pair::Cells mine = Pair::cells_of_lane();
  Pair& turned = warp_tiles[warp];
  for (PairItem<Pair> item(side, tile); item.next();) {
    int begin = item.begin, h = item.head, head = tile.first_head + h;
    const int* pair = item.pair;
    int from_token = pair[mine.piece], first_d = begin + mine.d;
    const T* from = static_cast<const T*>(side.cache) + tile.place(from_token) +
                    head * side.strides.head + first_d * side.run_stride;
    typename Pair::Cell cells[Pair::kSteps];
#pragma unroll
    for (int step = 0; step < Pair::kSteps; ++step) {
      if (from_token < 0 || first_d + step * Pair::kStepDims >= side.head_dim) continue;
      const T* column = from + step * Pair::kStepDims * side.run_stride;
      cells[step] = reinterpret_cast<const typename Pair::Cell*>(column)[mine.cell];
    }
#pragma unroll
    for (int step = 0; step < Pair::kSteps; ++step) turned.cell(mine, step) = cells[step];
    __syncwarp();
    int token = pair[piece], d = begin + chunk * kDims;
    if (token >= 0 && d < side.head_dim) {
      T* to = static_cast<T*>(side.rows) + side.row(tile.first + token, head) + d;
      typename Pair::Column x[kDims];
#pragma unroll
      for (int j = 0; j < kDims; ++j) x[j] = turned.columns[chunk][j][piece];
#pragma unroll
      for (int i = 0; i < kPieceTokens; ++i) {
        Row row;
#pragma unroll
        for (int j = 0; j < kDims; ++j) row.x[j] = x[j].x[i];
        *reinterpret_cast<Row*>(to + i * side.row_token) = row;
      }
    }
    __syncwarp();
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
    if (!tile.is_alone(token)) continue;
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
  if (are_unused(p, tile.first, min(int64_t{tokens}, p.num_tokens - tile.first))) return;
  bool is_k = tile.is_k;
  const CacheSide& side = is_k ? p.k : p.v;
  tile.fill(side, p.pages.block_size, p.num_tokens, [&](int64_t token) {
    CachedToken from = cached_token(p, token);
    return from.seq < 0 ? int64_t{-1} : from.block * p.pages.block_size + from.at;
  });
  if (kVllm && !is_k) {
    __shared__ Pairs<T> warp_tiles[kCacheThreads / 32];
    if (tile.find_pieces()) gather_scattered<T>(side, tile);
    gather_pairs<T>(side, tile, warp_tiles);
    return;
  }
  gather_rows<T>(side, tile);
}

// Where something does not start on 16 bytes. A thread block takes a token, a warp a row of K or V,
// element by element.
template <class T>
__global__ void __launch_bounds__(kCacheThreads)
    cache_gather_elements(const __grid_constant__ CacheGatherParams p) {
  int lane = threadIdx.x % 32;
  for (int64_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    CachedToken from = cached_token(p, token);
    if (from.seq < 0) continue;
    for (int row = threadIdx.x / 32; row < 2 * p.num_heads; row += kCacheThreads / 32) {
      const CacheSide& side = row % 2 == 0 ? p.k : p.v;
      const T* cache = static_cast<const T*>(side.cache) + side.place(from.block, from.at, row / 2);
      T* to = static_cast<T*>(side.rows) + side.row(token, row / 2);
      for (int d = lane; d < side.head_dim; d += 32) to[d] = cache[side.run_of(d)];
    }
  }
}

constexpr int kCodes = 16;         // of a row, that a thread makes numbers of
constexpr int kNumberTokens = 16;  // of a thread block, at a time

// Codes of float8 as they lie in a cache, to numbers of 16 bits that lie side by side.
template <class T>
__device__ void make_numbers(const CacheSide& side, float scale, int64_t place, int64_t row,
                             int d) {
  const auto* cache = static_cast<const E4m3*>(side.cache) + place;
  CacheChunk<E4m3, kCodes> codes;
  if (side.run >= kCodes) {
    codes = *reinterpret_cast<const CacheChunk<E4m3, kCodes>*>(cache + side.run_of(d));
  } else {
#pragma unroll
    for (int i = 0; i < kCodes; ++i) codes.x[i] = cache[side.run_of(d + i)];
  }
  auto* to = reinterpret_cast<CacheChunk<T, 8>*>(static_cast<T*>(side.rows) + row + d);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    CacheChunk<T, 8> numbers;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      numbers.x[i] = from_float<T>(to_float(codes.x[half * 8 + i]) * scale);
    to[half] = numbers;
  }
}

// Rows as numbers. A thread takes 16 codes; all begin on 16 bytes where the codes of a row lie side
// by side.
template <class T>
__global__ void __launch_bounds__(kCacheThreads)
    cache_gather_numbers(const __grid_constant__ CacheGatherParams p) {
  __shared__ CachedToken places[kNumberTokens];
  int k_chunks = p.k.head_dim / kCodes, chunks = k_chunks + p.v.head_dim / kCodes;
  for (int64_t first = int64_t{blockIdx.x} * kNumberTokens; first < p.num_tokens;
       first += int64_t{gridDim.x} * kNumberTokens) {
    int tokens = static_cast<int>(min(p.num_tokens - first, int64_t{kNumberTokens}));
    bool is_used = false;
    if (threadIdx.x < tokens) {
      places[threadIdx.x] = cached_token(p, first + threadIdx.x);
      is_used = places[threadIdx.x].seq >= 0;
    }
    int items = __syncthreads_or(is_used) ? tokens * p.num_heads * chunks : 0;
    for (int index = threadIdx.x; index < items; index += kCacheThreads) {
      int chunk = index % chunks, head = index / chunks % p.num_heads;
      int token = index / chunks / p.num_heads;
      CachedToken from = places[token];
      if (from.seq < 0) continue;
      bool is_k = chunk < k_chunks;
      const CacheSide& side = is_k ? p.k : p.v;
      float scale = (is_k ? p.k_scale : p.v_scale).at(from.seq, head, 0);
      make_numbers<T>(side, scale, side.place(from.block, from.at, head),
                      side.row(first + token, head), (is_k ? chunk : chunk - k_chunks) * kCodes);
    }
    __syncthreads();
  }
}

template <class T>
void launch_numbers(const CacheGatherParams& p, cudaStream_t stream) {
  // Beyond that a thread block takes several tiles: where one sequence is long and many are short
  // most tiles are unused, and a block for each took as long as all that is read. Fewer blocks made
  // gathers without an unused tile slower. A prime: sequences begin at multiples of the longest.
  constexpr int64_t kMostBlocks = 16381;
  int64_t tiles = ceil_div<int64_t>(p.num_tokens, kNumberTokens);
  auto blocks = static_cast<unsigned>(std::min(tiles, kMostBlocks));
  cache_gather_numbers<T><<<blocks, kCacheThreads, 0, stream>>>(p);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <class T>
void launch_elements(const CacheGatherParams& p, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 1 << 20;  // beyond that, a thread block takes several tokens
  auto blocks = static_cast<unsigned>(std::min(p.num_tokens, kMostBlocks));
  cache_gather_elements<T><<<blocks, kCacheThreads, 0, stream>>>(p);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

// The bits, or-ed, of the addresses and sizes of all that is moved in one piece.
uint64_t start_bits(const CacheGatherParams& p) {
  uint64_t elements = 0, bytes = 0;
  for (const CacheSide* side : {&p.k, &p.v}) {
    for (int64_t stride : {side->row_token, side->row_head, side->strides.block, side->strides.head,
                           int64_t{side->head_dim}})
      elements |= static_cast<uint64_t>(stride);
    if (p.kv_layout != KvLayout::vllm) elements |= static_cast<uint64_t>(side->strides.token);
    bytes |= reinterpret_cast<uintptr_t>(side->cache) | reinterpret_cast<uintptr_t>(side->rows);
  }
  return bytes | elements * static_cast<uint64_t>(itemsize(p.dtype));
}

// The same call with elements of `unit` bytes, where d is one run.
CacheGatherParams in_units(CacheGatherParams p, int64_t unit) {
  int64_t elements = unit / itemsize(p.dtype);
  if (elements == 1) return p;
  for (CacheSide* side : {&p.k, &p.v}) {
    for (int64_t* stride : {&side->row_token, &side->row_head, &side->strides.block,
                            &side->strides.head, &side->strides.token})
      *stride /= elements;
    side->head_dim /= static_cast<int32_t>(elements);
    side->run = side->head_dim;
  }
  return p;
}

void launch_unaligned(const CacheGatherParams& p, uint64_t starts, cudaStream_t stream) {
  int64_t unit = p.kv_layout == KvLayout::vllm ? itemsize(p.dtype) : copy_unit(starts);
  CacheGatherParams units = in_units(p, unit);
  switch (unit) {
    case 8: return launch_elements<uint64_t>(units, stream);
    case 4: return launch_elements<uint32_t>(units, stream);
    case 2: return launch_elements<uint16_t>(units, stream);
    default: return launch_elements<uint8_t>(units, stream);
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
  if (p.makes_numbers) {
    return p.number_dtype == DType::bf16 ? launch_numbers<Bfloat16>(p, stream)
                                         : launch_numbers<Half>(p, stream);
  }
  uint64_t starts = start_bits(p);
  if (copy_unit(starts) < 16) return launch_unaligned(p, starts, stream);
  switch (itemsize(p.dtype)) {
    case 4: return launch<uint32_t>(p, stream);
    case 2: return launch<uint16_t>(p, stream);
    default: return launch<uint8_t>(p, stream);
  }
}

}  // namespace cuattn
