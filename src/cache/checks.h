// SPDX-License-Identifier: Apache-2.0
// Paged caches and their block tables as every call takes them: where the axes lie, and the rules.
// Next: rows.cpp and paged/validate.cpp (the callers).
#pragma once

#include "cuattn/params/pages.h"
#include "src/check/arrays.h"

namespace cuattn {

KvLayout kv_layout_of(const char* function, int32_t code);  // of CUATTN_KV_*

// What the caller knows the caches as.
struct CacheNames {
  const char *k, *v;
};

// The extents of a cache, and its strides in elements; head_dim is for the caller to judge.
struct CacheShape {
  int64_t num_blocks, num_heads, block_size, head_dim;
  CacheStrides strides;
};

struct CacheShapes {
  CacheShape k, v;
};

// Where blocks, heads and tokens of a cache may start on CUDA: where 128-bit loads can, or
// anywhere.
enum class Starts { on_16_bytes, on_elements };

// Both caches of a call: k_cache is of `dtype`, v_cache like it; both on `device`, which is that of
// the argument `like`, and of as many blocks, heads and tokens.
CacheShapes read_caches(const char* function, CacheNames names, const TensorView& k_cache,
                        const TensorView& v_cache, KvLayout layout, DType dtype, DLDevice device,
                        const char* like, bool output, bool check_data,
                        Starts starts = Starts::on_16_bytes);

void require_block_size(const char* function, const char* argument, int64_t block_size,
                        KvLayout layout);

// uint8 holds the bytes of float8_e4m3fn, for libraries without that type.
TensorView as_e4m3(TensorView view);

// block_tables [num_seqs, max_blocks_per_seq], int32.
struct BlockTables {
  const int32_t* data;
  int64_t stride;
  int32_t num_seqs, max_blocks;
};

BlockTables read_block_tables(const char* function, const TensorView& view, DLDevice device,
                              const char* like, bool check_data);

}  // namespace cuattn
