// SPDX-License-Identifier: Apache-2.0
// The plain structs of the cache operations, and where an element of a paged cache lies. Clean
// under NVRTC. Next: cpu/cache.cpp (all of it in plain loops).
#pragma once

#include "cuattn/params/float8.h"
#include "cuattn/params/pages.h"

namespace cuattn {

constexpr int32_t kMaxCacheHeadDim = 1024;

// The keys, or the values, of a call: rows [num_tokens, num_heads, head_dim] outside the cache, and
// their places inside. The d axis of a cache is stored in runs of neighbours: element (block, head,
// token, d) lies at block * strides.block + head * strides.head + token * strides.token + d / run *
// run_stride + d % run. Strides are in elements.
//   nhd, hnd   run = head_dim
//   vllm, K    run = x = 16 / itemsize, run_stride = block_size * x, strides.token = x
//   vllm, V    run = 1, run_stride = block_size, strides.token = 1
struct CacheSide {
  void* rows;
  int64_t row_token, row_head;
  void* cache;
  CacheStrides strides;
  int64_t run_stride;
  int32_t run, head_dim;
  // Where the cache is e4m3: value = stored * scale. The array, where given, replaces the number.
  float scale;
  const float* scales;  // [num_heads], or nullptr
  int64_t scales_stride;

  CUATTN_HOST_DEVICE int64_t row(int64_t token, int64_t head) const {
    return token * row_token + head * row_head;
  }
  // Where d = 0 of one head lies, for token `at` of a block.
  CUATTN_HOST_DEVICE int64_t place(int64_t block, int64_t at, int64_t head) const {
    return block * strides.block + head * strides.head + at * strides.token;
  }
  CUATTN_HOST_DEVICE int64_t run_of(int32_t d) const { return d / run * run_stride + d % run; }
  CUATTN_HOST_DEVICE float scale_of(int64_t head) const {
    return scales != nullptr ? scales[head * scales_stride] : scale;
  }
};

// Rotation of the first rotary_dim elements of a row, in pairs (d, d + rotary_dim / 2), or (2 i,
// 2 i + 1) where interleaved: (a, b) becomes (a cos - b sin, b cos + a sin).
struct RopeParams {
  const float *cos, *sin;  // [max_position, rotary_dim / 2]; nullptr: no rotation
  int64_t cos_stride, sin_stride;
  const int64_t* positions;  // [num_tokens], clamped to the rows of cos and sin
  int64_t max_position;
  int32_t rotary_dim;
  bool interleaved;
};

// Rows that are the newest of their sequences, q_len of each: the last one is token context_lens[b]
// - 1 of sequence b, in the blocks that row b of block_tables names.
struct NewestTokens {
  const int32_t* context_lens;  // [num_tokens / q_len]
  const int32_t* block_tables;  // [num_tokens / q_len, max_blocks]
  int64_t block_tables_stride;
  int32_t max_blocks, q_len;  // q_len 0: none, rows have slots of their own

  // The place of a row in its sequence. Negative where that is shorter than q_len.
  CUATTN_HOST_DEVICE int64_t place(int64_t token) const {
    return context_lens[token / q_len] - (q_len - token % q_len);
  }
  CUATTN_HOST_DEVICE int64_t block(int64_t seq, int64_t column) const {
    return block_tables[seq * block_tables_stride + column];
  }
  CUATTN_HOST_DEVICE int64_t slot(int64_t token, int32_t block_size) const {
    int64_t at = place(token), column = at / block_size;
    if (at < 0 || column >= max_blocks) return -1;
    return block(token / q_len, column) * block_size + at % block_size;
  }
};

// reshape_and_cache: rows into their slots. Slot = block * block_size + token within the block;
// what is not a slot of the cache is not written.
struct CacheWriteParams {
  CacheSide k, v;
  DType dtype, cache_dtype;  // cache_dtype: dtype, or e4m3
  KvLayout kv_layout;
  int64_t num_tokens, num_blocks;
  int32_t num_heads, block_size;
  const int64_t* slot_mapping;  // [num_tokens]; -1: the row is skipped
  NewestTokens newest;
  RopeParams rope;  // of k; without positions, they are the places of newest
  bool is_packed;   // v.cache takes packed latents: v.rows and k.rows together, k has no cache
};

CUATTN_HOST_DEVICE bool is_slot(const CacheWriteParams& p, int64_t slot) {
  return slot >= 0 && slot < p.num_blocks * p.block_size;
}

// The slot of a row, or -1.
CUATTN_HOST_DEVICE int64_t slot_of(const CacheWriteParams& p, int64_t token) {
  int64_t slot = p.newest.q_len > 0 ? p.newest.slot(token, p.block_size) : p.slot_mapping[token];
  return is_slot(p, slot) ? slot : -1;
}

// Its row of cos and sin.
CUATTN_HOST_DEVICE int64_t rope_position(const CacheWriteParams& p, int64_t token) {
  int64_t at = p.rope.positions != nullptr ? p.rope.positions[token] : p.newest.place(token);
  return at < 0 ? 0 : at < p.rope.max_position ? at : p.rope.max_position - 1;
}

// gather_cache: the first tokens of each sequence, end to end, into rows.
struct CacheGatherParams {
  CacheSide k, v;
  DType dtype;  // of the caches, and of the rows but where codes become numbers
  KvLayout kv_layout;
  int64_t num_tokens;  // rows there are
  int32_t num_heads;
  Pages pages;  // block_tables [num_seqs, max_blocks]
  int32_t num_seqs, max_blocks;
  const int32_t* cu_seqlens;  // [num_seqs + 1]; rows beyond the last are not written. nullptr:
                              // sequence b has the padded_len rows from b * padded_len on
  int32_t padded_len;
  const int32_t* seqused;  // [num_seqs], tokens of a sequence that are read; nullptr: all its rows
  // Codes become numbers: rows are of number_dtype, of 16 bits, stored * scale rounded once. The
  // scales are of heads, and of sequences. Else the rows are bytes of the cache.
  bool makes_numbers;
  DType number_dtype;
  Float8Scale k_scale, v_scale;
};

// Where a gathered row comes from. seq = -1: nowhere, the row is not written.
struct CachedToken {
  int32_t seq;
  int64_t block, at;
};

// Whatever block_tables and cu_seqlens hold, the place is one of the cache.
CUATTN_HOST_DEVICE CachedToken cached_token(const CacheGatherParams& p, int64_t token) {
  int32_t low = 0, high = p.num_seqs;  // the last sequence that begins at or before the token
  int64_t position = token, length = p.padded_len;
  if (p.cu_seqlens == nullptr) {
    low = static_cast<int32_t>(token / p.padded_len);
    position = token % p.padded_len;
  } else {
    while (high - low > 1) {
      int32_t middle = low + (high - low) / 2;
      if (p.cu_seqlens[middle] <= token) {
        low = middle;
      } else {
        high = middle;
      }
    }
    position = token - p.cu_seqlens[low];
    length = int64_t{p.cu_seqlens[low + 1]} - p.cu_seqlens[low];
  }
  if (p.seqused != nullptr && p.seqused[low] < length) length = p.seqused[low];
  if (position < 0 || position >= length) return {-1, 0, 0};
  int64_t column = position / p.pages.block_size;
  if (column >= p.max_blocks) column = p.max_blocks - 1;
  int32_t block = p.pages.block(low, static_cast<int32_t>(column));
  return {low, block, position % p.pages.block_size};
}

// Whether rows [token, token + count) of one sequence are behind the keys that it uses: none of them
// is written. Asked before anything else of a call whose sequences have as many rows as the longest.
CUATTN_HOST_DEVICE bool are_unused(const CacheGatherParams& p, int64_t token, int64_t count) {
  if (p.cu_seqlens != nullptr || p.seqused == nullptr) return false;
  int64_t seq = token / p.padded_len, position = token - seq * p.padded_len;
  return position + count <= p.padded_len && position >= p.seqused[seq];
}

// copy_blocks: within each cache, whole blocks from their source to their destination. Sizes and
// strides are in bytes.
struct CacheList {
  void* const* data;  // [count], on the host
  int32_t count;
  int64_t block_bytes, block_stride;
};

struct BlockCopyParams {
  CacheList k, v;
  int64_t num_blocks;
  const int64_t* pairs;  // [num_pairs, 2]: source, destination
  int64_t num_pairs;
  bool pairs_on_host;
};

CUATTN_HOST_DEVICE bool is_copy(int64_t source, int64_t destination, int64_t num_blocks) {
  return source >= 0 && source < num_blocks && destination >= 0 && destination < num_blocks &&
         source != destination;
}

// swap_blocks: whole blocks of one array into another, of which one may be host memory.
struct BlockSwapParams {
  const void* src;
  void* dst;
  int64_t block_bytes, src_stride, dst_stride;  // bytes
  const int64_t* pairs;                         // [num_pairs, 2], on the host, checked
  int64_t num_pairs;
};

}  // namespace cuattn
