// SPDX-License-Identifier: Apache-2.0
// Keys and values in the blocks of a paged cache: which block holds a token, and where an element
// lies in it. Next: paged.h, cache.h.
#pragma once

#include "cuattn/params/types.h"

namespace cuattn {

// K and V caches in blocks of `block_size` tokens.
//   nhd   [num_blocks, block_size, num_heads_kv, head_dim]
//   hnd   [num_blocks, num_heads_kv, block_size, head_dim]
//   vllm  K [num_blocks, num_heads_kv, head_dim / x, block_size, x] with x = 16 / itemsize,
//         V [num_blocks, num_heads_kv, head_dim, block_size]
enum class KvLayout : int32_t { nhd, hnd, vllm };

// How one cache lies, in elements. Element (block, head, token, d) lies at block * strides.block + head *
// strides.head plus
//   nhd, hnd   token * strides.token + d
//   vllm, K    d / x * block_size * x + token * x + d % x
//   vllm, V    d * block_size + token
struct CacheStrides {
  int64_t block, head, token;
};

// A packed latent of 656 bytes, FlashMLA's: 512 codes of e4m3, a float32 scale for each 128 of them
// (value = code * scale, rounded to bfloat16), 64 rope columns of bfloat16.
struct PackedLatent {
  static constexpr int32_t kLatent = 512, kScaled = 128, kRope = 64;
  static constexpr int32_t kScalesAt = 512, kRopeAt = 528, kBytes = 656;
  // Of 128 numbers up to `largest`.
  static CUATTN_HOST_DEVICE float scale(float largest) {
    float scale = largest / 448.0f;
    return scale >= 0x1p-126f ? scale : 1.0f;
  }
};

// Token t of sequence b lies in block block_tables[b][t / block_size], at place t % block_size.
// Packed rows are blocks, too: each as long as a sequence may be, each a row behind the one before
// it (strides.block == strides.token). Sequence b has one, that of its first row: block_tables is
// cu_seqlens, with one column. So are rows of sequences that lie apart: without block_tables sequence
// b is block b.
struct Pages {
  int64_t num_blocks;  // as many as an int32 can name
  int32_t block_size;
  const int32_t* block_tables;  // [sequences, columns], or nullptr
  int64_t block_tables_stride;
  int64_t packed_rows;  // of packed rows: how many there are; 0: blocks lie apart

  CUATTN_HOST_DEVICE const int32_t* entry(int32_t b, int32_t column) const {
    return &block_tables[b * block_tables_stride + column];
  }
  // Any id is read as one that exists. In 32 bits: compared with 64, lanes of the warp that copies
  // decode's keys part here, for each tile.
  CUATTN_HOST_DEVICE int32_t existing(int32_t id) const {
    int32_t last = static_cast<int32_t>(num_blocks - 1);
    return id < 0 ? 0 : id < last ? id : last;
  }
  CUATTN_HOST_DEVICE int32_t id(int32_t b, int32_t column) const {
    return block_tables == nullptr ? b : *entry(b, column);
  }
  CUATTN_HOST_DEVICE int32_t block(int32_t b, int32_t column) const {
    return existing(id(b, column));
  }
};

}  // namespace cuattn
