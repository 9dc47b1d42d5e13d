// SPDX-License-Identifier: Apache-2.0
// The rotary embedding of write.cu: pairs of elements of K are turned by cos and sin of their
// token's position on the way to the cache. Source: arXiv:2104.09864. Next: write.cu.
#pragma once

#include "cuattn/device/rope.cuh"
#include "cuda/cache/rows.cuh"

namespace cuattn {
namespace {

// Four floats, in a vector where `aligned` says so.
__device__ CacheChunk<float, 4> load_four(const float* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const CacheChunk<float, 4>*>(from);
  return {from[0], from[1], from[2], from[3]};
}

__device__ bool has_aligned_rows(const float* table, int64_t stride) {
  return reinterpret_cast<uintptr_t>(table) % 16 == 0 && stride % 4 == 0;
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

}  // namespace
}  // namespace cuattn
