// SPDX-License-Identifier: Apache-2.0
// One score at a time through a user's programs. Next: flex_vectors.h.
#include "cpu/flex.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuattn/error.h"

namespace cuattn::cpu {
namespace {

union Value {
  int32_t i;
  float f;
};

struct Indices {
  int32_t q, k, b, h, q_len, kv_len;
  float score;
  const FlexGradient* gradient;  // with ds and sums, of a gradient's program
  float ds;
  double* sums;
};

int64_t offset_of(const FlexArray& array, const int64_t* strides, Value x, Value y) {
  int32_t at[2] = {x.i, y.i};
  int64_t offset = 0;
  for (int32_t axis = 0; axis < array.rank; ++axis)
    offset += std::clamp(at[axis], 0, array.extents[axis] - 1) * strides[axis];
  return offset;
}

Value load(const FlexArray& array, Value x, Value y) {
  int64_t offset = offset_of(array, array.strides, x, y);
  Value value;
  if (array.dtype == DType::boolean) {
    value.i = static_cast<const uint8_t*>(array.data)[offset] != 0 ? -1 : 0;
  } else {
    std::memcpy(&value, static_cast<const char*>(array.data) + offset * 4, 4);
  }
  return value;
}

void give(const FlexParams& flex, const Indices& at, const FlexOp& op, float x, Value y, Value z) {
  if (op.number < 0 || at.sums == nullptr || at.ds == 0.0f) return;
  const FlexArray& array = flex.arrays[op.number];
  const int64_t strides[2] = {array.rank > 1 ? array.extents[1] : 1, 1};
  int64_t place = at.gradient->arrays[op.number].first + offset_of(array, strides, y, z);
  at.sums[place] += static_cast<double>(at.ds) * x;
}

// Whole numbers wrap around, as in the vectors.
int32_t wrap(int64_t x) { return static_cast<int32_t>(static_cast<uint32_t>(x)); }
int32_t condition(bool holds) { return holds ? -1 : 0; }
int32_t floor_div(int32_t x, int32_t d) { return x / d - (x % d < 0 ? 1 : 0); }

Value compute_int(FlexCode code, int64_t x, int64_t y) {
  switch (code) {
    case FlexCode::add: return {wrap(x + y)};
    case FlexCode::sub: return {wrap(x - y)};
    case FlexCode::mul: return {wrap(x * y)};
    case FlexCode::min: return {wrap(x < y ? x : y)};
    case FlexCode::max: return {wrap(x > y ? x : y)};
    case FlexCode::neg: return {wrap(-x)};
    case FlexCode::abs: return {wrap(x < 0 ? -x : x)};
    case FlexCode::floordiv: return {floor_div(wrap(x), wrap(y))};
    case FlexCode::mod: return {wrap(x - floor_div(wrap(x), wrap(y)) * y)};
    case FlexCode::lt: return {condition(x < y)};
    case FlexCode::le: return {condition(x <= y)};
    case FlexCode::eq: return {condition(x == y)};
    case FlexCode::ne: return {condition(x != y)};
    case FlexCode::and_: return {wrap(x & y)};
    case FlexCode::or_: return {wrap(x | y)};
    case FlexCode::xor_: return {wrap(x ^ y)};
    case FlexCode::not_: return {wrap(~x)};
    default: CUATTN_ASSERT(false, "a code of params/flex.h has no meaning in cpu/flex.cpp");
  }
}

Value of_float(float x) {
  Value value;
  value.f = x;
  return value;
}

bool compute_float(FlexCode code, float x, float y, Value& value) {
  switch (code) {
    case FlexCode::addf: value = of_float(x + y); return true;
    case FlexCode::subf: value = of_float(x - y); return true;
    case FlexCode::mulf: value = of_float(x * y); return true;
    case FlexCode::divf: value = of_float(x / y); return true;
    case FlexCode::minf: value = of_float(x < y ? x : y); return true;
    case FlexCode::maxf: value = of_float(x > y ? x : y); return true;
    case FlexCode::negf: value = of_float(-x); return true;
    case FlexCode::absf: value = of_float(std::fabs(x)); return true;
    case FlexCode::ltf: value = {condition(x < y)}; return true;
    case FlexCode::lef: value = {condition(x <= y)}; return true;
    case FlexCode::eqf: value = {condition(x == y)}; return true;
    case FlexCode::nef: value = {condition(x != y)}; return true;
    case FlexCode::exp: value = of_float(std::exp(x)); return true;
    case FlexCode::log: value = of_float(std::log(x)); return true;
    case FlexCode::tanh: value = of_float(std::tanh(x)); return true;
    case FlexCode::sqrt: value = of_float(std::sqrt(x)); return true;
    default: return false;
  }
}

Value step(const FlexParams& flex, const Indices& at, const FlexOp& op, const Value* r) {
  Value x = r[op.a], y = r[op.b], value;
  FlexCode code = static_cast<FlexCode>(op.code);
  switch (code) {
    case FlexCode::q: return {at.q};
    case FlexCode::k: return {at.k};
    case FlexCode::b: return {at.b};
    case FlexCode::h: return {at.h};
    case FlexCode::q_len: return {at.q_len};
    case FlexCode::kv_len: return {at.kv_len};
    case FlexCode::score: return of_float(at.score);
    case FlexCode::number: return {op.number};
    case FlexCode::load: return load(flex.arrays[op.number], x, y);
    case FlexCode::where: return x.i != 0 ? y : r[op.c];
    case FlexCode::float_: return of_float(static_cast<float>(x.i));
    case FlexCode::give: give(flex, at, op, x.f, y, r[op.c]); return x;
    default: break;
  }
  return compute_float(code, x.f, y.f, value) ? value : compute_int(code, x.i, y.i);
}

Value run(const FlexParams& flex, const FlexProgram& program, const Indices& at) {
  Value r[kMaxFlexRegisters] = {};
  for (int32_t i = 0; i < program.count; ++i)
    r[program.ops[i].to] = step(flex, at, program.ops[i], r);
  return r[program.ops[program.count - 1].to];
}

Indices indices(const Head& head, int32_t row, int32_t key, float score) {
  return {row, key, head.b, head.h, head.queries.used, head.keys.used, score, nullptr, 0, nullptr};
}

// 0: the block of a query and a key is not listed; 1: it is, and its keys are all seen; 2: it is,
// and the mask is yet to be asked.
int32_t listed(const FlexLists& lists, const Head& head, int32_t row, int32_t key) {
  const int32_t* starts = lists.starts + head.b * lists.stride_batch + head.h * lists.stride_head +
                          row / lists.query_block;
  int32_t block = key / lists.key_block;
  for (int32_t i = starts[0]; i < starts[1]; ++i) {
    if (lists.entries[i] / 2 == block) return 1 + lists.entries[i] % 2;
  }
  return 0;
}

}  // namespace

float flex_score(const AttentionParams& p, const Head& head, int32_t row, int32_t key, float s) {
  if (p.flex == nullptr || p.flex->score.count == 0) return s;
  return run(*p.flex, p.flex->score, indices(head, row, key, s)).f;
}

bool flex_sees(const AttentionParams& p, const Head& head, int32_t row, int32_t key) {
  if (p.flex == nullptr) return true;
  int32_t state = p.flex->lists.starts == nullptr ? 2 : listed(p.flex->lists, head, row, key);
  if (state != 2 || p.flex->mask.count == 0) return state != 0;
  return run(*p.flex, p.flex->mask, indices(head, row, key, 0.0f)).i != 0;
}

float flex_slope(const AttentionParams& p, const FlexGradient& gradient, const Head& head,
                 int32_t row, int32_t key, float score, float ds, double* sums) {
  Indices at = indices(head, row, key, score);
  at.gradient = &gradient;
  at.ds = ds;
  at.sums = sums;
  return run(*p.flex, gradient.program, at).f;
}

void store_array_gradients(const FlexParams& flex, const FlexGradient& gradient, const double* sums,
                           int64_t parts) {
  for (int32_t i = 0; i < kMaxFlexArrays; ++i) {
    const FlexArrayGradient& to = gradient.arrays[i];
    if (to.data == nullptr) continue;
    const FlexArray& array = flex.arrays[i];
    int64_t rows = array.rank > 1 ? array.extents[0] : 1;
    int64_t columns = array.rank > 0 ? array.extents[array.rank - 1] : 1;
    int64_t row_stride = array.rank > 1 ? to.strides[0] : 0;
    int64_t column_stride = array.rank > 0 ? to.strides[array.rank - 1] : 0;
    for (int64_t x = 0; x < rows * columns; ++x) {
      double sum = 0.0;
      for (int64_t part = 0; part < parts; ++part)
        sum += sums[part * gradient.num_sums + to.first + x];
      to.data[x / columns * row_stride + x % columns * column_stride] = static_cast<float>(sum);
    }
  }
}

}  // namespace cuattn::cpu
