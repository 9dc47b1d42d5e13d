// SPDX-License-Identifier: Apache-2.0
// What write.cu reads and stores: elements of a row as the cache keeps them, and the rows of a
// tile, by way of shared memory or from where they lie. Next: rotate.cuh.
#pragma once

#include "cuattn/device/mma_sm80.cuh"
#include "cuda/cache/tile.cuh"

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

}  // namespace
}  // namespace cuattn
