// SPDX-License-Identifier: Apache-2.0
// Dropout where warpgroups specialise: warps that have nothing to multiply draw what is kept of a
// tile and leave it in shared memory, a bit an element, as the threads want it that hold the
// accumulators. The rule: params/dropout.h. Used by cuda/attention/sm90 and cuda/backward/sm90.
//
// A thread has a word for 64 columns of its fragment: of block n of 8 columns bit 7 - n of each byte.
// Byte e is element e of a block (rows g, g, g + 8, g + 8) where rows are queries; where they are
// keys bytes 1 and 2 change places, so that what one call of Philox gives lies together.
#pragma once

#include "cuattn/device/dropout.cuh"

namespace cuattn::device {

CUATTN_HOST_DEVICE constexpr int kept_words(int columns) { return (columns + 63) / 64; }
// A row is held by four threads, 16 rows by a warp, and so by two threads a row: 8 bytes.

__device__ __forceinline__ void store_shared2(uint32_t smem, uint32_t value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(smem), "h"(static_cast<uint16_t>(value)) : "memory");
}

// Draws for one head of a sequence.
struct TileDropout {
  HeadDropout head;
  uint32_t low, high;  // what is dropped of 256, in each byte: bits 0 to 6, and bit 7

  __device__ __forceinline__ TileDropout(const AttentionParams& p, int32_t b, int32_t h)
      : head(p, b, h),
        low((static_cast<uint32_t>(head.params.dropped) & 127u) * 0x01010101u),
        high((static_cast<uint32_t>(head.params.dropped) & 128u) * 0x01010101u) {}

  // Bit 7 of each byte: that byte + dropped stays below 256.
  __device__ __forceinline__ uint32_t kept_of(uint32_t bytes) const {
    uint32_t carry = (bytes & 0x7f7f7f7fu) + low;  // into bit 7
    return ~((bytes & high) | ((bytes | high) & carry)) & 0x80808080u;
  }

  // Rows are queries: 32 of them from row0 on, which two warps hold, and 16 * kCalls keys from key0
  // on. `to`: the word of their first thread.
  template <int kCalls>
  __device__ __forceinline__ void draw_rows(uint32_t to, int32_t row0, int32_t key0) const {
    static_assert(kCalls <= 4);
    const int32_t lane = threadIdx.x % 32;
    uint32_t kept[2] = {};  // of lanes 0 and 1 of a quad; of 2 and 3
#pragma unroll 2
    for (int call = kCalls - 1; call >= 0; --call) {
      const PhiloxWords w = head.draw(row0 + lane, key0 / 16 + call);
      kept[0] = (kept[0] >> 1 | kept_of(w.z)) >> 1 | kept_of(w.x);
      kept[1] = (kept[1] >> 1 | kept_of(w.w)) >> 1 | kept_of(w.y);
    }
    to += lane / 16 * 128 + lane % 8 * 16 + lane / 8 % 2 * 2;
#pragma unroll
    for (int quad = 0; quad < 4; ++quad)
      store_shared2(to + 4 * quad, kept[quad / 2] >> quad % 2 * 16);
  }

  // Rows are keys: 64 of them from key0 on, which four warps hold, and kBlocks blocks of 8 queries
  // from row0 on.
  template <int kBlocks>
  __device__ __forceinline__ void draw_keys(uint32_t to, int32_t row0, int32_t key0) const {
    static_assert(kBlocks <= 8);
    const int32_t lane = threadIdx.x % 32, warp = lane / 8, column = lane % 8;
    uint32_t kept[4] = {};  // of keys 0 to 3, 4 to 7, ..
#pragma unroll 2
    for (int block = kBlocks - 1; block >= 0; --block) {
      const PhiloxWords w = head.draw(row0 + 8 * block + column, key0 / 16 + warp);
      kept[0] = kept[0] >> 1 | kept_of(w.x);
      kept[1] = kept[1] >> 1 | kept_of(w.y);
      kept[2] = kept[2] >> 1 | kept_of(w.z);
      kept[3] = kept[3] >> 1 | kept_of(w.w);
    }
    to += warp * 128 + column / 2 * 4 + column % 2 * 2;
#pragma unroll
    for (uint32_t key = 0; key < 8; ++key) {
      const uint32_t bytes = key % 4 | (4 + key % 4) << 4;  // of this key, and of key + 8
      store_shared2(to + 16 * key, __byte_perm(kept[key / 4], kept[2 + key / 4], bytes));
    }
  }
};

// What a thread keeps of its fragment of kColumns columns, a word at a time: registers are few.
template <bool kKeysInRows, int kColumns>
struct Kept {
  static constexpr int kWords = kept_words(kColumns);
  uint32_t place;  // of this thread's first word
  uint32_t pitch;  // to the next one, in bytes

  // `from`: of the tile's first thread; `thread` of `threads`.
  __device__ __forceinline__ Kept(uint32_t from, int thread, int threads)
      : place(from + 4 * thread), pitch(4 * threads) {}
  __device__ __forceinline__ uint32_t word(int index) const {
    uint32_t bits;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(place + index * pitch) : "memory");
    return bits;
  }
  static CUATTN_HOST_DEVICE constexpr uint32_t byte_of(int element) {
    return kKeysInRows ? element % 2 * 2 + element / 2 : element;
  }
  // All bits of a pair of 16-bit numbers, `half` of a block, or none.
  static __device__ __forceinline__ uint32_t mask(uint32_t word, int block, int half) {
    const uint32_t first = 8 | byte_of(2 * half), second = 8 | byte_of(2 * half + 1);
    uint32_t bits;  // 8 | n: the highest bit of byte n, eight times
    asm("prmt.b32 %0, %1, 0, %2;"
        : "=r"(bits)
        : "r"(word << block % 8), "r"(first * 0x11u | second * 0x1100u));
    return bits;
  }
  // Of 16-bit pairs, of floats: what is not kept becomes 0.
  static __device__ __forceinline__ void drop(uint32_t word, int index,
                                              uint32_t (&pairs)[kColumns / 4]) {
#pragma unroll
    for (int i = 16 * index; i < kColumns / 4 && i < 16 * index + 16; ++i)
      pairs[i] &= mask(word, i / 2, i % 2);
  }
  static __device__ __forceinline__ void drop(uint32_t word, int index, float (&x)[kColumns / 2]) {
#pragma unroll
    for (int i = 32 * index; i < kColumns / 2 && i < 32 * index + 32; ++i) {
      const uint32_t bit = 8 * byte_of(i % 4) + 7 - i / 4 % 8;
      x[i] = word & 1u << bit ? x[i] : 0.0f;
    }
  }
  template <class... Fragments>
  __device__ __forceinline__ void drop_all(Fragments&... fragments) const {
#pragma unroll
    for (int index = 0; index < kWords; ++index) {
      const uint32_t bits = word(index);
      (drop(bits, index, fragments), ...);
    }
  }
};

}  // namespace cuattn::device
