// SPDX-License-Identifier: Apache-2.0
// Between flash_units.cpp and paged.cpp, which cut calls into units, and flash.cpp, which computes
// one. Plain data only: flash.cpp is compiled once per instruction set and must not share an inline
// function with the rest of the library. Next: flash_units.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuattn/params/dropout.h"
#include "cuattn/params/flex.h"
#include "cuattn/params/float8.h"

namespace cuattn::cpu {

// One query of one head. Pointers are to the row's first element.
struct FlashRow {
  const void* q;     // [head_dim]
  void* out;         // [head_dim_v]
  float* lse;        // or nullptr
  float* max;        // the largest score, before the sink, -inf where no key is seen; or nullptr
  const void* bias;  // of key 0, or nullptr
  float q_scale;     // read where q is float8
  float slope;       // ALiBi, natural units; 0 = off
  float sink;        // natural units; -inf = none
  int32_t diagonal;  // the key at distance 0: row + used keys - used queries
  KeyRange visible;  // empty for a row that takes no part
  uint32_t dropout_row, dropout_head;  // Philox's counter words
};

// What a user wrote, for the rows of one unit.
struct FlexUnit {
  const FlexParams* params;
  int32_t b, first_head, q_len, kv_len;  // first_head: what dropout_head is for head 0
  const uint8_t* tiles;  // a KeyTileState for each kFlexTile keys, or nullptr: the mask decides
};

constexpr int32_t kFlexTile = 128;  // keys of a tile in the lists' answer to a unit
enum KeyTileState : uint8_t { kTileHidden, kTileMasked, kTileSeen };

// Of float8 keys and values, for the rows of one unit: value = stored * scale.
struct Float8Unit {
  const float *k_scale, *v_scale;  // one for each kScaleRows keys; one for each channel
  int64_t k_scale_stride, v_scale_stride;
  int32_t first_key;         // of key 0 in its sequence, from which blocks are counted
  int64_t v_channel_stride;  // 1, or keys are what lies side by side: v_stride is 1 then
};

// Rows that read the same keys: some queries of the query heads that share one KV head.
struct FlashUnit {
  const FlashRow* rows;
  int32_t num_rows;
  int64_t sequence_rows;  // of all units with these keys; what is computed how depends on it alone
  int32_t head_dim, head_dim_v;
  const void *k, *v;           // of key 0
  int64_t k_stride, v_stride;  // elements from one key to the next
  DType dtype, out_dtype, bias_dtype;
  int64_t bias_stride;  // elements from one key to the next
  float scale, softcap;
  bool has_alibi;
  DropoutParams dropout;  // resolved
  const FlexUnit* flex;   // or nullptr
  Float8Unit float8;      // read where dtype is e4m3, or i8, of q and k alone
  float* scratch;         // 64-byte aligned, scratch_floats long
};

// Rows of one head times its matrix, for cpu/project.cpp: out = x W, W [inner, outer] or the transpose
// of such a w. Strides in elements from row to row.
struct MatrixUnit {
  const void *x, *w;
  void* out;
  int64_t x_stride, w_stride, out_stride;
  int32_t rows, inner, outer;
  bool transpose;  // w is [outer, inner]
  DType dtype;
  float* scratch;  // 64-byte aligned, matrix_floats long
};

struct FlashKernel {
  const char* isa;
  int32_t row_block;  // rows computed at once; a unit is best filled with a multiple of it
  size_t (*scratch_floats)(int32_t num_rows, int32_t head_dim, int32_t head_dim_v);
  void (*run)(const FlashUnit& unit);
  size_t (*matrix_floats)(int32_t inner, int32_t outer);
  void (*multiply)(const MatrixUnit& unit);
};

// The kernel of the best instruction set here, or of CUATTN_CPU_ISA; throws as isa_name() does.
const FlashKernel& flash_kernel();

// Memory of the calling thread for one unit, 64-byte aligned; grows, never shrinks, goes with the
// thread.
float* thread_scratch(size_t floats);

// Rows of a unit at most: with more, each conversion of a K and V tile to float serves more rows,
// but the unit's queries and outputs leave the L2 cache.
constexpr int32_t kMaxUnitRows = 128;

}  // namespace cuattn::cpu
