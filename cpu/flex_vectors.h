// SPDX-License-Identifier: Apache-2.0
// A user's programs over a tile of scores, an operation at a time over a strip of vectors: lanes are
// rows, vectors are keys. For flash.cpp and backward_flash.cpp alone, which are compiled once per
// instruction set. What an operation means: flex.cpp. Next: flash.cpp.
#pragma once

#include "cpu/vectors.h"
#include "cuattn/params/flex.h"

namespace cuattn::cpu::CUATTN_ISA {
namespace {

constexpr int kStrip = 16;  // vectors: a register is 1 KB with AVX-512, and a program uses a few

union FlexRegister {
  Vec f[kStrip];
  IntVec i[kStrip];
};

// What the `give` operations of a gradient's program add to, for the first `count` vectors of a strip.
struct FlexGives {
  const FlexGradient* gradient;
  double* sums;
  const Vec* ds;
  int stride, count;
};

// Where a tile lies: lanes of one vector of rows, the first key of a strip.
struct FlexPlace {
  IntVec row, head;
  int32_t key, b, q_len, kv_len;
  FlexGives gives;
};

// e^x, to 3e-7 relative; 0 and infinity beyond the range of float, NaN for NaN.
inline Vec exp_any(Vec x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: a sum is rounded to a whole number
  x = x < -104.0f ? splat(-104.0f) : x;
  x = x > 89.0f ? splat(89.0f) : x;
  Vec n = (x * kLog2e + kShift) - kShift;
  Vec f = ((x - n * 0.693359375f) + n * 2.12194440e-4f) * kLog2e;  // ln 2, in two parts
  Vec p = splat(1.5345812e-4f);                                    // as in exp2_negative
  p = p * f + 1.3399931e-3f;
  p = p * f + 9.6184891e-3f;
  p = p * f + 5.5503286e-2f;
  p = p * f + 2.4022646e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  Vec whole = n == n ? n : Vec{};
  IntVec power = __builtin_convertvector(whole, IntVec), half = power >> 1;
  Vec low = reinterpret_cast<Vec>((half + 127) << 23);  // in two steps: 2^-150 and 2^128 are none
  Vec high = reinterpret_cast<Vec>((power - half + 127) << 23);
  return p * low * high;
}

// x / d rounded down and what is left, d positive in each lane.
inline void divide(IntVec x, IntVec d, IntVec& quotient, IntVec& rest) {
  using Double = double __attribute__((vector_size(kWidth * sizeof(double))));
  Double exact = __builtin_convertvector(x, Double) / __builtin_convertvector(d, Double);
  quotient = __builtin_convertvector(exact, IntVec);
  rest = x - quotient * d;
  IntVec below = rest < 0;
  quotient += below;
  rest += d & below;
}

// One element a lane; `same` lanes share an index.
inline void load_lanes(const FlexArray& array, const FlexRegister& x, const FlexRegister& y,
                       bool same, FlexRegister& to) {
  int32_t last[2] = {array.extents[0] - 1, array.extents[1] - 1};
  for (int v = 0; v < kStrip; ++v) {
    for (int l = 0; l < (same ? 1 : kWidth); ++l) {
      int64_t offset = 0;
      if (array.rank > 0) offset = min(max(x.i[v][l], 0), last[0]) * array.strides[0];
      if (array.rank > 1) offset += min(max(y.i[v][l], 0), last[1]) * array.strides[1];
      if (array.dtype == DType::boolean) {
        to.i[v][l] = static_cast<const uint8_t*>(array.data)[offset] != 0 ? -1 : 0;
      } else {
        to.i[v][l] = static_cast<const int32_t*>(array.data)[offset];
      }
    }
    if (same) to.i[v] = IntVec{} + to.i[v][0];
  }
}

// Adds ds times `x` to the sums at indices `y` and `z`, which `same` lanes share. In a fixed order:
// lane by lane where keys share an index, so that neighbours are added up before they are stored.
inline void give_lanes(const FlexArray& array, int64_t first, const FlexGives& gives,
                       const FlexRegister& x, const FlexRegister& y, const FlexRegister& z,
                       bool same) {
  int32_t last[2] = {array.extents[0] - 1, array.extents[1] - 1};
  int64_t row = array.rank > 1 ? array.extents[1] : 1;
  double* sums = gives.sums + first;
  int64_t place = 0;
  double sum = 0.0;
  auto add = [&](int v, int l) {
    float ds = gives.ds[v * gives.stride][l];
    if (ds == 0.0f) return;  // what is not seen may be infinite
    int64_t to = 0;
    if (array.rank > 0) to = min(max(y.i[v][l], 0), last[0]) * row;
    if (array.rank > 1) to += min(max(z.i[v][l], 0), last[1]);
    if (to != place) {
      sums[place] += sum;
      place = to;
      sum = 0.0;
    }
    sum += static_cast<double>(ds) * x.f[v][l];
  };
  if (same) {
    for (int v = 0; v < gives.count; ++v) {
      for (int l = 0; l < kWidth; ++l) add(v, l);
    }
  } else {
    for (int l = 0; l < kWidth; ++l) {
      for (int v = 0; v < gives.count; ++v) add(v, l);
    }
  }
  sums[place] += sum;
}

// Runs operations [first, last) of a program. `same[r]`: all lanes of register r hold one value.
inline void run_ops(const FlexParams& flex, const FlexProgram& program, int first, int last,
                    const FlexPlace& at, const Vec* score, int stride, FlexRegister* r,
                    bool* same) {
// NOLINTBEGIN(modernize-loop-convert): v counts in several registers
#define CUATTN_EACH(...)             \
  for (int v = 0; v < kStrip; ++v) { \
    __VA_ARGS__;                     \
  }                                  \
  break
  for (int n = first; n < last; ++n) {
    const FlexOp& op = program.ops[n];
    FlexRegister &to = r[op.to], &x = r[op.a], &y = r[op.b], &z = r[op.c];
    bool alike = same[op.a] && same[op.b] && same[op.c];
    switch (static_cast<FlexCode>(op.code)) {
      case FlexCode::q: alike = false; CUATTN_EACH(to.i[v] = at.row);
      case FlexCode::h: alike = false; CUATTN_EACH(to.i[v] = at.head);
      case FlexCode::score: alike = false; CUATTN_EACH(to.f[v] = score[v * stride]);
      case FlexCode::k: alike = true; CUATTN_EACH(to.i[v] = IntVec{} + (at.key + v));
      case FlexCode::b: alike = true; CUATTN_EACH(to.i[v] = IntVec{} + at.b);
      case FlexCode::q_len: alike = true; CUATTN_EACH(to.i[v] = IntVec{} + at.q_len);
      case FlexCode::kv_len: alike = true; CUATTN_EACH(to.i[v] = IntVec{} + at.kv_len);
      case FlexCode::number: alike = true; CUATTN_EACH(to.i[v] = IntVec{} + op.number);
      case FlexCode::load: {
        const FlexArray& array = flex.arrays[op.number];
        alike = (array.rank < 1 || same[op.a]) && (array.rank < 2 || same[op.b]);
        load_lanes(array, x, y, alike, to);
        break;
      }
      case FlexCode::add: CUATTN_EACH(to.i[v] = x.i[v] + y.i[v]);
      case FlexCode::sub: CUATTN_EACH(to.i[v] = x.i[v] - y.i[v]);
      case FlexCode::mul: CUATTN_EACH(to.i[v] = x.i[v] * y.i[v]);
      case FlexCode::min: CUATTN_EACH(to.i[v] = x.i[v] < y.i[v] ? x.i[v] : y.i[v]);
      case FlexCode::max: CUATTN_EACH(to.i[v] = x.i[v] > y.i[v] ? x.i[v] : y.i[v]);
      case FlexCode::neg: CUATTN_EACH(to.i[v] = -x.i[v]);
      case FlexCode::abs: CUATTN_EACH(to.i[v] = x.i[v] < 0 ? -x.i[v] : x.i[v]);
      case FlexCode::floordiv: CUATTN_EACH(IntVec rest; divide(x.i[v], y.i[v], to.i[v], rest));
      case FlexCode::mod: CUATTN_EACH(IntVec whole; divide(x.i[v], y.i[v], whole, to.i[v]));
      case FlexCode::lt: CUATTN_EACH(to.i[v] = x.i[v] < y.i[v]);
      case FlexCode::le: CUATTN_EACH(to.i[v] = x.i[v] <= y.i[v]);
      case FlexCode::eq: CUATTN_EACH(to.i[v] = x.i[v] == y.i[v]);
      case FlexCode::ne: CUATTN_EACH(to.i[v] = x.i[v] != y.i[v]);
      case FlexCode::addf: CUATTN_EACH(to.f[v] = x.f[v] + y.f[v]);
      case FlexCode::subf: CUATTN_EACH(to.f[v] = x.f[v] - y.f[v]);
      case FlexCode::mulf: CUATTN_EACH(to.f[v] = x.f[v] * y.f[v]);
      case FlexCode::divf: CUATTN_EACH(to.f[v] = x.f[v] / y.f[v]);
      case FlexCode::minf: CUATTN_EACH(to.f[v] = x.f[v] < y.f[v] ? x.f[v] : y.f[v]);
      case FlexCode::maxf: CUATTN_EACH(to.f[v] = x.f[v] > y.f[v] ? x.f[v] : y.f[v]);
      case FlexCode::negf: CUATTN_EACH(to.f[v] = -x.f[v]);
      case FlexCode::absf: CUATTN_EACH(to.i[v] = x.i[v] & INT32_MAX);
      case FlexCode::ltf: CUATTN_EACH(to.i[v] = x.f[v] < y.f[v]);
      case FlexCode::lef: CUATTN_EACH(to.i[v] = x.f[v] <= y.f[v]);
      case FlexCode::eqf: CUATTN_EACH(to.i[v] = x.f[v] == y.f[v]);
      case FlexCode::nef: CUATTN_EACH(to.i[v] = x.f[v] != y.f[v]);
      case FlexCode::exp: CUATTN_EACH(to.f[v] = exp_any(x.f[v]));
      case FlexCode::tanh: CUATTN_EACH(to.f[v] = tanh(x.f[v]));
      case FlexCode::log:
        CUATTN_EACH(for (int l = 0; l < kWidth; ++l) to.f[v][l] = __builtin_logf(x.f[v][l]));
      case FlexCode::sqrt:
        CUATTN_EACH(for (int l = 0; l < kWidth; ++l) to.f[v][l] = __builtin_sqrtf(x.f[v][l]));
      case FlexCode::float_: CUATTN_EACH(to.f[v] = __builtin_convertvector(x.i[v], Vec));
      case FlexCode::and_: CUATTN_EACH(to.i[v] = x.i[v] & y.i[v]);
      case FlexCode::or_: CUATTN_EACH(to.i[v] = x.i[v] | y.i[v]);
      case FlexCode::xor_: CUATTN_EACH(to.i[v] = x.i[v] ^ y.i[v]);
      case FlexCode::not_: CUATTN_EACH(to.i[v] = ~x.i[v]);
      case FlexCode::where: CUATTN_EACH(to.i[v] = x.i[v] != 0 ? y.i[v] : z.i[v]);
      case FlexCode::give:
        if (op.number >= 0) {
          const FlexArray& array = flex.arrays[op.number];
          bool shared = (array.rank < 1 || same[op.b]) && (array.rank < 2 || same[op.c]);
          give_lanes(array, at.gives.gradient->arrays[op.number].first, at.gives, x, y, z, shared);
        }
        CUATTN_EACH(to.i[v] = x.i[v]);
    }
    same[op.to] = alike;
  }
#undef CUATTN_EACH
}
// NOLINTEND(modernize-loop-convert)

// Runs a program over count vectors s[j * stride] of scores, of keys at.key + j: calls
// before(place, j, n) ahead of each strip of n, after(j, result, v) for each of its vectors v.
template <class Before, class After>
inline void each_strip(const FlexParams& flex, const FlexProgram& program, FlexPlace at, int count,
                       int stride, const Vec* s, Before&& before, After&& after) {
  FlexRegister r[kMaxFlexRegisters];
  bool same[kMaxFlexRegisters];
  for (bool& alike : same) alike = true;  // unused operands do not count
  for (IntVec& lanes : r[0].i) lanes = IntVec{};
  Vec tail[kStrip] = {};
  const FlexRegister& result = r[program.ops[program.count - 1].to];
  run_ops(flex, program, 0, program.row_count, at, tail, 1, r, same);
  for (int j = 0; j < count; j += kStrip, at.key += kStrip) {
    int n = min(kStrip, count - j);
    const Vec* from = s + j * stride;
    bool is_whole = n == kStrip;
    for (int v = 0; v < n && !is_whole; ++v) tail[v] = from[v * stride];
    before(at, j, n);
    run_ops(flex, program, program.row_count, program.count, at, is_whole ? from : tail,
            is_whole ? stride : 1, r, same);
    for (int v = 0; v < n; ++v) after(j + v, result, v);
  }
}

// Replaces s[j * stride], j = 0 .. count - 1, the scores of keys at.key + j, by what a score program
// gives, or by -inf where a mask program hides the key.
inline void run_program(const FlexParams& flex, const FlexProgram& program, bool is_mask,
                        const FlexPlace& at, int count, int stride, Vec* s) {
  each_strip(
      flex, program, at, count, stride, s, [](FlexPlace&, int, int) {},
      [&](int j, const FlexRegister& result, int v) {
        Vec& score = s[j * stride];
        score = !is_mask ? result.f[v] : result.i[v] != 0 ? score : splat(-kInfinity);
      });
}

// Multiplies ds[j * stride] by the derivative of the score program at the scores that it took, -0
// where ds is 0, and adds what they give captured arrays to `sums`.
inline void run_gradient(const FlexParams& flex, const FlexGradient& gradient, double* sums,
                         const FlexPlace& at, int count, int stride, const Vec* capped, Vec* ds) {
  each_strip(
      flex, gradient.program, at, count, stride, capped,
      [&](FlexPlace& place, int j, int n) {
        place.gives = {&gradient, sums, ds + j * stride, stride, n};
      },
      [&](int j, const FlexRegister& result, int v) {
        Vec& x = ds[j * stride];
        x = x == 0.0f ? splat(-0.0f) : x * result.f[v];
      });
}

}  // namespace
}  // namespace cuattn::cpu::CUATTN_ISA
