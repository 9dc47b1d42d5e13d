// SPDX-License-Identifier: Apache-2.0
// Kernel cpu: flash attention for one unit (rows that read the same keys), transposed so that a
// vector holds one key's scores for several rows: maxima, sums and masks need no horizontal step,
// and neither K nor V is ever transposed. Source: FlashAttention-2, arXiv:2307.08691, section 3.1;
// online softmax, arXiv:1805.02867. Next: flash_units.cpp.
//
// Compiled once per instruction set, into cuattn::cpu::CUATTN_ISA::kFlashKernel, always with
//   -O3 -fno-exceptions -fno-math-errno -ffp-contract=fast -Wno-psabi, and
//   -DCUATTN_ISA=baseline
//   -DCUATTN_ISA=avx2    -mavx2 -mfma -mf16c                                      (x86-64 only)
//   -DCUATTN_ISA=avx512  -march=x86-64-v4 -mprefer-vector-width=512               (x86-64 only)
// Note: everything is in an anonymous namespace and no std template is used. A weak function
// compiled here with AVX-512 could become the copy that the linker keeps for the whole library, and
// an older CPU would stop at it.
#include "cpu/flash.h"

#include "cpu/flex_vectors.h"
#include "cpu/float8_tiles.h"
#include "cpu/tiles.h"

namespace cuattn::cpu::CUATTN_ISA {
namespace {

// 1. One block of rows: kN vectors of scores, a row per lane. A narrow block (few rows, as in
// decoding) computes its two products along the head dimension instead, so that lanes without a row
// cost nothing.

template <int kN>
struct Block {
  Vec max[kN], sum[kN];  // of the scores so far; of their weights
  Vec slope[kN];
  IntVec begin[kN], end[kN], diagonal[kN];
  UintVec dropout_row[kN], dropout_head[kN];
  int32_t first_key, last_key;    // some row sees the keys in [first_key, last_key)
  int32_t common_key, until_key;  // every row sees the keys in [common_key, until_key)
  const FlashRow* rows;
  int32_t num_rows;
  float* q;  // [head_dim][kN * kWidth], narrow [num_rows][head_dim]
  float* o;  // not yet divided by sum; [head_dim_v][kN * kWidth], narrow [num_rows][head_dim_v]
};

// As long as nothing is added to them, scores are plain products q k: the sign of the scale is put
// into q and its size into the exponential, where it costs no rounding. A scale of 0 makes q 0. A
// scale whose exponential would need a factor that float cannot hold, or divide by, is multiplied
// with the scores.
inline float scale_size(const FlashUnit& u) {
  return u.scale > 0.0f ? u.scale : u.scale < 0.0f ? -u.scale : 1.0f;
}
constexpr float kLeastFactor = 1e-36f, kMostFactor = 3e38f;  // -127 / 1e-36 is a float still

inline bool has_score_program(const FlashUnit& u) {
  return u.flex != nullptr && u.flex->params->score.count > 0;
}

inline bool is_modified(const FlashUnit& u) {
  float factor = kLog2e * scale_size(u);
  return u.softcap != 0.0f || u.has_alibi || u.rows[0].bias != nullptr || has_score_program(u) ||
         factor < kLeastFactor || factor > kMostFactor;
}

template <int kN, bool kNarrow>
void load_queries(const FlashUnit& u, Block<kN>& block, float* buffer) {
  constexpr int kRows = kN * kWidth;
  int dim = u.head_dim;
  for (int r = 0; r < (kNarrow ? block.num_rows : kRows); r += kNarrow ? 1 : 4) {
    float* loaded = kNarrow ? block.q + r * dim : buffer;
    for (int i = 0; i < (kNarrow ? 1 : 4); ++i) {
      float* to = loaded + i * dim;
      if (r + i < block.num_rows) {
        load_row(block.rows[r + i].q, dim, u.dtype, to);
        if (is_code(u.dtype)) scale_row(block.rows[r + i].q_scale, dim, to);
        if (u.scale <= 0.0f) {
          for (int d = 0; d < dim; ++d) to[d] *= u.scale < 0.0f ? -1.0f : 0.0f;
        }
      } else {  // a lane without a row computes something finite that nobody reads
        for (int d = 0; d < dim; ++d) to[d] = 0.0f;
      }
    }
    if (!kNarrow) transpose<false>(buffer, dim, 4, dim, block.q + r, kRows);
  }
}

template <int kN>
void init_block(Block<kN>& block) {
  block.first_key = block.until_key = __INT32_MAX__;
  block.last_key = block.common_key = 0;
  for (int i = 0; i < kN; ++i) {
    block.max[i] = splat(-kInfinity);
    block.sum[i] = block.slope[i] = Vec{};
    block.begin[i] = block.diagonal[i] = IntVec{};
    block.dropout_row[i] = block.dropout_head[i] = UintVec{};
    block.end[i] = IntVec{} + __INT32_MAX__;
  }
  for (int r = 0; r < block.num_rows; ++r) {
    int i = r / kWidth, lane = r % kWidth;
    const FlashRow& row = block.rows[r];
    block.slope[i][lane] = row.slope;
    block.diagonal[i][lane] = row.diagonal;
    block.begin[i][lane] = row.visible.begin;
    block.end[i][lane] = row.visible.end;
    block.dropout_row[i][lane] = row.dropout_row;
    block.dropout_head[i][lane] = row.dropout_head;
    block.common_key = max(block.common_key, row.visible.begin);
    block.until_key = min(block.until_key, row.visible.end);
    if (row.visible.begin < row.visible.end) {
      block.first_key = min(block.first_key, row.visible.begin);
      block.last_key = max(block.last_key, row.visible.end);
    }
  }
}

// The same for a narrow block: lane r of s[j] is set for its rows r only.
void dot_keys_narrow(const float* q, int num_rows, const float* k, int64_t stride, int count,
                     int head_dim, Vec* s) {
  float* scores = reinterpret_cast<float*>(s);
  for (int j = 0; j < count; j += 4) {
    const float* key[4];
    for (int i = 0; i < 4; ++i) key[i] = k + min(j + i, count - 1) * stride;
    for (int r = 0; r < num_rows; ++r) {
      const float* row = q + r * head_dim;
      Vec acc[4] = {};
      int d = 0;
      for (; d + kWidth <= head_dim; d += kWidth) {
        Vec x = load(row + d);
        for (int i = 0; i < 4; ++i) acc[i] += x * load(key[i] + d);
      }
      Float4 sums[4];  // lanes d mod 4
      for (int i = 0; i < 4; ++i) {
        const Float4* quarter = reinterpret_cast<const Float4*>(&acc[i]);
        sums[i] = quarter[0];
        for (int x = 1; x < kWidth / 4; ++x) sums[i] += quarter[x];
      }
      for (; d < head_dim; d += 4) {
        for (int i = 0; i < 4; ++i) {
          sums[i] += *reinterpret_cast<const Float4*>(row + d) *
                     *reinterpret_cast<const Float4*>(key[i] + d);
        }
      }
      transpose4(sums);
      Float4 total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      for (int i = 0; i < 4; ++i) scores[(j + i) * kWidth + r] = total[i];
    }
  }
}

// kCount vectors of type V of one narrow row: o = o * alpha + sum_j p[j] v_j; p is strided by
// kWidth.
template <class V, int kCount>
void add_columns(const float* p, const float* v, int64_t stride, int count, float alpha, float* o) {
  constexpr int kLanes = sizeof(V) / sizeof(float);
  V acc[kCount] = {};
  for (int j = 0; j < count; ++j, v += stride) {
    float weight = p[j * kWidth];
    if (weight == 0.0f && __builtin_signbit(weight)) continue;  // not seen
    for (int c = 0; c < kCount; ++c) acc[c] += *reinterpret_cast<const V*>(v + c * kLanes) * weight;
  }
  for (int c = 0; c < kCount; ++c) {
    V& sum = *reinterpret_cast<V*>(o + c * kLanes);
    sum = sum * alpha + acc[c];
  }
}

void add_values_narrow(const Vec* p, int num_rows, const float* v, int64_t stride, int count,
                       int head_dim_v, const Vec* alpha, float* o) {
  for (int r = 0; r < num_rows; ++r) {
    const float* weights = reinterpret_cast<const float*>(p) + r;
    float* row = o + r * head_dim_v;
    float factor = (*alpha)[r];
    int c = 0;
    for (; c + 4 * kWidth <= head_dim_v; c += 4 * kWidth) {
      add_columns<LooseVec, 4>(weights, v + c, stride, count, factor, row + c);
    }
    for (; c + kWidth <= head_dim_v; c += kWidth) {
      add_columns<LooseVec, 1>(weights, v + c, stride, count, factor, row + c);
    }
    for (; c < head_dim_v; c += 4) {
      add_columns<Float4, 1>(weights, v + c, stride, count, factor, row + c);
    }
  }
}

// 2. Scores: scale, softcap, what a user wrote, ALiBi, bias, mask

template <int kN>
void run_flex(const FlashUnit& u, const FlexProgram& program, bool is_mask, const Block<kN>& block,
              int first, int count, Vec* s) {
  const FlexUnit& flex = *u.flex;
  for (int c = 0; c < kN; ++c) {
    FlexPlace at{block.diagonal[c] - (flex.kv_len - flex.q_len),
                 reinterpret_cast<const IntVec&>(block.dropout_head[c]) - flex.first_head,
                 first,
                 flex.b,
                 flex.q_len,
                 flex.kv_len,
                 {}};
    run_program(*flex.params, program, is_mask, at, count, kN, s + c);
  }
}

template <int kN>
void modify_scores(const FlashUnit& u, const Block<kN>& block, int first, int count, Vec* s,
                   float* buffer) {
  float scale = scale_size(u);
  if (u.softcap != 0.0f) {
    float ratio = scale / u.softcap;  // no infinity, which times 0 is NaN: tanh is at 1 long before
    ratio = ratio < kMostFactor ? ratio : kMostFactor;
    for (int x = 0; x < count * kN; ++x) s[x] = u.softcap * tanh(s[x] * ratio);
  } else {
    for (int x = 0; x < count * kN; ++x) s[x] *= scale;
  }
  if (has_score_program(u)) run_flex(u, u.flex->params->score, false, block, first, count, s);
  if (u.has_alibi) {
    for (int j = 0; j < count; ++j) {
      for (int c = 0; c < kN; ++c) {
        IntVec distance = block.diagonal[c] - (first + j);
        distance = distance < 0 ? -distance : distance;
        s[j * kN + c] -= block.slope[c] * __builtin_convertvector(distance, Vec);
      }
    }
  }
  if (block.rows[0].bias != nullptr) {
    add_bias<kN>(u, block, first, count, reinterpret_cast<float*>(s), buffer);
  }
}

template <int kN>
void mask_scores(const Block<kN>& block, int first, int count, Vec* s) {
  for (int j = 0; j < count; ++j) {
    int key = first + j;
    for (int c = 0; c < kN; ++c) {
      IntVec seen = (block.begin[c] <= key) & (block.end[c] > key);
      s[j * kN + c] = seen ? s[j * kN + c] : splat(-kInfinity);
    }
  }
}

// 3. Online softmax: scores become weights 2^(factor (score - max)); alpha rescales what was summed
// under the older maximum. With kMasked a key that a row does not see gets the weight -0, which a
// weight that merely underflowed never has.
template <int kN, bool kMasked>
void weigh(Block<kN>& block, float factor, int count, Vec* s, Vec* alpha) {
  Vec high[kN], base[kN], sum[kN];
  for (int c = 0; c < kN; ++c) high[c] = block.max[c];
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < kN; ++c) high[c] = max(s[j * kN + c], high[c]);
  }
  for (int c = 0; c < kN; ++c) {
    // No key so far: -inf - 0 has the weight 0, -inf - -inf would be NaN.
    base[c] = high[c] == -kInfinity ? Vec{} : high[c];
    alpha[c] = exp2_negative(block.max[c] - base[c], factor);
    sum[c] = Vec{};
    block.max[c] = high[c];
  }
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < kN; ++c) {
      Vec score = s[j * kN + c];
      Vec weight = exp2_negative(score - base[c], factor);
      if (kMasked) weight = score == -kInfinity ? splat(-0.0f) : weight;
      sum[c] += weight;
      s[j * kN + c] = weight;
    }
  }
  for (int c = 0; c < kN; ++c) block.sum[c] = block.sum[c] * alpha[c] + sum[c];
}

// Dropout after the sums: it changes the weights of values, not the softmax. The weight -0 stays.
template <int kN>
void drop_weights(const FlashUnit& u, const Block<kN>& block, int first, int count, Vec* s,
                  float* buffer) {
  constexpr int kStep = kBuffer / (kN * kWidth);
  Vec* z = reinterpret_cast<Vec*>(buffer);
  for (int j = 0; j < count; j += kStep) {
    int n = min(kStep, count - j);
    draw_dropout<kN>(u.dropout, block.dropout_row, block.dropout_head, first + j, n, z);
    for (int x = 0; x < n * kN; ++x) s[j * kN + x] *= z[x];
  }
}

// 4. Epilogue: the sink joins the denominator; out and lse are written

template <int kN>
void finish_row(const FlashUnit& u, const Block<kN>& block, int r, float* o) {
  const FlashRow& row = block.rows[r];
  float high = block.max[r / kWidth][r % kWidth], sum = block.sum[r / kWidth][r % kWidth];
  if (!is_modified(u)) high *= scale_size(u);
  if (row.max != nullptr) *row.max = high;
  float factor = 1.0f;
  if (row.sink != -kInfinity) {
    float top = row.sink > high ? row.sink : high;
    factor = __builtin_expf(high - top);
    sum = sum * factor + __builtin_expf(row.sink - top);
    high = top;
  }
  bool empty = sum == 0.0f;
  factor /= sum;
  for (int c = 0; c < u.head_dim_v; ++c) o[c] = empty ? 0.0f : o[c] * factor;
  store_row(o, u.head_dim_v, u.out_dtype, row.out);
  if (row.lse != nullptr) *row.lse = empty ? -kInfinity : high + __builtin_logf(sum);
}

template <int kN, bool kNarrow>
void finish_block(const FlashUnit& u, const Block<kN>& block, float* buffer) {
  int dim = u.head_dim_v;
  for (int r = 0; r < block.num_rows; ++r) {
    if (kNarrow) {
      finish_row(u, block, r, block.o + r * dim);
    } else {
      if (r % 4 == 0) transpose<false>(block.o + r, kN * kWidth, dim, 4, buffer, dim);
      finish_row(u, block, r, buffer + r % 4 * dim);
    }
  }
}

// Four rows of the largest head, or of a tile's bias.
size_t buffer_floats(int head_dim, int head_dim_v) {
  int rows = 4 * max(head_dim, head_dim_v);
  return static_cast<size_t>(rows > kBuffer ? rows : kBuffer);
}

// 5. The unit: tiles of keys outside, blocks of rows inside, so that a tile is converted once for
// all its rows

template <int kN, bool kNarrow>
void attend_tile(const FlashUnit& u, Block<kN>& block, KeyTile k, KeyTile v, int first, int count,
                 bool asks_mask, int& v_finite, Vec* s, float* buffer) {
  int from = max(first, block.first_key), until = min(first + count, block.last_key);
  int n = until - from;
  if (n <= 0) return;
  const float* keys = k.data + (from - first) * k.stride;
  const float* values = v.data + (from - first) * v.stride;
  if (kNarrow) {
    dot_keys_narrow(block.q, block.num_rows, keys, k.stride, n, u.head_dim, s);
  } else {
    dot_keys<kN>(block.q, keys, k.stride, n, u.head_dim, s);
  }
  bool may_hide = block.rows[0].bias != nullptr || has_score_program(u) || asks_mask;
  float factor = kLog2e;
  if (is_modified(u)) {
    modify_scores(u, block, from, n, s, buffer);
  } else {
    factor *= scale_size(u);
  }

  Vec alpha[kN];
  bool all_seen = from >= block.common_key && until <= block.until_key;
  if (!all_seen) mask_scores(block, from, n, s);
  if (asks_mask) run_flex(u, u.flex->params->mask, true, block, from, n, s);
  if (all_seen && !may_hide) {
    weigh<kN, false>(block, factor, n, s, alpha);
  } else {
    weigh<kN, true>(block, factor, n, s, alpha);
  }
  if (u.dropout.dropped > 0) drop_weights(u, block, from, n, s, buffer);
  if (kNarrow) {
    add_values_narrow(s, block.num_rows, values, v.stride, n, u.head_dim_v, alpha, block.o);
    return;
  }
  if (!all_seen || may_hide) {  // 0 * inf would reach rows that do not see the key
    if (v_finite < 0) v_finite = all_finite(v, count, u.head_dim_v);
    if (!v_finite) {
      add_values<kN, true>(s, values, v.stride, n, u.head_dim_v, alpha, block.o);
      return;
    }
  }
  add_values<kN, false>(s, values, v.stride, n, u.head_dim_v, alpha, block.o);
}

constexpr int kMaxBlocks = (kMaxUnitRows + kWidth * kVecs - 1) / (kWidth * kVecs);

template <int kN, bool kNarrow>
void run_blocks(const FlashUnit& u) {
  constexpr int kRows = kN * kWidth;
  // A narrow unit uses each key once: short tiles, converted ones still in the L1 cache, and no
  // copies.
  constexpr int kStep = kNarrow ? 32 : kTileKeys;
  constexpr int64_t kNear = kNarrow ? __INT64_MAX__ : 512;
  int num_blocks = (u.num_rows + kRows - 1) / kRows;
  float* next = u.scratch;
  auto take = [&next](int floats) {
    float* taken = next;
    next += (floats + 15) / 16 * 16;
    return taken;
  };
  Vec* s = reinterpret_cast<Vec*>(take(kTileKeys * kRows));
  float* buffer = take(static_cast<int>(buffer_floats(u.head_dim, u.head_dim_v)));
  Block<kN> blocks[kMaxBlocks];
  int begin = __INT32_MAX__, end = 0;
  for (int i = 0; i < num_blocks; ++i) {
    Block<kN>& block = blocks[i];
    block.rows = u.rows + i * kRows;
    block.num_rows = min(kRows, u.num_rows - i * kRows);
    block.q = take((kNarrow ? block.num_rows : kRows) * u.head_dim);
    block.o = take((kNarrow ? block.num_rows : kRows) * u.head_dim_v);
    init_block(block);
    load_queries<kN, kNarrow>(u, block, buffer);
    for (float* o = block.o; o < next; ++o) *o = 0.0f;
    begin = min(begin, block.first_key);
    end = max(end, block.last_key);
  }
  if (kNarrow) {
    for (int x = 0; x < kStep; ++x) s[x] = Vec{};  // lanes without a row stay finite
  }
  float* k_buffer = take(kTileKeys * u.head_dim);
  float* v_buffer = take(kTileKeys * u.head_dim_v);
  // Tiles begin at multiples of kStep, whatever this unit's rows see: the order of a row's sums,
  // and with it its bits, is then the same in whatever unit the row comes.
  // Note: no length is within 1024 of 2^31 (src/check/arrays.h), or `tile` would run over.
  for (int tile = begin - begin % kStep; tile < end; tile += kStep) {
    KeyTileState state = tile_state(u, tile);
    if (state == kTileHidden) continue;
    int first = max(tile, begin), count = min(tile + kStep, end) - first;
    bool has_codes = is_code(u.dtype);
    KeyTile k =
        has_codes ? load_float8_keys(u, first, count, k_buffer)
                  : load_tile(u.k, u.k_stride, first, count, u.head_dim, u.dtype, kNear, k_buffer);
    KeyTile v = has_codes ? load_float8_values(u, first, count, v_buffer, buffer)
                          : load_tile(u.v, u.v_stride, first, count, u.head_dim_v, u.dtype, kNear,
                                      v_buffer);
    int v_finite = -1;  // not looked at
    for (int i = 0; i < num_blocks; ++i) {
      attend_tile<kN, kNarrow>(u, blocks[i], k, v, first, count, state == kTileMasked, v_finite, s,
                               buffer);
    }
  }
  for (int i = 0; i < num_blocks; ++i) finish_block<kN, kNarrow>(u, blocks[i], buffer);
}

size_t scratch_floats(int32_t num_rows, int32_t head_dim, int32_t head_dim_v) {
  constexpr int kRows = kVecs * kWidth;
  size_t rows = static_cast<size_t>((num_rows + kRows - 1) / kRows) * kRows;
  size_t dims = static_cast<size_t>(head_dim) + static_cast<size_t>(head_dim_v);
  size_t padding = 16 * (2 * kMaxBlocks + 4);
  return kTileKeys * kRows + buffer_floats(head_dim, head_dim_v) + (rows + kTileKeys) * dims +
         padding;
}

void run(const FlashUnit& unit) {
  if (unit.sequence_rows <= kWidth / 2) {
    run_blocks<1, true>(unit);
  } else if (unit.num_rows <= kWidth) {  // the same sums as below
    run_blocks<1, false>(unit);
  } else {
    run_blocks<kVecs, false>(unit);
  }
}

}  // namespace

size_t matrix_floats(int32_t inner, int32_t outer);  // matrix.cpp
void multiply(const MatrixUnit& unit);
extern const FlashKernel kFlashKernel;
const FlashKernel kFlashKernel = {CUATTN_NAME(CUATTN_ISA), kVecs * kWidth, scratch_floats, run,
                                  matrix_floats,           multiply};

}  // namespace cuattn::cpu::CUATTN_ISA
