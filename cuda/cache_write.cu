// SPDX-License-Identifier: Apache-2.0
// reshape_and_cache: rows of k and v into their slots, k rotated on the way, both quantised where
// the cache is e4m3. One launch for K and V. Rotary embedding: arXiv:2104.09864. The same on the
// CPU, bit for bit: cpu/cache.cpp. Next: cache_tile.cuh, cache_gather.cu.
#include "cache_tile.cuh"
#include "cuattn/device/convert.cuh"
#include "launchers.h"

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
  // An element as it is: NaN and all.
  static __device__ C stored_element(T x, float inverse) {
    if constexpr (kQuantise) {
      return stored(to_float(x), inverse);
    } else {
      return x;
    }
  }
};

// The rotation of kVec neighbours from d0 on: x becomes x cos + partner sin, sin with its sign.
// Products and sums are rounded one by one, as on the CPU.
template <class Types>
struct Rotation {
  static constexpr int kVec = Types::kVec;
  float cos[kVec], sin[kVec];
  int count;  // of the kVec elements, how many are rotated
  int half, d0;
  bool interleaved;

  __device__ Rotation(const RopeParams& rope, int64_t token, int d) {
    half = rope.rotary_dim / 2;
    d0 = d;
    interleaved = rope.interleaved;
    count = min(max(rope.rotary_dim - d, 0), kVec);
    int64_t position = count > 0 ? rope_position(rope, token) : 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (i >= count) continue;
      bool second = interleaved ? i % 2 == 1 : d + i >= half;
      int column = interleaved ? (d + i) / 2 : d + i - (second ? half : 0);
      float s = rope.sin[position * rope.sin_stride + column];
      cos[i] = rope.cos[position * rope.cos_stride + column];
      sin[i] = second ? s : -s;
    }
  }

  // Elements of `row` that belong to x, a chunk of it.
  __device__ void partners(const typename Types::T* row, const typename Types::Row& x,
                           float (&y)[kVec]) const {
    if (interleaved) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = to_float(x.x[i ^ 1]);
    } else if (half % kVec == 0) {
      int d = d0 < half ? d0 + half : d0 - half;
      auto chunk = *reinterpret_cast<const typename Types::Row*>(row + d);
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = to_float(chunk.x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        int d = d0 + i;
        y[i] = i < count ? to_float(row[d < half ? d + half : d - half]) : 0.0f;
      }
    }
  }

  __device__ typename Types::Stored apply(const typename Types::T* row,
                                          const typename Types::Row& x, float inverse) const {
    typename Types::Stored stored;
    float y[kVec];
    if (count > 0) partners(row, x, y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      stored.x[i] = i < count ? Types::stored(__fadd_rn(__fmul_rn(to_float(x.x[i]), cos[i]),
                                                        __fmul_rn(y[i], sin[i])),
                                              inverse)
                              : Types::stored_element(x.x[i], inverse);
    }
    return stored;
  }
};

template <class Types>
struct NoRotation {
  __device__ NoRotation(const RopeParams&, int64_t, int) {}
  __device__ typename Types::Stored apply(const typename Types::T*, const typename Types::Row& x,
                                          float inverse) const {
    typename Types::Stored stored;
#pragma unroll
    for (int i = 0; i < Types::kVec; ++i) stored.x[i] = Types::stored_element(x.x[i], inverse);
    return stored;
  }
};

// kRowTokens tokens from `first` on, kHeadsPerThread heads from `first_head` on.
template <class Types, class Turn>
__device__ void write_rows(const CacheWriteParams& p, const CacheSide& side, const CacheTile& tile,
                           int64_t first, int first_head) {
  constexpr int kVec = Types::kVec;
  const auto* rows = static_cast<const typename Types::T*>(side.rows);
  auto* cache = static_cast<typename Types::C*>(side.cache);
  int chunks = side.head_dim / kVec;
  bool tokens_first = side.run < side.head_dim;  // neighbouring threads write neighbouring memory
  int heads = min(p.num_heads - first_head, kHeadsPerThread);
  for (int item = threadIdx.x; item < kRowTokens * chunks; item += kCacheThreads) {
    int t = tokens_first ? item % kRowTokens : item / chunks;
    int d = (tokens_first ? item / kRowTokens : item % chunks) * kVec;
    if (tile.slot[CacheTile::kMargin + t] < 0) continue;
    const auto* from = rows + side.row(first + t, first_head) + d;
    auto* to = cache + tile.place[CacheTile::kMargin + t] + first_head * side.strides.head +
               side.run_of(d);
    typename Types::Row x[kHeadsPerThread];
#pragma unroll
    for (int h = 0; h < kHeadsPerThread; ++h) {
      if (h < heads) x[h] = *reinterpret_cast<const typename Types::Row*>(from + h * side.row_head);
    }
    Turn turn(p.rope, first + t, d);
#pragma unroll
    for (int h = 0; h < kHeadsPerThread; ++h) {
      if (h >= heads) break;
      *reinterpret_cast<typename Types::Stored*>(to + h * side.strides.head) = turn.apply(
          from - d + h * side.row_head, x[h], Types::inverse_scale(side, first_head + h));
    }
  }
}

// kColumnTokens tokens from `first` on, one head: V of the vLLM layout.
template <class Types>
__device__ void write_columns(const CacheSide& side, const CacheTile& tile, int64_t first,
                              int head) {
  constexpr int kVec = Types::kVec;
  constexpr int kGroups = kColumnTokens / kVec;
  const auto* rows = static_cast<const typename Types::T*>(side.rows);
  auto* cache = static_cast<typename Types::C*>(side.cache) + head * side.strides.head;
  float inverse = Types::inverse_scale(side, head);
  for (int item = threadIdx.x; item < kGroups * (side.head_dim / kVec); item += kCacheThreads) {
    int group = item % kGroups * kVec, d = item / kGroups * kVec;
    const int64_t* slot = tile.slot + CacheTile::kMargin + group;
    const int64_t* place = tile.place + CacheTile::kMargin + group;
    const auto* from = rows + side.row(first + group, head) + d;
    CacheSquares<kVec> squares(slot);
    if (squares.own >= 0) {
      typename Types::Row x[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        x[i] = *reinterpret_cast<const typename Types::Row*>(from +
                                                             (squares.own + i) * side.row_token);
      auto* to = cache + place[squares.own] + d * side.run_stride;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        typename Types::Stored column;
#pragma unroll
        for (int i = 0; i < kVec; ++i) column.x[i] = Types::stored_element(x[i].x[j], inverse);
        *reinterpret_cast<typename Types::Stored*>(to + j * side.run_stride) = column;
      }
    }
    for (int i = 0; i < kVec; ++i) {
      if (slot[i] < 0 || squares.hold(i)) continue;
      auto x = *reinterpret_cast<const typename Types::Row*>(from + i * side.row_token);
      auto* to = cache + place[i] + d * side.run_stride;
#pragma unroll
      for (int j = 0; j < kVec; ++j)
        to[j * side.run_stride] = Types::stored_element(x.x[j], inverse);
    }
  }
}

template <DType kType, DType kCacheType, bool kRope>
__global__ void __launch_bounds__(kCacheThreads)
    cache_write(const __grid_constant__ CacheWriteParams p, unsigned k_blocks) {
  __shared__ CacheTile tile;
  using Pair = Types<kType, kCacheType>;
  bool is_k = blockIdx.x < k_blocks;
  const CacheSide& side = is_k ? p.k : p.v;
  int index = static_cast<int>(is_k ? blockIdx.x : blockIdx.x - k_blocks);
  bool columns = side.run == 1;
  int head_groups = columns ? p.num_heads : ceil_div(p.num_heads, kHeadsPerThread);
  int tokens = columns ? kColumnTokens : kRowTokens;
  int64_t first = int64_t{index / head_groups} * tokens;
  int head = index % head_groups * (columns ? 1 : kHeadsPerThread);
  tile.fill(side, p.block_size, first, tokens, p.num_tokens, [&](int64_t token) {
    int64_t slot = p.slot_mapping[token];
    return is_slot(p, slot) ? slot : int64_t{-1};
  });
  if (columns) {
    write_columns<Pair>(side, tile, first, head);
  } else if (kRope && is_k) {
    write_rows<Pair, Rotation<Pair>>(p, side, tile, first, head);
  } else {
    write_rows<Pair, NoRotation<Pair>>(p, side, tile, first, head);
  }
}

template <DType kType, DType kCacheType>
void launch(const CacheWriteParams& p, cudaStream_t stream) {
  int64_t k_blocks = cache_blocks(p.k, p.num_tokens, p.num_heads);
  unsigned blocks =
      cache_grid("reshape_and_cache", k_blocks + cache_blocks(p.v, p.num_tokens, p.num_heads));
  auto* kernel = p.rope.cos != nullptr ? cache_write<kType, kCacheType, true>
                                       : cache_write<kType, kCacheType, false>;
  kernel<<<blocks, kCacheThreads, 0, stream>>>(p, static_cast<unsigned>(k_blocks));
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace

void launch_cache_write(const CacheWriteParams& p, cudaStream_t stream) {
  bool quantise = p.cache_dtype == DType::e4m3;
  switch (p.dtype) {
    case DType::f32:
      return quantise ? launch<DType::f32, DType::e4m3>(p, stream)
                      : launch<DType::f32, DType::f32>(p, stream);
    case DType::f16:
      return quantise ? launch<DType::f16, DType::e4m3>(p, stream)
                      : launch<DType::f16, DType::f16>(p, stream);
    case DType::bf16:
      return quantise ? launch<DType::bf16, DType::e4m3>(p, stream)
                      : launch<DType::bf16, DType::bf16>(p, stream);
    default: CUATTN_ASSERT(false, "reshape_and_cache: dtype ", static_cast<int>(p.dtype));
  }
}

}  // namespace cuattn
