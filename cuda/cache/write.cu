// SPDX-License-Identifier: Apache-2.0
// reshape_and_cache: rows of k and v into their slots, k rotated on the way, both quantised where
// the cache is e4m3. One launch for K and V. Rotary embedding: arXiv:2104.09864. The same on the
// CPU, bit for bit: cpu/cache.cpp. Next: tile.cuh, gather.cu.
#include "cuattn/device/mma_sm80.cuh"
#include "cuda/cache/tile.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using namespace device;

template <DType kType, DType kCacheType>
struct Types {
  using T = Element<kType>;
  using C = Element<kCacheType>;
  static constexpr int kVec = 16 / sizeof(T);
  using Row = CacheChunk<T, kVec>;
  using Stored = CacheChunk<C, kVec>;
  static constexpr bool kQuantise = kCacheType == DType::e4m3;

  static __device__ float inverse_scale(const CacheSide& side, int64_t head) {
    return kQuantise ? __fdiv_rn(1.0f, side.scale_of(head)) : 1.0f;
  }
  static __device__ C stored(float x, float inverse) {
    return from_float<C>(kQuantise ? __fmul_rn(x, inverse) : x);
  }
  // Two neighbours.
  static __device__ void store_two(C* to, float a, float b, float inverse) {
    if constexpr (kQuantise) {
      *reinterpret_cast<uint16_t*>(to) = pack2_e4m3(__fmul_rn(a, inverse), __fmul_rn(b, inverse));
    } else if constexpr (sizeof(C) == 2) {
      *reinterpret_cast<uint32_t*>(to) = pack2<kCacheType>(a, b);
    } else {
      to[0] = a, to[1] = b;
    }
  }
  // Elements as they are: NaN and all.
  static __device__ C stored_element(T x, float inverse) {
    if constexpr (kQuantise) {
      return stored(to_float(x), inverse);
    } else {
      return x;
    }
  }
  template <int kSize>
  static __device__ CacheChunk<C, kSize> stored_chunk(const CacheChunk<T, kSize>& x,
                                                      float inverse) {
    if constexpr (kQuantise) {
      CacheChunk<C, kSize> y;
#pragma unroll
      for (int i = 0; i < kSize; i += 2)
        store_two(y.x + i, to_float(x.x[i]), to_float(x.x[i + 1]), inverse);
      return y;
    } else {
      return x;
    }
  }
};

// (a, b) becomes (a cos - b sin, b cos + a sin). Products and sums are rounded one by one, as on
// the CPU.
struct Rotated {
  float a, b;
};
__device__ Rotated rotated(float a, float b, float cos, float sin) {
  return {__fadd_rn(__fmul_rn(a, cos), __fmul_rn(b, -sin)),
          __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin))};
}

// Four floats, in a vector where `aligned` says so.
__device__ CacheChunk<float, 4> load_four(const float* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const CacheChunk<float, 4>*>(from);
  return {from[0], from[1], from[2], from[3]};
}

__device__ bool has_aligned_rows(const float* table, int64_t stride) {
  return reinterpret_cast<uintptr_t>(table) % 16 == 0 && stride % 4 == 0;
}

// The rows of a tile. Where they are staged they set out for shared memory before their places are
// known, in whole lines: neighbouring threads read neighbouring tokens there at no cost. What a
// piece has behind the tile is read from where it lies.
template <class T, bool kStaged>
class TileRows {
 public:
  // Elements between tokens: 16 bytes more than they take, so that eight begin in other banks.
  static __host__ __device__ int stride(int heads, int head_dim) {
    return heads * head_dim + 16 / static_cast<int>(sizeof(T));
  }

  __device__ TileRows(const CacheSide& side, const CacheTile& tile, T* staged)
      : side_(side), tile_(tile), staged_(staged), stride_(stride(tile.heads, side.head_dim)) {}
  __device__ void fetch(int64_t num_tokens) const {
    if constexpr (kStaged) {
      constexpr int kWarps = kCacheThreads / 32, kVec = 16 / sizeof(T);
      int warp = threadIdx.x / 32, chunks = side_.head_dim / kVec;
      int tokens = static_cast<int>(min(num_tokens - tile_.first, int64_t{tile_.tokens}));
      for (int i = threadIdx.x % 32; i < tile_.heads * chunks; i += 32) {
        const T* from = global(0, i / chunks) + i % chunks * kVec;
        uint32_t to = smem_address(staged_ + i * kVec);
        for (int token = warp; token < tokens; token += kWarps)
          cp_async16(to + token * stride_ * static_cast<int>(sizeof(T)),
                     from + token * side_.row_token);
      }
      cp_async_commit();
    }
  }
  __device__ void await() const {
    if constexpr (kStaged) {
      cp_async_wait<0>();
      __syncthreads();
    }
  }
  // The row of a token and a head, from which `tokens` follow each other: the tile's, or some
  // behind it.
  __device__ const T* operator()(int token, int head, int tokens = 1) const {
    if (!has(token, tokens)) return global(token, head);
    return staged_ + token * stride_ + head * side_.head_dim;
  }
  // From there to the next head, and to the next token.
  __device__ int64_t next_head(int token) const {
    return has(token, 1) ? side_.head_dim : side_.row_head;
  }
  __device__ int64_t next_token(int token, int tokens) const {
    return has(token, tokens) ? stride_ : side_.row_token;
  }

 private:
  __device__ bool has(int token, int tokens) const {
    return kStaged && token + tokens <= tile_.tokens;
  }
  __device__ const T* global(int token, int head) const {
    return static_cast<const T*>(side_.rows) +
           side_.row(tile_.first + token, tile_.first_head + head);
  }

  const CacheSide& side_;
  const CacheTile& tile_;
  T* staged_;
  int stride_;
};

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

// cos and sin of four columns.
struct Angles {
  CacheChunk<float, 4> cos, sin;
};

// Columns `first` to first + 3 of two chunks, turned and stored.
template <class Types, class Row, class Stored>
__device__ __forceinline__ void turn_four(const Row& a, const Row& b, int first,
                                          const Angles& angles, bool interleaved, float inverse,
                                          Stored& low, Stored& high) {
  constexpr int kColumns = sizeof(Row) / sizeof(typename Types::T);
  auto turn = [&](const auto& x, const auto& y, int column) {
    return rotated(to_float(x), to_float(y), angles.cos.x[column - first],
                   angles.sin.x[column - first]);
  };
  if (interleaved) {
#pragma unroll
    for (int column = first; column < first + 4; ++column) {
      bool in_a = 2 * column < kColumns;
      const auto* pair = (in_a ? a : b).x + 2 * column % kColumns;
      Rotated x = turn(pair[0], pair[1], column);
      Types::store_two((in_a ? low : high).x + 2 * column % kColumns, x.a, x.b, inverse);
    }
  } else {
#pragma unroll
    for (int column = first; column < first + 4; column += 2) {
      Rotated x = turn(a.x[column], b.x[column], column);
      Rotated y = turn(a.x[column + 1], b.x[column + 1], column + 1);
      Types::store_two(low.x + column, x.a, y.a, inverse);
      Types::store_two(high.x + column, x.b, y.b, inverse);
    }
  }
}

// What a thread turns in each head: kColumns of cos and sin, the chunk from d on and that from
// d + other on. token < 0: nothing.
template <bool kPieces, int kColumns>
struct TurnedChunks {
  int column, token, d, other;

  __device__ TurnedChunks(const CacheWriteParams& p, const CacheTile& tile, int index)
      : column(0), token(-1), d(0), other(0) {
    int half = p.rope.rotary_dim / 2;
    CacheItem item(index, half / kColumns, token_bits(p.k, tile.tokens));
    column = item.chunk * kColumns;
    token = tile.token<kPieces>(item.token);
    d = column << int{p.rope.interleaved};
    other = p.rope.interleaved ? kColumns : half;
  }
};

// The rotated elements where half of them is a multiple of kColumns: a thread takes as many columns
// of cos and sin, and for kHeads heads the two chunks whose pairs these columns turn. What is
// turned of a head that is not there is not stored.
template <class Types, bool kPieces, int kColumns, class Rows>
__device__ void rotate_rows(const CacheWriteParams& p, const CacheTile& tile, const Rows& rows,
                            const float* inverses, const int64_t* positions) {
  using T = typename Types::T;
  using C = typename Types::C;
  constexpr int kHeads = 32 / (kColumns * sizeof(T));  // 64 bytes in flight
  using Row = CacheChunk<T, kColumns>;
  using Stored = CacheChunk<C, kColumns>;
  const CacheSide& side = p.k;
  const RopeParams& rope = p.rope;
  int items = tile.items * (rope.rotary_dim / 2 / kColumns);
  bool aligned =
      has_aligned_rows(rope.cos, rope.cos_stride) && has_aligned_rows(rope.sin, rope.sin_stride);
  for (int begin = 0; begin < tile.heads; begin += kHeads) {
    int head = tile.first_head + begin, heads = min(tile.heads - begin, kHeads);
    for (int index = threadIdx.x; index < items; index += kCacheThreads) {
      auto [column, token, d, other] = TurnedChunks<kPieces, kColumns>(p, tile, index);
      if (token < 0) continue;
      const T* from = rows(token, begin) + d;
      Row a[kHeads], b[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= heads) continue;
        a[h] = *reinterpret_cast<const Row*>(from + h * side.row_head);
        b[h] = *reinterpret_cast<const Row*>(from + h * side.row_head + other);
      }
      int64_t position = positions[token];
      const float* cos_row = rope.cos + position * rope.cos_stride + column;
      const float* sin_row = rope.sin + position * rope.sin_stride + column;
      Stored low[kHeads], high[kHeads];
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        Angles angles = {load_four(cos_row + i, aligned), load_four(sin_row + i, aligned)};
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
          turn_four<Types>(a[h], b[h], i, angles, rope.interleaved, inverses[begin + h], low[h],
                           high[h]);
      }
      C* to = static_cast<C*>(side.cache) + tile.place(token) + head * side.strides.head;
      int64_t first_run = side.run_of(d), second_run = side.run_of(d + other);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= heads) continue;
        *reinterpret_cast<Stored*>(to + h * side.strides.head + first_run) = low[h];
        *reinterpret_cast<Stored*>(to + h * side.strides.head + second_run) = high[h];
      }
    }
  }
}

// The same of rows that are staged: what takes time are cos and sin, which serve all heads.
template <class Types, bool kPieces, int kColumns, class Rows>
__device__ void rotate_staged_rows(const CacheWriteParams& p, const CacheTile& tile,
                                   const Rows& rows, const float* inverses,
                                   const int64_t* positions) {
  using C = typename Types::C;
  using Row = CacheChunk<typename Types::T, kColumns>;
  using Stored = CacheChunk<C, kColumns>;
  const CacheSide& side = p.k;
  const RopeParams& rope = p.rope;
  int items = tile.items * (rope.rotary_dim / 2 / kColumns);
  bool aligned =
      has_aligned_rows(rope.cos, rope.cos_stride) && has_aligned_rows(rope.sin, rope.sin_stride);
  for (int index = threadIdx.x; index < items; index += kCacheThreads) {
    auto [column, token, d, other] = TurnedChunks<kPieces, kColumns>(p, tile, index);
    if (token < 0) continue;
    const float* cos_row = rope.cos + positions[token] * rope.cos_stride + column;
    const float* sin_row = rope.sin + positions[token] * rope.sin_stride + column;
    Angles angles[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns; i += 4)
      angles[i / 4] = {load_four(cos_row + i, aligned), load_four(sin_row + i, aligned)};
    C* to = static_cast<C*>(side.cache) + tile.place(token) + tile.first_head * side.strides.head +
            side.run_of(d);
    int64_t second = side.run_of(d + other) - side.run_of(d);
#pragma unroll 1
    for (int h = 0; h < tile.heads; ++h, to += side.strides.head) {
      const auto* from = rows(token, h) + d;
      Row a = *reinterpret_cast<const Row*>(from);
      Row b = *reinterpret_cast<const Row*>(from + other);
      Stored low, high;
#pragma unroll
      for (int i = 0; i < kColumns; i += 4)
        turn_four<Types>(a, b, i, angles[i / 4], rope.interleaved, inverses[h], low, high);
      *reinterpret_cast<Stored*>(to) = low;
      *reinterpret_cast<Stored*>(to + second) = high;
    }
  }
}

// The rotated elements in any other case, pair by pair.
template <class Types, class Rows>
__device__ void rotate_pairs(const CacheWriteParams& p, const CacheTile& tile, const Rows& rows,
                             const float* inverses, const int64_t* positions) {
  const CacheSide& side = p.k;
  const RopeParams& rope = p.rope;
  int half = rope.rotary_dim / 2;
  for (int index = threadIdx.x; index < tile.tokens * half; index += kCacheThreads) {
    CacheItem item(index, half, 0);
    if (tile.slot(item.token) < 0) continue;
    int64_t position = positions[item.token];
    float cos = rope.cos[position * rope.cos_stride + item.chunk];
    float sin = rope.sin[position * rope.sin_stride + item.chunk];
    int d = rope.interleaved ? 2 * item.chunk : item.chunk;
    int other = rope.interleaved ? d + 1 : d + half;
    for (int head = tile.first_head; head < tile.first_head + tile.heads; ++head) {
      const auto* row = rows(item.token, head - tile.first_head);
      auto* place = static_cast<typename Types::C*>(side.cache) + tile.place(item.token) +
                    head * side.strides.head;
      float inverse = inverses[head - tile.first_head];
      Rotated x = rotated(to_float(row[d]), to_float(row[other]), cos, sin);
      place[side.run_of(d)] = Types::stored(x.a, inverse);
      place[side.run_of(other)] = Types::stored(x.b, inverse);
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

// kVllm: the layout whose V goes by pieces. Note: with four blocks a multiprocessor float32 would
// spill there, as it would beside RoPE.
template <DType kType, DType kCacheType, bool kRope, bool kVllm>
__global__ void __launch_bounds__(kCacheThreads, kType == DType::f32 && (kRope || kVllm) ? 3 : 4)
    cache_write(const __grid_constant__ CacheWriteParams p, int tokens) {
  __shared__ CacheTile::Places places;
  __shared__ int64_t positions[kMaxTileTokens + kPieceTokens];  // the last piece ends behind
  __shared__ float inverses[kTileHeads];  // 1 / scale of each head of the tile
  using Pair = Types<kType, kCacheType>;
  CacheTile tile(&places, tokens, p.num_heads);
  bool is_k = tile.is_k;
  const CacheSide& side = is_k ? p.k : p.v;
  extern __shared__ uint4 staged[];
  using T = typename Pair::T;
  constexpr bool kStaged = kStagesRows<kType, kCacheType, kRope, kVllm>;
  const TileRows<T, kStaged> rows(side, tile, reinterpret_cast<T*>(staged));
  rows.fetch(p.num_tokens);
  if (kRope && is_k) {  // by threads that have no slots to read, at the same time
    int i = static_cast<int>(threadIdx.x) - kCacheThreads / 2;
    if (i >= 0 && i < tokens + kPieceTokens && tile.first + i < p.num_tokens)
      positions[i] = rope_position(p.rope, tile.first + i);
  }
  if (int h = kCacheThreads - 1 - static_cast<int>(threadIdx.x); h < tile.heads)
    inverses[h] = Pair::inverse_scale(side, tile.first_head + h);
  tile.fill(side, p.block_size, p.num_tokens, [&](int64_t token) {
    int64_t slot = p.slot_mapping[token];
    return is_slot(p, slot) ? slot : int64_t{-1};
  });
  bool some_alone = kVllm && (!is_k || tokens > kFewTokens) && tile.find_pieces();
  rows.await();
  if (kVllm && !is_k) {
    __shared__ Pairs<Pair> warp_tiles[kCacheThreads / 32];
    if (some_alone) write_scattered<Pair>(side, tile, rows, inverses);
    write_pairs<Pair>(side, tile, rows, inverses, warp_tiles);
    return;
  }
  int first_d = 0;
  if (kRope && is_k) {
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
  static std::atomic<uint64_t> allowed{0};
  // At most 33 KB, or 8 tokens of the widest rows; the kernel declares up to 23 KB besides.
  constexpr int kMostStaged = kPieceTokens * (kTileHeads * kMaxCacheHeadDim + 8) * 2;
  if (kStaged) allow_shared_memory(kernel, kMostStaged, allowed);
  kernel<<<grid, kCacheThreads, staged, stream>>>(p, tokens);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <DType kType, DType kCacheType, bool kRope>
void launch(const CacheWriteParams& p, cudaStream_t stream) {
  if (p.kv_layout == KvLayout::vllm) return launch<kType, kCacheType, kRope, true>(p, stream);
  launch<kType, kCacheType, kRope, false>(p, stream);
}

template <DType kType>
void launch(const CacheWriteParams& p, cudaStream_t stream) {
  bool rope = p.rope.cos != nullptr;
  if (p.cache_dtype == DType::e4m3) {
    return rope ? launch<kType, DType::e4m3, true>(p, stream)
                : launch<kType, DType::e4m3, false>(p, stream);
  }
  return rope ? launch<kType, kType, true>(p, stream) : launch<kType, kType, false>(p, stream);
}

}  // namespace

void launch_cache_write(const CacheWriteParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::f32: return launch<DType::f32>(p, stream);
    case DType::f16: return launch<DType::f16>(p, stream);
    case DType::bf16: return launch<DType::bf16>(p, stream);
    default: CUATTN_ASSERT(false, "reshape_and_cache: dtype ", static_cast<int>(p.dtype));
  }
}

}  // namespace cuattn
