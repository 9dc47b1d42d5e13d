// SPDX-License-Identifier: Apache-2.0
// The gradients of one tile of keys and one block of rows, five products in all: S = Q K^T and dP =
// dO V^T, transposed so that a lane is a row (as in flash.cpp); dQ += dS K, of the same form; dV +=
// P^T dO and dK += dS^T Q, where a lane is a column. P comes from lse at once, so nothing is ever
// rescaled. Compiled as flash.cpp is, which says how and why there is no std here. Source:
// FlashAttention-2, arXiv:2307.08691, section 3.1.2. Next: backward_units.cpp.
#include "cpu/backward_flash.h"

#include "cpu/flex_vectors.h"
#include "cpu/tiles.h"

namespace cuattn::cpu::CUATTN_ISA {
namespace {

// 1. What lies in a unit's scratch

constexpr int kMaxRows = kVecs * kWidth;
static_assert(kBackwardKeys % kTileKeys == 0, "a tile is computed in whole steps");

inline int padded(int dim) { return (dim + kWidth - 1) / kWidth * kWidth; }

// Rows by rows [row][padded dim] and transposed [dim][lane].
struct Scratch {
  float *k, *v;             // [kBackwardKeys][dim], where the arrays cannot be read in place
  float *dk, *dv;           // [kBackwardKeys][padded dim]
  float *q_rows, *do_rows;  // [kMaxRows][padded dim]
  float *q, *dout, *dq;     // [dim][kMaxRows]
  Vec *s, *dp;              // [kTileKeys][vectors]: scores, then P Z; dP, then dS
  Vec *slope, *z;           // the same of the softcap's slope and dropout's factors
  Vec* capped;              // the same of the scores that a user's score program takes
  float* buffer;            // kBuffer
  float* k_is_finite;
  size_t floats;
};

Scratch scratch_of(float* base, int dim, int dim_v) {
  Scratch scratch{};
  auto take = [&](int count) {
    float* taken = base + scratch.floats;
    scratch.floats += static_cast<size_t>((count + 15) / 16 * 16);
    return taken;
  };
  scratch.k = take(kBackwardKeys * dim);
  scratch.v = take(kBackwardKeys * dim_v);
  scratch.dk = take(kBackwardKeys * padded(dim));
  scratch.dv = take(kBackwardKeys * padded(dim_v));
  scratch.q_rows = take(kMaxRows * padded(dim));
  scratch.do_rows = take(kMaxRows * padded(dim_v));
  scratch.q = take(kMaxRows * dim);
  scratch.dout = take(kMaxRows * dim_v);
  scratch.dq = take(kMaxRows * dim);
  auto take_vectors = [&] { return reinterpret_cast<Vec*>(take(kTileKeys * kMaxRows)); };
  scratch.s = take_vectors();
  scratch.dp = take_vectors();
  scratch.slope = take_vectors();
  scratch.z = take_vectors();
  scratch.capped = take_vectors();
  scratch.buffer = take(kBuffer);
  scratch.k_is_finite = take(1);
  return scratch;
}

size_t scratch_floats(int32_t head_dim, int32_t head_dim_v) {
  return scratch_of(nullptr, head_dim, head_dim_v).floats;
}

// Rows of float are read in place when no more than this many elements apart (see load_tile).
constexpr int64_t kNear = 512;

// 2. One block of rows

template <int kN>
struct Block {
  Vec lse[kN], delta[kN], slope[kN];
  IntVec begin[kN], end[kN], diagonal[kN];
  UintVec dropout_row[kN], dropout_head[kN];
  int32_t first_key, last_key;    // some row sees the keys in [first_key, last_key)
  int32_t common_key, until_key;  // every row sees the keys in [common_key, until_key)
  const BackwardRow* rows;
  int32_t num_rows;
};

template <int kN>
void init_block(Block<kN>& block, const BackwardRow* rows, int num_rows) {
  block.rows = rows;
  block.num_rows = num_rows;
  block.first_key = block.until_key = __INT32_MAX__;
  block.last_key = block.common_key = 0;
  for (int i = 0; i < kN; ++i) {  // a lane without a row sees nothing, and P is 0
    block.lse[i] = splat(kInfinity);
    block.delta[i] = block.slope[i] = Vec{};
    block.begin[i] = block.end[i] = block.diagonal[i] = IntVec{};
    block.dropout_row[i] = block.dropout_head[i] = UintVec{};
  }
  for (int r = 0; r < num_rows; ++r) {
    int i = r / kWidth, lane = r % kWidth;
    const BackwardRow& row = rows[r];
    block.lse[i][lane] = row.lse;
    block.delta[i][lane] = row.delta;
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

// Rows to float as they are, and transposed; false where one is not finite.
template <int kN>
bool load_rows(const Block<kN>& block, const void* BackwardRow::* source, int dim, DType dtype,
               float* by_rows, float* transposed) {
  constexpr int kRows = kN * kWidth;
  int stride = padded(dim);
  for (int r = 0; r < kRows; ++r) {
    float* to = by_rows + r * stride;
    int loaded = r < block.num_rows ? dim : 0;
    if (loaded > 0) load_row(block.rows[r].*source, dim, dtype, to);
    for (int d = loaded; d < stride; ++d) to[d] = 0.0f;
  }
  transpose<false>(by_rows, stride, kRows, dim, transposed, kRows);
  return all_finite({by_rows, stride}, block.num_rows, dim);
}

// 3. dV += P^T dO and dK += dS^T Q

// out[j][] += sum_r weights[j][r] rows[r][] for kCount keys and kC vectors of columns. With kSelect
// a row of weight 0 is not read.
template <int kN, int kCount, int kC, bool kSelect>
void add_row_columns(const float* weights, const float* rows, int stride, float* out) {
  constexpr int kRows = kN * kWidth;
  Vec acc[kCount][kC] = {};
  for (int r = 0; r < kRows; ++r) {
    Vec x[kC];
    for (int c = 0; c < kC; ++c)
      x[c] = *reinterpret_cast<const Vec*>(rows + r * stride + c * kWidth);
    for (int i = 0; i < kCount; ++i) {
      float weight = weights[i * kRows + r];
      if (kSelect && weight == 0.0f) continue;
      for (int c = 0; c < kC; ++c) acc[i][c] += x[c] * weight;
    }
  }
  for (int i = 0; i < kCount; ++i) {
    for (int c = 0; c < kC; ++c)
      *reinterpret_cast<Vec*>(out + i * stride + c * kWidth) += acc[i][c];
  }
}

template <int kN, int kCount, bool kSelect>
void add_rows_to_keys(const float* weights, const float* rows, int stride, float* out) {
  int c = 0;
  for (; c + kVecs * kWidth <= stride; c += kVecs * kWidth)
    add_row_columns<kN, kCount, kVecs, kSelect>(weights, rows + c, stride, out + c);
  for (; c < stride; c += kWidth)
    add_row_columns<kN, kCount, 1, kSelect>(weights, rows + c, stride, out + c);
}

template <int kN, bool kSelect>
void add_to_keys(const Vec* weights, const float* rows, int stride, int count, float* out) {
  const float* weight = reinterpret_cast<const float*>(weights);
  int j = 0;
  for (; j + kKeys <= count; j += kKeys) {
    add_rows_to_keys<kN, kKeys, kSelect>(weight + j * kN * kWidth, rows, stride, out + j * stride);
  }
  for (; j < count; ++j) {
    add_rows_to_keys<kN, 1, kSelect>(weight + j * kN * kWidth, rows, stride, out + j * stride);
  }
}

// 4. From scores to P Z and dS

// Calls body(place of the vector c of rows, c) for each.
template <int kN, class Body>
void each_place(const FlexUnit& flex, const Block<kN>& block, int first, Body&& body) {
  for (int c = 0; c < kN; ++c) {
    FlexPlace at{block.diagonal[c] - (flex.kv_len - flex.q_len),
                 reinterpret_cast<const IntVec&>(block.dropout_head[c]) - flex.first_head,
                 first,
                 flex.b,
                 flex.q_len,
                 flex.kv_len,
                 {}};
    body(at, c);
  }
}

inline bool has_score_program(const BackwardUnit& u) {
  return u.flex != nullptr && u.flex->params->score.count > 0;
}

template <int kN>
void modify_scores(const BackwardUnit& u, const Block<kN>& block, int first, int count,
                   const Scratch& scratch) {
  Vec* s = scratch.s;
  if (u.softcap != 0.0f) {
    constexpr float kMost = 3e38f;  // no infinity, which times 0 is NaN
    float ratio = u.scale / u.softcap;
    ratio = ratio > kMost ? kMost : ratio < -kMost ? -kMost : ratio;
    for (int x = 0; x < count * kN; ++x) {
      Vec t = tanh(s[x] * ratio);
      s[x] = u.softcap * t;
      scratch.slope[x] = 1.0f - t * t;
    }
  } else {
    for (int x = 0; x < count * kN; ++x) s[x] *= u.scale;
  }
  if (has_score_program(u)) {
    const FlexParams& flex = *u.flex->params;
    for (int x = 0; x < count * kN; ++x) scratch.capped[x] = s[x];
    each_place(*u.flex, block, first, [&](const FlexPlace& at, int c) {
      run_program(flex, flex.score, false, at, count, kN, s + c);
    });
  }
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
    add_bias<kN>(u, block, first, count, reinterpret_cast<float*>(s), scratch.buffer);
  }
}

// s: scores divided by `factor`, then P Z; dp: dO V^T, then dS, which is -0 where P is 0. A key
// that a row does not see has P 0, whatever its score.
template <int kN, bool kMasked, bool kDropout>
void differentiate(const Block<kN>& block, float factor, int first, int count, Vec* s, Vec* dp,
                   const Vec* z) {
  for (int j = 0; j < count; ++j) {
    int key = first + j;
    for (int c = 0; c < kN; ++c) {
      int x = j * kN + c;
      Vec exponent = s[x] * factor - block.lse[c];
      exponent = exponent > 0.0f ? Vec{} : exponent;  // lse is rounded; NaN stays
      Vec p = exp2_negative(exponent, kLog2e);
      if (kMasked) {
        IntVec seen = (block.begin[c] <= key) & (block.end[c] > key);
        p = seen ? p : Vec{};
      }
      Vec ds = p * ((kDropout ? dp[x] * z[x] : dp[x]) - block.delta[c]);
      s[x] = kDropout ? p * z[x] : p;
      dp[x] = p == 0.0f ? splat(-0.0f) : ds;
    }
  }
}

// The block's dS for `count` keys into dbias: stored, or added in float.
template <int kN>
void give_dbias(const BackwardUnit& u, const Block<kN>& block, int first, int count, const Vec* ds,
                float* buffer) {
  const float* values = reinterpret_cast<const float*>(ds);
  for (int r = 0; r < block.num_rows; ++r) {
    if (r % 4 == 0) {
      transpose<false>(values + r, kN * kWidth, (count + 3) / 4 * 4, 4, buffer, kTileKeys);
    }
    const float* row = buffer + r % 4 * kTileKeys;
    int64_t begin = first * u.dbias_stride;
    if (!u.adds_dbias && u.dbias_stride == 1 && count % 8 == 0) {
      char* to =
          static_cast<char*>(block.rows[r].dbias) + begin * (u.bias_dtype == DType::f32 ? 4 : 2);
      store_row(row, count, u.bias_dtype, to);
    } else if (!u.adds_dbias) {
      for (int j = 0; j < count; ++j) {
        store_element(block.rows[r].dbias, begin + j * u.dbias_stride, u.bias_dtype, row[j]);
      }
    } else {
      float* to = static_cast<float*>(block.rows[r].dbias) + begin;
      if (u.dbias_stride == 1) {
        for (int j = 0; j < count; ++j) to[j] += row[j];
      } else {
        float sum = 0.0f;  // stride 0: broadcast over keys
        for (int j = 0; j < count; ++j) sum += row[j];
        *to += sum;
      }
    }
  }
}

template <int kN>
void give_slope_sums(const Block<kN>& block, int first, int count, const Vec* ds) {
  Vec sums[kN] = {};
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < kN; ++c) {
      IntVec distance = block.diagonal[c] - (first + j);
      distance = distance < 0 ? -distance : distance;
      sums[c] += ds[j * kN + c] * __builtin_convertvector(distance, Vec);
    }
  }
  for (int r = 0; r < block.num_rows; ++r) *block.rows[r].slope_sum += sums[r / kWidth][r % kWidth];
}

// 5. The block against the tile

// Keys [first, first + count) of the tile.
template <int kN>
void add_step(const BackwardUnit& u, const Block<kN>& block, const Scratch& scratch, KeyTile k,
              KeyTile v, int first, int count, bool rows_are_finite) {
  int at = first - u.first_key;
  k.data += at * k.stride;
  v.data += at * v.stride;
  Vec *s = scratch.s, *dp = scratch.dp;
  dot_keys<kN>(scratch.q, k.data, k.stride, count, u.head_dim, s);
  dot_keys<kN>(scratch.dout, v.data, v.stride, count, u.head_dim_v, dp);
  const BackwardRow& row = block.rows[0];
  bool has_score = has_score_program(u);
  bool asks_mask = tile_state(u, first) == kTileMasked && u.flex->params->mask.count > 0;
  bool is_modified =
      u.softcap != 0.0f || u.has_alibi || row.bias != nullptr || has_score || asks_mask;
  if (is_modified) modify_scores(u, block, first, count, scratch);
  if (asks_mask) {
    const FlexParams& flex = *u.flex->params;
    each_place(*u.flex, block, first, [&](const FlexPlace& at, int c) {
      run_program(flex, flex.mask, true, at, count, kN, s + c);
    });
  }
  float factor = is_modified ? 1.0f : u.scale;
  bool all_seen = first >= block.common_key && first + count <= block.until_key &&
                  block.num_rows == kN * kWidth;
  bool drops = u.dropout.dropped > 0;
  if (drops) {
    draw_dropout<kN>(u.dropout, block.dropout_row, block.dropout_head, first, count, scratch.z);
    differentiate<kN, true, true>(block, factor, first, count, s, dp, scratch.z);
  } else if (all_seen) {
    differentiate<kN, false, false>(block, factor, first, count, s, dp, nullptr);
  } else {
    differentiate<kN, true, false>(block, factor, first, count, s, dp, nullptr);
  }

  // 0 * inf would reach what has no part in the row or key.
  bool selects = !all_seen || row.bias != nullptr || drops || has_score || asks_mask;
  int stride = padded(u.head_dim_v);
  if (u.dv != nullptr && selects && !rows_are_finite) {
    add_to_keys<kN, true>(s, scratch.do_rows, stride, count, scratch.dv + at * stride);
  } else if (u.dv != nullptr) {
    add_to_keys<kN, false>(s, scratch.do_rows, stride, count, scratch.dv + at * stride);
  }
  if (row.dbias != nullptr) give_dbias(u, block, first, count, dp, scratch.buffer);
  if (row.slope_sum != nullptr) give_slope_sums(block, first, count, dp);
  if (u.gradient != nullptr) {
    each_place(*u.flex, block, first, [&](FlexPlace at, int c) {
      run_gradient(*u.flex->params, *u.gradient, u.array_sums, at, count, kN, scratch.capped + c,
                   dp + c);
    });
  }
  if (u.softcap != 0.0f) {
    for (int x = 0; x < count * kN; ++x)
      dp[x] = dp[x] == 0.0f ? splat(-0.0f) : dp[x] * scratch.slope[x];
  }
  if (row.dq != nullptr) {
    Vec one[kN];
    for (int c = 0; c < kN; ++c) one[c] = splat(1.0f);
    if (selects && *scratch.k_is_finite == 0.0f) {
      add_values<kN, true>(dp, k.data, k.stride, count, u.head_dim, one, scratch.dq);
    } else {
      add_values<kN, false>(dp, k.data, k.stride, count, u.head_dim, one, scratch.dq);
    }
  }
  stride = padded(u.head_dim);
  if (u.dk != nullptr && selects && !rows_are_finite) {
    add_to_keys<kN, true>(dp, scratch.q_rows, stride, count, scratch.dk + at * stride);
  } else if (u.dk != nullptr) {
    add_to_keys<kN, false>(dp, scratch.q_rows, stride, count, scratch.dk + at * stride);
  }
}

template <int kN>
void add_block(const BackwardUnit& u, const BackwardRow* rows, int num_rows) {
  constexpr int kRows = kN * kWidth;
  Block<kN> block;
  init_block(block, rows, num_rows);
  int from = max(u.first_key, block.first_key);
  int until = min(u.first_key + u.num_keys, block.last_key);
  if (from >= until) return;
  Scratch scratch = scratch_of(u.scratch, u.head_dim, u.head_dim_v);
  bool finite = load_rows(block, &BackwardRow::q, u.head_dim, u.dtype, scratch.q_rows, scratch.q);
  finite &=
      load_rows(block, &BackwardRow::dout, u.head_dim_v, u.dtype, scratch.do_rows, scratch.dout);
  for (int x = 0; x < u.head_dim * kRows; ++x) scratch.dq[x] = 0.0f;
  // As begin_keys left them.
  KeyTile k = load_tile(u.k, u.k_stride, u.first_key, 0, u.head_dim, u.dtype, kNear, scratch.k);
  KeyTile v = load_tile(u.v, u.v_stride, u.first_key, 0, u.head_dim_v, u.dtype, kNear, scratch.v);
  int count = 0;
  for (int first = from; first < until; first += count) {
    count = min(u.flex == nullptr ? kTileKeys : kTileKeys - first % kTileKeys, until - first);
    if (tile_state(u, first) == kTileHidden) continue;
    add_step(u, block, scratch, k, v, first, count, finite);
  }
  if (rows[0].dq == nullptr) return;
  for (int r = 0; r < num_rows; ++r) {
    if (r % 4 == 0) {
      transpose<false>(scratch.dq + r, kRows, u.head_dim, 4, scratch.buffer, u.head_dim);
    }
    const float* from_row = scratch.buffer + r % 4 * u.head_dim;
    for (int d = 0; d < u.head_dim; ++d) rows[r].dq[d] += u.scale * from_row[d];
  }
}

// 6. The kernel

void begin_keys(const BackwardUnit& u) {
  Scratch scratch = scratch_of(u.scratch, u.head_dim, u.head_dim_v);
  KeyTile k =
      load_tile(u.k, u.k_stride, u.first_key, u.num_keys, u.head_dim, u.dtype, kNear, scratch.k);
  load_tile(u.v, u.v_stride, u.first_key, u.num_keys, u.head_dim_v, u.dtype, kNear, scratch.v);
  *scratch.k_is_finite = all_finite(k, u.num_keys, u.head_dim) ? 1.0f : 0.0f;
  for (int x = 0; x < u.num_keys * padded(u.head_dim); ++x) scratch.dk[x] = 0.0f;
  for (int x = 0; x < u.num_keys * padded(u.head_dim_v); ++x) scratch.dv[x] = 0.0f;
}

void add_rows(const BackwardUnit& u, const BackwardRow* rows, int32_t num_rows) {
  if (num_rows <= kWidth) {
    add_block<1>(u, rows, num_rows);
  } else {
    add_block<kVecs>(u, rows, num_rows);
  }
}

// Stores `scale` times the tile's rows.
void store_keys(const BackwardUnit& u, float* rows, int dim, float scale, void* to, int64_t stride,
                DType dtype) {
  int64_t bytes = dtype == DType::f32 ? 4 : 2;
  for (int j = 0; j < u.num_keys; ++j) {
    float* row = rows + j * padded(dim);
    for (int d = 0; d < dim; ++d) row[d] *= scale;
    store_row(row, dim, dtype, static_cast<char*>(to) + (u.first_key + j) * stride * bytes);
  }
}

void end_keys(const BackwardUnit& u) {
  Scratch scratch = scratch_of(u.scratch, u.head_dim, u.head_dim_v);
  if (u.dk != nullptr) {
    store_keys(u, scratch.dk, u.head_dim, u.scale, u.dk, u.dk_stride, u.dk_dtype);
  }
  if (u.dv != nullptr) {
    store_keys(u, scratch.dv, u.head_dim_v, 1.0f, u.dv, u.dv_stride, u.dv_dtype);
  }
}

float dot(const void* a, const void* b, int32_t dim, DType dtype) {
  alignas(64) float x[256], y[256];
  load_row(a, dim, dtype, x);
  load_row(b, dim, dtype, y);
  Float8 sum{};
  for (int d = 0; d < dim; d += 8) {
    sum += *reinterpret_cast<const Float8*>(x + d) * *reinterpret_cast<const Float8*>(y + d);
  }
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

void store(const float* in, int32_t count, DType dtype, void* out) {
  store_row(in, count, dtype, out);
}

}  // namespace

extern const BackwardKernel kBackwardKernel;
const BackwardKernel kBackwardKernel = {
    CUATTN_NAME(CUATTN_ISA), kMaxRows, scratch_floats, begin_keys, add_rows, end_keys, dot, store};

}  // namespace cuattn::cpu::CUATTN_ISA
