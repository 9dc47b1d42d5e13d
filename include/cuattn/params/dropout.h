// SPDX-License-Identifier: Apache-2.0
// Which probabilities dropout keeps: a function of seed, offset and place alone, so that tiles,
// backends and packing cannot matter. Source: Philox-4x32-10, Salmon et al., SC 2011. Next:
// attention.h.
#pragma once

#include "cuattn/params/types.h"

namespace cuattn {

constexpr int64_t kMaxDropoutOffset = 0xffffffff;  // a word of Philox's counter

// Probability (b, h, i, j) is kept when its byte is below 256 - dropped, and is then multiplied by
// 256 / (256 - dropped). Its byte is byte j % 16 of the 16 that Philox gives for the key `seed` and
// the counter (j / 16, i, head(b, h), offset); i is the row within its sequence. A part of a greater
// call says where its first row, key and head stand there, and counts on from these.
struct DropoutParams {
  uint64_t seed;
  uint32_t offset;
  int32_t dropped;                            // of 256; 0 = off
  const int64_t* state;                       // [seed, offset] in the memory of q, or nullptr
  uint32_t first_row, first_key, first_head;  // on CUDA first_key is a multiple of 16
  uint32_t num_heads;                         // of a sequence of the greater call

  CUATTN_HOST_DEVICE bool is_on() const { return dropped > 0; }
  CUATTN_HOST_DEVICE uint32_t threshold() const { return 256u - static_cast<uint32_t>(dropped); }
  CUATTN_HOST_DEVICE float factor() const { return 256.0f / static_cast<float>(threshold()); }
  CUATTN_HOST_DEVICE float kept_share() const { return static_cast<float>(threshold()) / 256.0f; }
  CUATTN_HOST_DEVICE uint32_t head(int32_t b, int32_t h) const {
    return first_head + static_cast<uint32_t>(b) * num_heads + static_cast<uint32_t>(h);
  }
  // The same with seed and offset read from state, once, where it can be read.
  CUATTN_HOST_DEVICE DropoutParams resolved() const {
    DropoutParams read = *this;
    if (state != nullptr) {
      read.seed = static_cast<uint64_t>(state[0]);
      read.offset = static_cast<uint32_t>(state[1]);
      read.state = nullptr;
    }
    return read;
  }
};

// The four words of a counter.
struct alignas(16) PhiloxWords {
  uint32_t x, y, z, w;
};

// a * b. Note: of a plain product by a constant nvcc makes one of 64 by 64 bits here and there, which
// adds a zero to the chain of each round.
CUATTN_HOST_DEVICE uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

CUATTN_HOST_DEVICE PhiloxWords philox(PhiloxWords counter, uint64_t key) {
  uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  PhiloxWords c = counter;
  for (int32_t round = 0; round < 10; ++round) {
    uint64_t a = wide_product(c.x, 0xd2511f53u), b = wide_product(c.z, 0xcd9e8d57u);
    c = {static_cast<uint32_t>(b >> 32) ^ c.y ^ low, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c.w ^ high, static_cast<uint32_t>(a)};
    low += 0x9e3779b9u;
    high += 0xbb67ae85u;
  }
  return c;
}

// Whether probability (head, row, key) is kept; `head` is that of DropoutParams::head.
CUATTN_HOST_DEVICE bool is_kept(const DropoutParams& p, uint32_t head, int32_t row, int32_t key) {
  uint32_t i = p.first_row + static_cast<uint32_t>(row);
  uint32_t j = p.first_key + static_cast<uint32_t>(key);
  PhiloxWords words = philox({j >> 4, i, head, p.offset}, p.seed);
  uint32_t which = j >> 2 & 3u;
  uint32_t word = which == 0 ? words.x : which == 1 ? words.y : which == 2 ? words.z : words.w;
  return (word >> 8 * (j & 3u) & 255u) < p.threshold();
}

// What it is multiplied by.
CUATTN_HOST_DEVICE float kept_factor(const DropoutParams& p, uint32_t head, int32_t row,
                                     int32_t key) {
  if (!p.is_on()) return 1.0f;
  return is_kept(p, head, row, key) ? p.factor() : 0.0f;
}

}  // namespace cuattn
