// SPDX-License-Identifier: Apache-2.0
// Between backward_units.cpp, which cuts a backward pass into tiles of keys and blocks of rows, and
// backward_flash.cpp, which computes one. Plain data only, as in flash.h. Next: backward_units.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/flash.h"
#include "cuattn/params/dropout.h"
#include "cuattn/params/rows.h"

namespace cuattn::cpu {

// One query of one head. Pointers are to the row's first element, or to that of key 0.
struct BackwardRow {
  const void* q;     // [head_dim]
  const void* dout;  // [head_dim_v]
  float* dq;         // [head_dim], added to; or nullptr: not needed, in no row
  const void* bias;  // or nullptr
  void* dbias;       // or nullptr: not needed
  float* slope_sum;  // sum of ds * distance, added to; or nullptr
  float lse, delta;
  float slope;                         // ALiBi, natural units; 0 = off
  int32_t diagonal;                    // the key at distance 0
  KeyRange visible;                    // empty for a dead row
  uint32_t dropout_row, dropout_head;  // Philox's counter words
};

// What the rows of a unit share: some queries of the query heads of one KV head, and a tile of its
// keys at a time.
struct BackwardUnit {
  int32_t head_dim, head_dim_v;
  const void *k, *v;                                 // of key 0, as dk and dv are
  void *dk, *dv;                                     // or nullptr: not needed
  int64_t k_stride, v_stride, dk_stride, dv_stride;  // elements from one key to the next
  int64_t bias_stride, dbias_stride;
  DType dtype, dk_dtype, dv_dtype, bias_dtype;
  bool adds_dbias;  // to float32; else ds is stored in the bias's dtype
  bool has_alibi;
  float scale, softcap;
  DropoutParams dropout;         // resolved
  const FlexUnit* flex;          // or nullptr; its tiles are those of the rows of a call
  const FlexGradient* gradient;  // or nullptr: the score program's derivative is 1
  double* array_sums;            // of captured arrays' gradients, added to
  int32_t first_key, num_keys;   // the tile
  float* scratch;                // 64-byte aligned, scratch_floats long
};

struct BackwardKernel {
  const char* isa;
  int32_t row_block;  // rows of add_rows, at most
  size_t (*scratch_floats)(int32_t head_dim, int32_t head_dim_v);
  // A tile of keys: begin, any number of blocks of rows, end, which stores dk and dv.
  void (*begin_keys)(const BackwardUnit& unit);
  void (*add_rows)(const BackwardUnit& unit, const BackwardRow* rows, int32_t num_rows);
  void (*end_keys)(const BackwardUnit& unit);
  float (*dot)(const void* a, const void* b, int32_t dim, DType dtype);
  void (*store)(const float* in, int32_t count, DType dtype, void* out);
};

// Keys of a tile at most: K, V, dK and dV of one stay in the L2 cache, and each conversion and
// transposition of a block of rows serves as many keys.
constexpr int32_t kBackwardKeys = 256;

}  // namespace cuattn::cpu
