// SPDX-License-Identifier: Apache-2.0
// reshape_and_cache: rows of k and v into their slots, k rotated on the way, both quantised where
// the cache is e4m3. One launch for K and V. Rotary embedding: arXiv:2104.09864. The same on the
// CPU, bit for bit: cpu/cache.cpp. Next: rows.cuh (reads), rotate.cuh, tile.cuh, gather.cu.
#include "cuda/cache/rotate.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using namespace device;

// The elements from `first_d` on, as they are: a thread takes kParts neighbouring chunks.
template <class Types, bool kPieces, int kParts, class Rows>
__device__ void write_rows(const CacheSide& side, const CacheTile& tile, const Rows& rows,
                           const float* inverses, int first_d) {
  constexpr int kVec = Types::kVec;
  // In the vLLM layout 16 elements of e4m3 are together, twice what 16 bytes of a row hold.
  constexpr bool kJoins = kParts == 2 && Types::kQuantise && kVec == 8;
  auto* cache = static_cast<typename Types::C*>(side.cache);
  int chunks = (side.head_dim - first_d) / (kVec * kParts);
  int bits = token_bits(side, tile.tokens);
  for (int index = threadIdx.x; index < tile.items * chunks; index += kCacheThreads) {
    CacheItem item(index, chunks, bits);
    int d = first_d + item.chunk * kVec * kParts, token = tile.token<kPieces>(item.token);
    if (token < 0) continue;
    auto* to = cache + tile.place(token) + tile.first_head * side.strides.head + side.run_of(d);
    int64_t next_part = kParts > 1 ? side.run_of(d + kVec) - side.run_of(d) : 0;
    const auto* from = rows(token, 0) + d;
    int64_t next_head = rows.next_head(token);
    typename Types::Row x[kTileHeads][kParts];
#pragma unroll
    for (int h = 0; h < kTileHeads; ++h) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (h < tile.heads)
          x[h][part] =
              *reinterpret_cast<const typename Types::Row*>(from + h * next_head + part * kVec);
      }
    }
#pragma unroll
    for (int h = 0; h < kTileHeads; ++h) {
      if (h >= tile.heads) break;
      auto* there = to + h * side.strides.head;
      if constexpr (kJoins) {
        CacheChunk<typename Types::Stored, 2> joined = {Types::stored_chunk(x[h][0], inverses[h]),
                                                        Types::stored_chunk(x[h][1], inverses[h])};
        *reinterpret_cast<CacheChunk<typename Types::Stored, 2>*>(there) = joined;
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          *reinterpret_cast<typename Types::Stored*>(there + part * next_part) =
              Types::stored_chunk(x[h][part], inverses[h]);
      }
    }
  }
}

// The elements from `begin` on to the next chunk, which is returned, one by one.
template <class Types, class Rows>
__device__ int write_to_next_chunk(const CacheSide& side, const CacheTile& tile, const Rows& rows,
                                   const float* inverses, int begin) {
  int end = ceil_div(begin, Types::kVec) * Types::kVec;
  for (int index = threadIdx.x; index < tile.tokens * (end - begin); index += kCacheThreads) {
    CacheItem item(index, end - begin, 0);
    if (tile.slot(item.token) < 0) continue;
    int d = begin + item.chunk;
    for (int head = tile.first_head; head < tile.first_head + tile.heads; ++head) {
      const auto* row = rows(item.token, head - tile.first_head);
      auto* place = static_cast<typename Types::C*>(side.cache) + tile.place(item.token) +
                    head * side.strides.head;
      place[side.run_of(d)] = Types::stored_element(row[d], inverses[head - tile.first_head]);
    }
  }
  return end;
}

// 64 bytes of a thread in flight, or 128 where fewer are written.
template <class Types>
using Pairs = PairTile<typename Types::C, (Types::kQuantise ? 16 : 8) / sizeof(typename Types::T)>;

// V of the vLLM layout, by pairs of pieces.
template <class Types, class Rows>
__device__ void write_pairs(const CacheSide& side, const CacheTile& tile, const Rows& rows,
                            const float* inverses, Pairs<Types>* warp_tiles) {
  using T = typename Types::T;
  using Pair = Pairs<Types>;
  constexpr int kDims = Pair::kTileDims / Pair::kChunks;
  using Row = CacheChunk<T, kDims>;
  int warp = threadIdx.x / 32, piece = threadIdx.x % 2, chunk = threadIdx.x % 32 / 2;
  typename Pair::Cells mine = Pair::cells_of_lane();
  Pair& turned = warp_tiles[warp];
  for (PairItem<Pair> item(side, tile); item.next();) {
    int begin = item.begin, h = item.head, head = tile.first_head + h;
    const int* pair = item.pair;
    int token = pair[piece], d = begin + chunk * kDims;
    if (token >= 0 && d < side.head_dim) {
      const T* from = rows(token, h, kPieceTokens) + d;
      int64_t next = rows.next_token(token, kPieceTokens);
      Row x[kPieceTokens];
#pragma unroll
      for (int i = 0; i < kPieceTokens; ++i) x[i] = *reinterpret_cast<const Row*>(from + i * next);
#pragma unroll
      for (int j = 0; j < kDims; ++j) {
        CacheChunk<T, kPieceTokens> column;
#pragma unroll
        for (int i = 0; i < kPieceTokens; ++i) column.x[i] = x[i].x[j];
        turned.columns[chunk][j][piece] = Types::stored_chunk(column, inverses[h]);
      }
    }
    __syncwarp();
    int to_token = pair[mine.piece], first_d = begin + mine.d;
    auto* to = static_cast<typename Types::C*>(side.cache) + tile.place(to_token) +
               head * side.strides.head + first_d * side.run_stride;
#pragma unroll
    for (int step = 0; step < Pair::kSteps; ++step) {
      if (to_token < 0 || first_d + step * Pair::kStepDims >= side.head_dim) continue;
      auto* column = to + step * Pair::kStepDims * side.run_stride;
      reinterpret_cast<typename Pair::Cell*>(column)[mine.cell] = turned.cell(mine, step);
    }
    __syncwarp();
  }
}

// The tokens of no piece. A warp takes a row, so that a store reaches four sectors of each line.
template <class Types, class Rows>
__device__ void write_scattered(const CacheSide& side, const CacheTile& tile, const Rows& rows,
                                const float* inverses) {
  constexpr int kCount = 4;  // elements that a lane has in flight
  auto* cache = static_cast<typename Types::C*>(side.cache);
  int lane = threadIdx.x % 32;
  for (int index = threadIdx.x / 32; index < tile.tokens * tile.heads;
       index += kCacheThreads / 32) {
    int token = index / tile.heads, head = tile.first_head + index % tile.heads;
    if (!tile.is_alone(token)) continue;
    const auto* from = rows(token, head - tile.first_head);
    auto* to = cache + tile.place(token) + head * side.strides.head;
    float inverse = inverses[head - tile.first_head];
    for (int begin = lane; begin < side.head_dim; begin += 32 * kCount) {
      typename Types::T x[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        int d = begin + 32 * i;
        if (d < side.head_dim) x[i] = from[d];
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        int d = begin + 32 * i;
        if (d < side.head_dim) to[d * side.run_stride] = Types::stored_element(x[i], inverse);
      }
    }
  }
}

// Whether rows go through shared memory. Those of the other layouts are read in whole lines anyway;
// float32 would be 3 % slower, e4m3 10 %: it wants larger tiles.
template <DType kType, DType kCacheType, bool kRope, bool kVllm>
constexpr bool kStagesRows = kVllm && kType != DType::f32 && (kRope || kCacheType == kType);

// Whether calls without RoPE have a kernel of their own. It is worth its time to compile only where
// it stages no rows, or where float32 has a fourth block on a multiprocessor.
template <DType kType, DType kCacheType, bool kVllm>
constexpr bool kPlainApart =
    kStagesRows<kType, kCacheType, true, kVllm> ? !kStagesRows<kType, kCacheType, false, kVllm>
                                                : kType == DType::f32 && !kVllm;

// kVllm: the layout whose V goes by pieces. kRope: calls with RoPE, too. Note: with four blocks a multiprocessor float32 would
// spill there, as it would beside RoPE.
template <DType kType, DType kCacheType, bool kRope, bool kVllm>
__global__ void __launch_bounds__(kCacheThreads, kType == DType::f32 && (kRope || kVllm) ? 3 : 4)
    cache_write(const __grid_constant__ CacheWriteParams p, int tokens) {
  __shared__ CacheTile::Places places;
  __shared__ int64_t positions[kMaxTileTokens + kPieceTokens];  // the last piece ends behind
  __shared__ float inverses[kTileHeads];  // 1 / scale of each head of the tile
  using Pair = Types<kType, kCacheType>;
  CacheTile tile(&places, tokens, p.num_heads);
  bool is_k = tile.is_k, rotates = kRope && is_k && p.rope.cos != nullptr;
  const CacheSide& side = is_k ? p.k : p.v;
  extern __shared__ uint4 staged[];
  using T = typename Pair::T;
  constexpr bool kStaged = kStagesRows<kType, kCacheType, kRope, kVllm>;
  const TileRows<T, kStaged> rows(side, tile, reinterpret_cast<T*>(staged));
  rows.fetch(p.num_tokens);
  if (rotates) {  // by threads that have no slots to read, at the same time
    int i = static_cast<int>(threadIdx.x) - kCacheThreads / 2;
    if (i >= 0 && i < tokens + kPieceTokens && tile.first + i < p.num_tokens)
      positions[i] = rope_position(p, tile.first + i);
  }
  if (int h = kCacheThreads - 1 - static_cast<int>(threadIdx.x); h < tile.heads)
    inverses[h] = Pair::inverse_scale(side, tile.first_head + h);
  tile.fill(side, p.block_size, p.num_tokens, [&](int64_t token) { return slot_of(p, token); });
  bool some_alone = kVllm && (!is_k || tokens > kFewTokens) && tile.find_pieces();
  rows.await();
  if (kVllm && !is_k) {
    __shared__ Pairs<Pair> warp_tiles[kCacheThreads / 32];
    if (some_alone) write_scattered<Pair>(side, tile, rows, inverses);
    write_pairs<Pair>(side, tile, rows, inverses, warp_tiles);
    return;
  }
  int first_d = 0;
  if (rotates) {
    auto rotate = [&]<int kColumns>() {
      if constexpr (kStaged) {
        rotate_staged_rows<Pair, kVllm, kColumns>(p, tile, rows, inverses, positions);
      } else {
        rotate_rows<Pair, kVllm, kColumns>(p, tile, rows, inverses, positions);
      }
    };
    if (p.rope.rotary_dim % (2 * Pair::kVec) == 0) {
      rotate.template operator()<Pair::kVec>();
    } else if (p.rope.rotary_dim % 8 == 0) {
      rotate.template operator()<4>();
    } else {
      rotate_pairs<Pair>(p, tile, rows, inverses, positions);
    }
    first_d = write_to_next_chunk<Pair>(side, tile, rows, inverses, p.rope.rotary_dim);
  }
  constexpr int kWide = 2 * Pair::kVec;
  if (kVllm && !kStaged && (side.head_dim | first_d) % kWide == 0) {
    write_rows<Pair, kVllm, 2>(side, tile, rows, inverses, first_d);
  } else {
    write_rows<Pair, kVllm, 1>(side, tile, rows, inverses, first_d);
  }
}

template <DType kType, DType kCacheType, bool kRope, bool kVllm>
void launch(const CacheWriteParams& p, cudaStream_t stream) {
  constexpr bool kStaged = kStagesRows<kType, kCacheType, kRope, kVllm>;
  using Rows = TileRows<Element<kType>, kStaged>;
  int head_dim = std::max(p.k.head_dim, p.v.head_dim);
  int row_bytes = kTileHeads * head_dim * static_cast<int>(sizeof(Element<kType>));
  int many = std::clamp((32 << 10) / row_bytes / kPieceTokens, 1, 4) * kPieceTokens;
  if (!kStaged) many = kVllm && kCacheType == DType::e4m3 ? 64 : kTileTokens<Element<kType>>;
  int tokens = tile_tokens(p.num_tokens, p.num_heads, many);
  dim3 grid = cache_grid("reshape_and_cache", p.num_tokens, p.num_heads, tokens);
  auto* kernel = cache_write<kType, kCacheType, kRope, kVllm>;
  int stride = Rows::stride(std::min(p.num_heads, kTileHeads), head_dim);
  int staged = kStaged ? tokens * stride * static_cast<int>(sizeof(Element<kType>)) : 0;
  static uint64_t allowed = 0;
  // At most 33 KB, or 8 tokens of the widest rows; the kernel declares up to 23 KB besides.
  constexpr int kMostStaged = kPieceTokens * (kTileHeads * kMaxCacheHeadDim + 8) * 2;
  if (kStaged) allow_shared_memory(kernel, kMostStaged, allowed);
  kernel<<<grid, kCacheThreads, staged, stream>>>(p, tokens);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <DType kType, DType kCacheType, bool kVllm>
void launch(const CacheWriteParams& p, cudaStream_t stream) {
  if constexpr (kPlainApart<kType, kCacheType, kVllm>) {
    if (p.rope.cos == nullptr) return launch<kType, kCacheType, false, kVllm>(p, stream);
  }
  launch<kType, kCacheType, true, kVllm>(p, stream);
}

template <DType kType>
void launch(const CacheWriteParams& p, cudaStream_t stream) {
  bool vllm = p.kv_layout == KvLayout::vllm;
  if (p.cache_dtype == DType::e4m3) {
    return vllm ? launch<kType, DType::e4m3, true>(p, stream)
                : launch<kType, DType::e4m3, false>(p, stream);
  }
  return vllm ? launch<kType, kType, true>(p, stream) : launch<kType, kType, false>(p, stream);
}

}  // namespace

void launch_cache_write(const CacheWriteParams& p, cudaStream_t stream) {
  if (p.is_packed) return launch_packed_write(p, stream);
  switch (p.dtype) {
    case DType::f32: return launch<DType::f32>(p, stream);
    case DType::f16: return launch<DType::f16>(p, stream);
    case DType::bf16: return launch<DType::bf16>(p, stream);
    default: CUATTN_ASSERT(false, "reshape_and_cache: dtype ", static_cast<int>(p.dtype));
  }
}

}  // namespace cuattn
