// SPDX-License-Identifier: Apache-2.0
// Tiles of keys, and their products with a block of rows that lie in the lanes of vectors: what
// flash.cpp and backward_flash.cpp share. For these alone, which are compiled once per instruction
// set: flash.cpp says why everything here is in an anonymous namespace. Next: flash.cpp.
#pragma once

#include "cpu/flash.h"
#include "cpu/vectors.h"
#include "cuattn/params/dropout.h"

namespace cuattn::cpu::CUATTN_ISA {
namespace {

#define CUATTN_STRING(x) #x
#define CUATTN_NAME(x) CUATTN_STRING(x)

// kKeys x kVecs accumulators: enough to hide the latency of two multiply-adds a cycle, few enough
// for the registers.
#if defined(__AVX512F__)
constexpr int kKeys = 8, kVecs = 2;
#elif defined(__AVX2__)
constexpr int kKeys = 4, kVecs = 3;
#else
constexpr int kKeys = 4, kVecs = 2;
#endif
constexpr int kTileKeys = 128;  // scores of a row block, 16 KB with AVX-512, stay in the L1 cache
static_assert(kTileKeys % kKeys == 0, "the last group of keys of a tile is stored whole");
static_assert(8 % kKeys == 0, "head dims are multiples of 8");

constexpr int kBuffer = 4 * 256;  // floats: four rows of the largest head, or of a tile's bias

// Keys [first, first + count) of K or V as float rows.
struct KeyTile {
  const float* data;
  int64_t stride;
};

// Rows of float are read in place when no more than `near` elements apart, others through the
// buffer: rows a power of two apart share a few sets of the cache and would push each other out
// before they are used again.
KeyTile load_tile(const void* base, int64_t stride, int first, int count, int dim, DType dtype,
                  int64_t near, float* buffer) {
  int64_t itemsize = dtype == DType::f32 ? 4 : 2;
  const char* row = static_cast<const char*>(base) + first * stride * itemsize;
  if (dtype == DType::f32 && stride <= near) return {reinterpret_cast<const float*>(row), stride};
  for (int j = 0; j < count; ++j) {
    load_row(row, dim, dtype, buffer + j * dim);
    row += stride * itemsize;
  }
  return {buffer, dim};
}

// Whether every element of the tile is finite: x - x is then 0.
bool all_finite(const KeyTile& tile, int count, int dim) {
  bool finite = true;
  for (int j = 0; j < count; ++j) {
    const float* row = tile.data + j * tile.stride;
    int bad = 0;
    // NOLINTNEXTLINE(misc-redundant-expression): NaN where row[c] is not finite
    for (int c = 0; c < dim; ++c) bad |= row[c] - row[c] != 0.0f;
    finite &= bad == 0;
  }
  return finite;
}

// s[j][] = dot(k_j, q) for `count` keys; s is written up to the next multiple of kKeys. Spans of a head
// are summed apart: rounding errors then grow with the span and their number, not with head_dim.
template <int kN>
void dot_keys(const float* q, const float* k, int64_t stride, int count, int head_dim, Vec* s) {
  constexpr int kSpan = 32;
  const Vec* queries = reinterpret_cast<const Vec*>(q);
  for (int j = 0; j < count; j += kKeys) {
    const float* key[kKeys];
    for (int i = 0; i < kKeys; ++i) key[i] = k + min(j + i, count - 1) * stride;
    Vec* sums = s + j * kN;
    for (int d0 = 0; d0 < head_dim; d0 += kSpan) {
      Vec acc[kKeys][kN] = {};
      for (int d = d0; d < min(d0 + kSpan, head_dim); ++d) {
        Vec x[kN];
        for (int c = 0; c < kN; ++c) x[c] = queries[d * kN + c];
        for (int i = 0; i < kKeys; ++i) {
          for (int c = 0; c < kN; ++c) acc[i][c] += x[c] * key[i][d];
        }
      }
      for (int i = 0; i < kKeys; ++i) {
        for (int c = 0; c < kN; ++c) {
          Vec& sum = sums[i * kN + c];
          sum = d0 == 0 ? acc[i][c] : sum + acc[i][c];
        }
      }
    }
  }
}

// o[c][] = o[c][] * alpha + sum_j p[j][] v_j[c], the tile summed apart: rounding errors then grow
// with the tile and the number of tiles, not with the number of keys. With kSelect a weight of -0
// leaves the value unread (see weigh).
template <int kN, bool kSelect>
void add_values(const Vec* p, const float* v, int64_t stride, int count, int head_dim_v,
                const Vec* alpha, float* out) {
  Vec* o = reinterpret_cast<Vec*>(out);
  for (int c0 = 0; c0 < head_dim_v; c0 += kKeys) {
    Vec acc[kKeys][kN] = {};
    const float* value = v + c0;
    for (int j = 0; j < count; ++j, value += stride) {
      Vec x[kN];
      for (int c = 0; c < kN; ++c) x[c] = p[j * kN + c];
      for (int i = 0; i < kKeys; ++i) {
        for (int c = 0; c < kN; ++c) {
          Vec read = splat(value[i]);
          if (kSelect) read = reinterpret_cast<IntVec>(x[c]) == INT32_MIN ? Vec{} : read;
          acc[i][c] += x[c] * read;
        }
      }
    }
    for (int i = 0; i < kKeys; ++i) {
      for (int c = 0; c < kN; ++c) {
        Vec& sum = o[(c0 + i) * kN + c];
        sum = sum * alpha[c] + acc[i][c];
      }
    }
  }
}

// What a user's mask says of the keys from `first` on; steps of keys lie within a tile of these.
template <class Unit>
KeyTileState tile_state(const Unit& u, int first) {
  static_assert(kFlexTile == kTileKeys);
  if (u.flex == nullptr) return kTileSeen;
  if (u.flex->tiles != nullptr) return static_cast<KeyTileState>(u.flex->tiles[first / kFlexTile]);
  return u.flex->params->mask.count > 0 ? kTileMasked : kTileSeen;
}

// Bias of `count` keys of one row.
template <class Unit, class Row>
void load_bias(const Unit& u, const Row& row, int first, int count, float* out) {
  if (u.bias_dtype == DType::boolean) {
    const uint8_t* keep = static_cast<const uint8_t*>(row.bias) + first * u.bias_stride;
    for (int j = 0; j < count; ++j) out[j] = keep[j * u.bias_stride] != 0 ? 0.0f : -kInfinity;
    return;
  }
  int64_t itemsize = u.bias_dtype == DType::f32 ? 4 : 2;
  const char* bias = static_cast<const char*>(row.bias) + first * u.bias_stride * itemsize;
  if (u.bias_stride == 1) {
    load_row(bias, count, u.bias_dtype, out);
  } else {
    for (int j = 0; j < count; ++j) out[j] = load_element(bias, j * u.bias_stride, u.bias_dtype);
  }
}

// s[j][] += the bias of key first + j for the rows of `block`.
template <int kN, class Unit, class Block>
void add_bias(const Unit& u, const Block& block, int first, int count, float* s, float* buffer) {
  for (int r = 0; r < block.num_rows; r += 4) {
    for (int i = 0; i < 4; ++i) {
      // Lanes without a row repeat the last one.
      load_bias(u, block.rows[min(r + i, block.num_rows - 1)], first, count,
                buffer + i * kTileKeys);
    }
    transpose<true>(buffer, kTileKeys, 4, (count + 3) / 4 * 4, s + r, kN * kWidth);
  }
}

// Factors of dropout for `count` keys: z[j][] = 0 or 1 / keep_prob. `row` and `head` are Philox's
// counter words of each lane.
template <int kN>
void draw_dropout(const DropoutParams& p, const UintVec* row, const UintVec* head, int first,
                  int count, Vec* z) {
  uint32_t threshold = 256u - static_cast<uint32_t>(p.dropped);
  float factor = 256.0f / static_cast<float>(threshold);
  UintVec words[kN][4];
  for (int j = 0; j < count; ++j) {
    uint32_t key = p.first_key + static_cast<uint32_t>(first + j);
    if (j == 0 || key % 16 == 0) {
      for (int c = 0; c < kN; ++c) philox(key / 16, row[c], head[c], p.offset, p.seed, words[c]);
    }
    for (int c = 0; c < kN; ++c) {
      UintVec drawn = words[c][key / 4 % 4] >> 8 * (key % 4) & 255u;
      z[j * kN + c] = drawn < threshold ? splat(factor) : Vec{};
    }
  }
}

}  // namespace
}  // namespace cuattn::cpu::CUATTN_ISA
