// SPDX-License-Identifier: Apache-2.0
// Kernel cpu: flash attention for one unit (rows that read the same keys), transposed so that a vector holds one key's
// scores for several rows: maxima, sums and masks need no horizontal step, and neither K nor V is ever transposed.
// Source: FlashAttention-2, arXiv:2307.08691, section 3.1; online softmax, arXiv:1805.02867. Next: flash_units.cpp.
//
// Compiled once per instruction set, into cuattn::cpu::CUATTN_ISA::kFlashKernel, always with
//   -O3 -fno-exceptions -fno-math-errno -ffp-contract=fast -Wno-psabi, and
//   -DCUATTN_ISA=baseline
//   -DCUATTN_ISA=avx2    -mavx2 -mfma -mf16c                                      (x86-64 only)
//   -DCUATTN_ISA=avx512  -march=x86-64-v4 -mprefer-vector-width=512               (x86-64 only)
// Note: everything is in an anonymous namespace and no std template is used. A weak function compiled here with AVX-512
// could become the copy that the linker keeps for the whole library, and an older CPU would stop at it.
#include "cpu/flash.h"

#include "cpu/convert.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace cuattn::cpu::CUATTN_ISA {
namespace {

// 1. Types and sizes

#define CUATTN_STRING(x) #x
#define CUATTN_NAME(x) CUATTN_STRING(x)

// kKeys x kVecs accumulators: enough to hide the latency of two multiply-adds a cycle, few enough for the registers.
#if defined(__AVX512F__)
constexpr int kWidth = 16, kKeys = 8, kVecs = 2;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kKeys = 4, kVecs = 3;
#else
constexpr int kWidth = 4, kKeys = 4, kVecs = 2;
#endif
constexpr int kTileKeys = 128;  // scores of a row block, 16 KB with AVX-512, stay in the L1 cache
static_assert(kTileKeys % kKeys == 0, "the last group of keys of a tile is stored whole");
static_assert(8 % kKeys == 0, "head dims are multiples of 8");

using Vec = float __attribute__((vector_size(kWidth * sizeof(float)), may_alias));
using IntVec = int32_t __attribute__((vector_size(kWidth * sizeof(float)), may_alias));

constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.69314718055994531f;
constexpr float kInfinity = __builtin_inff();
constexpr float kMaxFloat = __FLT_MAX__;

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline Vec splat(float x) { return Vec{} + x; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where a is NaN

// 2^x for x <= 0, to 8e-8 relative; 0 from x <= -127, exactly 1 at 0, NaN for NaN.
inline Vec exp2_negative(Vec x) {
  constexpr float kShift = 12582912.0f + 127.0f;  // 1.5 * 2^23: the sum's low bits hold round(x) + 127
  x = x < -127.0f ? splat(-127.0f) : x;
  Vec shifted = x + kShift;
  Vec f = x - (shifted - kShift);  // within [-0.5, 0.5]
  Vec power = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(shifted) << 23);
  Vec p = splat(1.5345812e-4f);  // minimax in the relative error, fitted to 2^f with the constant term held at 1
  p = p * f + 1.3399931e-3f;
  p = p * f + 9.6184891e-3f;
  p = p * f + 5.5503286e-2f;
  p = p * f + 2.4022646e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  return p * power;
}

inline Vec tanh(Vec x) {
  Vec a = x < 0.0f ? -x : x;
  Vec e = exp2_negative(a * (-2.0f * kLog2e));
  Vec large = (1.0f - e) / (1.0f + e);
  Vec z = x * x;
  Vec p = splat(-6.0968976e-3f);  // minimax for (tanh(x) / x - 1) / x^2 on |x| <= 0.625, where `large` would cancel
  p = p * z + 2.0997329e-2f;
  p = p * z - 5.3850949e-2f;
  p = p * z + 1.3332771e-1f;
  p = p * z - 3.3333328e-1f;
  Vec small = x + x * z * p;
  return a < 0.625f ? small : (x < 0.0f ? -large : large);
}

// 2. Conversion of rows, eight elements at a time

using Float8 = float __attribute__((vector_size(32), may_alias, aligned(4)));
using Uint8x32 = uint32_t __attribute__((vector_size(32), may_alias, aligned(4)));
using Uint8x16 = uint16_t __attribute__((vector_size(16), may_alias, aligned(2)));

inline Float8 widen(const uint16_t* in, DType dtype) {
  Uint8x16 raw = *reinterpret_cast<const Uint8x16*>(in);
  Uint8x32 bits = __builtin_convertvector(raw, Uint8x32);
  if (dtype == DType::bf16) return reinterpret_cast<Float8>(bits << 16);
#if defined(__F16C__)
  return reinterpret_cast<Float8>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(raw)));
#else
  Uint8x32 sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
  // Moving the exponent by a multiplication also makes the subnormal numbers right.
  Float8 value = reinterpret_cast<Float8>(rest) * 0x1p112f;
  Uint8x32 finite = reinterpret_cast<Uint8x32>(value);
  return reinterpret_cast<Float8>(sign | (rest >= 0x0f800000u ? rest | 0x7f800000u : finite));
#endif
}

inline void narrow(Float8 value, uint16_t* out, DType dtype) {
#if defined(__F16C__)
  if (dtype == DType::f16) {
    *reinterpret_cast<Uint8x16*>(out) =
        reinterpret_cast<Uint8x16>(_mm256_cvtps_ph(reinterpret_cast<__m256>(value), 0));  // 0: nearest even
    return;
  }
#endif
  for (int i = 0; i < 8; ++i) store_element(out, i, dtype, value[i]);
}

// `count` elements, a multiple of 8, to float.
inline void load_row(const void* in, int count, DType dtype, float* out) {
  if (dtype == DType::f32) {
    __builtin_memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const uint16_t* raw = static_cast<const uint16_t*>(in);
  for (int i = 0; i < count; i += 8) *reinterpret_cast<Float8*>(out + i) = widen(raw + i, dtype);
}

inline void store_row(const float* in, int count, DType dtype, void* out) {
  if (dtype == DType::f32) {
    __builtin_memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t* raw = static_cast<uint16_t*>(out);
  for (int i = 0; i < count; i += 8) narrow(*reinterpret_cast<const Float8*>(in + i), raw + i, dtype);
}

// Keys [first, first + count) of K or V as float rows. Rows of float that lie close together are read in place; others
// are copied, because rows a power of two apart would share a few sets of the cache.
struct KeyTile {
  const float* data;
  int64_t stride;
};

KeyTile load_tile(const void* base, int64_t stride, int first, int count, int dim, DType dtype, float* buffer) {
  constexpr int64_t kNear = 512;  // elements
  if (dtype == DType::f32) {
    const float* start = static_cast<const float*>(base) + first * stride;
    if (stride <= kNear) return {start, stride};
    for (int j = 0; j < count; ++j) load_row(start + j * stride, dim, dtype, buffer + j * dim);
  } else {
    const uint16_t* start = static_cast<const uint16_t*>(base) + first * stride;
    for (int j = 0; j < count; ++j) load_row(start + j * stride, dim, dtype, buffer + j * dim);
  }
  return {buffer, dim};
}

// Whether every element of the tile is finite: x - x is then 0.
bool all_finite(const KeyTile& tile, int count, int dim) {
  bool finite = true;
  for (int j = 0; j < count; ++j) {
    const float* row = tile.data + j * tile.stride;
    int bad = 0;
    for (int c = 0; c < dim; ++c) bad |= row[c] - row[c] != 0.0f;
    finite &= bad == 0;
  }
  return finite;
}

// 3. One block of rows: kN vectors, a row per lane

template <int kN>
struct Block {
  Vec max[kN], sum[kN];  // of the scores so far, base 2; sum of 2^(score - max)
  Vec slope[kN];         // base 2
  IntVec begin[kN], end[kN], diagonal[kN];
  int32_t first_key, last_key;    // some row sees the keys in [first_key, last_key)
  int32_t common_key, until_key;  // every row sees the keys in [common_key, until_key)
  const FlashRow* rows;
  int32_t num_rows;
  Vec* q;  // [head_dim][kN], scaled
  Vec* o;  // [head_dim_v][kN], not yet divided by sum
};

template <int kN>
void init_block(const FlashUnit& u, Block<kN>& block, float* row_buffer) {
  constexpr int kRows = kN * kWidth;
  // Without softcap scores are kept in base 2; with it, q carries scale / softcap, the argument of tanh.
  float scale = u.softcap == 0.0f ? u.scale * kLog2e : u.scale / u.softcap;
  block.first_key = block.until_key = __INT32_MAX__;
  block.last_key = block.common_key = 0;
  float* q = reinterpret_cast<float*>(block.q);
  for (int r = 0; r < kRows; ++r) {
    int i = r / kWidth, lane = r % kWidth;
    if (r >= block.num_rows) {  // lanes without a row compute something finite that nobody reads
      for (int d = 0; d < u.head_dim; ++d) q[d * kRows + r] = 0.0f;
      block.slope[i][lane] = 0.0f;
      block.begin[i][lane] = block.diagonal[i][lane] = 0;
      block.end[i][lane] = __INT32_MAX__;
      continue;
    }
    const FlashRow& row = block.rows[r];
    load_row(row.q, u.head_dim, u.dtype, row_buffer);
    for (int d = 0; d < u.head_dim; ++d) q[d * kRows + r] = row_buffer[d] * scale;
    block.slope[i][lane] = row.slope * kLog2e;
    block.diagonal[i][lane] = row.diagonal;
    block.begin[i][lane] = row.visible.begin;
    block.end[i][lane] = row.visible.end;
    block.common_key = max(block.common_key, row.visible.begin);
    block.until_key = min(block.until_key, row.visible.end);
    if (row.visible.begin < row.visible.end) {
      block.first_key = min(block.first_key, row.visible.begin);
      block.last_key = max(block.last_key, row.visible.end);
    }
  }
  for (int i = 0; i < kN; ++i) {
    block.max[i] = splat(-kInfinity);
    block.sum[i] = Vec{};
  }
  for (int c = 0; c < u.head_dim_v * kN; ++c) block.o[c] = Vec{};
}

// s[j][] = dot(k_j, q) for `count` keys; s is written up to the next multiple of kKeys.
template <int kN>
void dot_keys(const Vec* q, const float* k, int64_t stride, int count, int head_dim, Vec* s) {
  for (int j = 0; j < count; j += kKeys) {
    const float* key[kKeys];
    for (int i = 0; i < kKeys; ++i) key[i] = k + min(j + i, count - 1) * stride;
    Vec acc[kKeys][kN] = {};
    for (int d = 0; d < head_dim; ++d) {
      Vec x[kN];
      for (int c = 0; c < kN; ++c) x[c] = q[d * kN + c];
      for (int i = 0; i < kKeys; ++i) {
        for (int c = 0; c < kN; ++c) acc[i][c] += x[c] * key[i][d];
      }
    }
    for (int i = 0; i < kKeys; ++i) {
      for (int c = 0; c < kN; ++c) s[(j + i) * kN + c] = acc[i][c];
    }
  }
}

// o[c][] = o[c][] * alpha + sum_j p[j][] v_j[c]. With kSelect a weight of -0 leaves the value unread (see weigh).
template <int kN, bool kSelect>
void add_values(const Vec* p, const float* v, int64_t stride, int count, int head_dim_v, const Vec* alpha, Vec* o) {
  for (int c0 = 0; c0 < head_dim_v; c0 += kKeys) {
    Vec acc[kKeys][kN];
    for (int i = 0; i < kKeys; ++i) {
      for (int c = 0; c < kN; ++c) acc[i][c] = o[(c0 + i) * kN + c] * alpha[c];
    }
    const float* value = v + c0;
    for (int j = 0; j < count; ++j, value += stride) {
      Vec x[kN];
      for (int c = 0; c < kN; ++c) x[c] = p[j * kN + c];
      for (int i = 0; i < kKeys; ++i) {
        for (int c = 0; c < kN; ++c) {
          Vec term = x[c] * value[i];
          if (kSelect) term = reinterpret_cast<IntVec>(x[c]) == INT32_MIN ? Vec{} : term;
          acc[i][c] += term;
        }
      }
    }
    for (int i = 0; i < kKeys; ++i) {
      for (int c = 0; c < kN; ++c) o[(c0 + i) * kN + c] = acc[i][c];
    }
  }
}

// 4. Scores: softcap, ALiBi, bias, mask; from here in base 2

template <DType kType>
float bias_value(const void* bias, int64_t index) {
  if (kType == DType::boolean) return static_cast<const uint8_t*>(bias)[index] != 0 ? 0.0f : -kInfinity;
  float value = load_element(bias, index, kType);
  float scaled = value * kLog2e;
  // The lowest finite number is a customary mask; it must not become -inf, which would empty a row of such keys.
  return scaled == -kInfinity && value != -kInfinity ? -kMaxFloat : scaled;
}

template <DType kType, int kN>
void add_bias(const FlashUnit& u, const Block<kN>& block, int first, int count, float* s) {
  for (int r = 0; r < block.num_rows; ++r) {
    for (int j = 0; j < count; ++j) {
      s[j * kN * kWidth + r] += bias_value<kType>(block.rows[r].bias, (first + j) * u.bias_stride);
    }
  }
}

template <int kN>
void modify_scores(const FlashUnit& u, const Block<kN>& block, int first, int count, Vec* s) {
  if (u.softcap != 0.0f) {
    float cap = u.softcap * kLog2e;
    for (int x = 0; x < count * kN; ++x) s[x] = cap * tanh(s[x]);
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
    float* scores = reinterpret_cast<float*>(s);
    switch (u.bias_dtype) {
      case DType::boolean: add_bias<DType::boolean>(u, block, first, count, scores); break;
      case DType::f16: add_bias<DType::f16>(u, block, first, count, scores); break;
      case DType::bf16: add_bias<DType::bf16>(u, block, first, count, scores); break;
      default: add_bias<DType::f32>(u, block, first, count, scores);
    }
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

// 5. Online softmax: scores become weights 2^(score - max); alpha rescales what was summed under the older maximum.
// With kMasked a key that a row does not see gets the weight -0, which a weight that merely underflowed never has.
template <int kN, bool kMasked>
void weigh(Block<kN>& block, int count, Vec* s, Vec* alpha) {
  Vec high[kN], base[kN], sum[kN];
  for (int c = 0; c < kN; ++c) high[c] = block.max[c];
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < kN; ++c) high[c] = max(s[j * kN + c], high[c]);
  }
  for (int c = 0; c < kN; ++c) {
    base[c] = high[c] == -kInfinity ? Vec{} : high[c];  // no key so far: -inf - 0 has weight 0, -inf - -inf is NaN
    alpha[c] = exp2_negative(block.max[c] - base[c]);
    sum[c] = block.sum[c] * alpha[c];
    block.max[c] = high[c];
  }
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < kN; ++c) {
      Vec score = s[j * kN + c];
      Vec weight = exp2_negative(score - base[c]);
      if (kMasked) weight = score == -kInfinity ? splat(-0.0f) : weight;
      sum[c] += weight;
      s[j * kN + c] = weight;
    }
  }
  for (int c = 0; c < kN; ++c) block.sum[c] = sum[c];
}

// 6. Epilogue: the sink joins the denominator; out and lse are written

template <int kN>
void finish_block(const FlashUnit& u, const Block<kN>& block, float* row_buffer) {
  constexpr int kRows = kN * kWidth;
  const float* o = reinterpret_cast<const float*>(block.o);
  for (int r = 0; r < block.num_rows; ++r) {
    const FlashRow& row = block.rows[r];
    float high = block.max[r / kWidth][r % kWidth], sum = block.sum[r / kWidth][r % kWidth];
    float factor = 1.0f;
    if (row.sink != -kInfinity) {
      float sink = row.sink * kLog2e;
      float top = sink > high ? sink : high;
      factor = __builtin_exp2f(high - top);
      sum = sum * factor + __builtin_exp2f(sink - top);
      high = top;
    }
    bool empty = sum == 0.0f;
    factor = empty ? 0.0f : factor / sum;
    for (int c = 0; c < u.head_dim_v; ++c) row_buffer[c] = empty ? 0.0f : o[c * kRows + r] * factor;
    store_row(row_buffer, u.head_dim_v, u.dtype, row.out);
    if (row.lse != nullptr) *row.lse = empty ? -kInfinity : (high + __builtin_log2f(sum)) * kLn2;
  }
}

// 7. The unit: tiles of keys outside, blocks of rows inside, so that a tile is converted once for all its rows

constexpr int kMaxBlocks = (kMaxUnitRows + kWidth * kVecs - 1) / (kWidth * kVecs);

template <int kN>
void run_blocks(const FlashUnit& u) {
  constexpr int kRows = kN * kWidth;
  int num_blocks = (u.num_rows + kRows - 1) / kRows;
  Vec* next = reinterpret_cast<Vec*>(u.scratch);
  auto take = [&next](int vectors) {
    Vec* taken = next;
    next += vectors;
    return taken;
  };
  Vec* s = take(kTileKeys * kN);
  float* row_buffer = reinterpret_cast<float*>(take(256 / kWidth));
  Block<kN> blocks[kMaxBlocks];
  int begin = __INT32_MAX__, end = 0;
  for (int i = 0; i < num_blocks; ++i) {
    Block<kN>& block = blocks[i];
    block.rows = u.rows + i * kRows;
    block.num_rows = min(kRows, u.num_rows - i * kRows);
    block.q = take(u.head_dim * kN);
    block.o = take(u.head_dim_v * kN);
    init_block(u, block, row_buffer);
    begin = min(begin, block.first_key);
    end = max(end, block.last_key);
  }
  float* k_buffer = reinterpret_cast<float*>(next);
  float* v_buffer = k_buffer + kTileKeys * u.head_dim;
  bool has_bias = u.rows[0].bias != nullptr, is_modified = has_bias || u.has_alibi || u.softcap != 0.0f;

  for (int first = begin; first < end; first += kTileKeys) {
    int count = min(kTileKeys, end - first);
    KeyTile k = load_tile(u.k, u.k_stride, first, count, u.head_dim, u.dtype, k_buffer);
    KeyTile v = load_tile(u.v, u.v_stride, first, count, u.head_dim_v, u.dtype, v_buffer);
    int finite = -1;  // whether v is; -1: not looked at
    for (int i = 0; i < num_blocks; ++i) {
      Block<kN>& block = blocks[i];
      int from = max(first, block.first_key), until = min(first + count, block.last_key), n = until - from;
      if (n <= 0) continue;
      const float* k_from = k.data + (from - first) * k.stride;
      const float* v_from = v.data + (from - first) * v.stride;
      dot_keys<kN>(block.q, k_from, k.stride, n, u.head_dim, s);
      if (is_modified) modify_scores(u, block, from, n, s);
      Vec alpha[kN];
      bool all_seen = from >= block.common_key && until <= block.until_key;
      if (all_seen && !has_bias) {
        weigh<kN, false>(block, n, s, alpha);
      } else {
        if (!all_seen) mask_scores(block, from, n, s);
        weigh<kN, true>(block, n, s, alpha);
        if (finite < 0) finite = all_finite(v, count, u.head_dim_v);
        if (!finite) {
          add_values<kN, true>(s, v_from, v.stride, n, u.head_dim_v, alpha, block.o);
          continue;
        }
      }
      add_values<kN, false>(s, v_from, v.stride, n, u.head_dim_v, alpha, block.o);
    }
  }
  for (int i = 0; i < num_blocks; ++i) finish_block(u, blocks[i], row_buffer);
}

size_t scratch_floats(int32_t num_rows, int32_t head_dim, int32_t head_dim_v) {
  constexpr int kRows = kVecs * kWidth;
  size_t rows = static_cast<size_t>((num_rows + kRows - 1) / kRows) * kRows;
  size_t dims = static_cast<size_t>(head_dim) + static_cast<size_t>(head_dim_v);
  return kTileKeys * kRows + 256 + rows * dims + kTileKeys * dims;
}

void run(const FlashUnit& unit) {
  if (unit.num_rows <= kWidth) {
    run_blocks<1>(unit);
  } else {
    run_blocks<kVecs>(unit);
  }
}

}  // namespace

extern const FlashKernel kFlashKernel;
const FlashKernel kFlashKernel = {CUATTN_NAME(CUATTN_ISA), kVecs * kWidth, scratch_floats, run};

}  // namespace cuattn::cpu::CUATTN_ISA
