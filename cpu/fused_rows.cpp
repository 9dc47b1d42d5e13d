// SPDX-License-Identifier: Apache-2.0
// Rotary embedding, norms and activations of one row, in the vectors of one instruction set. No
// product and sum become one operation here, so that the bits of a rotation are those of
// cpu/cache.cpp and of the GPU. Everything is in an anonymous namespace, as flash.cpp says. Next:
// fused.cpp.
#include "cpu/fused.h"
#include "cpu/vectors.h"

namespace cuattn::cpu::CUATTN_ISA {
namespace {

constexpr int kChunk = 512;  // elements that are worked on at a time, in the first cache

int64_t item_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

const char* at(const void* data, int64_t element, DType dtype) {
  return static_cast<const char*>(data) + element * item_of(dtype);
}
char* at(void* data, int64_t element, DType dtype) {
  return static_cast<char*>(data) + element * item_of(dtype);
}

void widen(const void* from, int64_t first, int64_t count, DType dtype, float* to) {
  load_row(at(from, first, dtype), static_cast<int>(count), dtype, to);
}

// Any number of elements from float.
void narrow_row(const float* from, int count, DType dtype, void* to) {
  int whole = count & ~7;
  store_row(from, whole, dtype, to);
  for (int i = whole; i < count; ++i) store_element(to, i, dtype, from[i]);
}

// ---- rotary embedding

// `count` pairs of a and b, turned in place.
void turn(float* a, float* b, const float* cos, const float* sin, float sign, int count) {
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    Vec x = load(a + i), y = load(b + i), c = load(cos + i), s = load(sin + i) * sign;
    *reinterpret_cast<LooseVec*>(a + i) = x * c - y * s;
    *reinterpret_cast<LooseVec*>(b + i) = y * c + x * s;
  }
  for (; i < count; ++i) {
    float x = a[i], y = b[i], s = sin[i] * sign;
    a[i] = x * cos[i] - y * s;
    b[i] = y * cos[i] + x * s;
  }
}

// Columns [first, first + count) of the tables, of one head.
void turn_columns(const RotateParams& p, const void* x, void* out, int64_t row, int64_t out_row,
                  const float* cos, const float* sin, int first, int count) {
  float a[kChunk], b[kChunk], pairs[2 * kChunk];
  float sign = p.inverse ? -1.0f : 1.0f;
  int begin = p.offset + (p.interleaved ? 2 * first : first), other = begin + p.rotary_dim / 2;
  if (p.interleaved) {
    load_row(at(x, row + begin, p.dtype), 2 * count, p.dtype, pairs);
    for (int i = 0; i < count; ++i) a[i] = pairs[2 * i], b[i] = pairs[2 * i + 1];
  } else {
    load_row(at(x, row + begin, p.dtype), count, p.dtype, a);
    load_row(at(x, row + other, p.dtype), count, p.dtype, b);
  }
  turn(a, b, cos + first, sin + first, sign, count);
  if (p.interleaved) {
    for (int i = 0; i < count; ++i) pairs[2 * i] = a[i], pairs[2 * i + 1] = b[i];
    narrow_row(pairs, 2 * count, p.dtype, at(out, out_row + begin, p.dtype));
  } else {
    narrow_row(a, count, p.dtype, at(out, out_row + begin, p.dtype));
    narrow_row(b, count, p.dtype, at(out, out_row + other, p.dtype));
  }
}

void rotate(const RotateParams& p, const void* x, void* out, const float* cos, const float* sin) {
  int half = p.rotary_dim / 2, end = p.offset + p.rotary_dim;
  for (int64_t head = 0; head < p.num_heads; ++head) {
    int64_t row = head * p.x_strides.head, out_row = head * p.out_strides.head;
    for (int first = 0; first < half; first += kChunk)
      turn_columns(p, x, out, row, out_row, cos, sin, first, min(kChunk, half - first));
    if (p.x == p.out) continue;
    auto copy = [&](int begin, int count) {
      __builtin_memcpy(at(out, out_row + begin, p.dtype), at(x, row + begin, p.dtype),
                       static_cast<size_t>(count * item_of(p.dtype)));
    };
    copy(0, p.offset);
    copy(end, p.head_dim - end);
  }
}

// ---- sums

void add(const AddParams& p, const void* x, const void* residual, void* out) {
  float a[kChunk], b[kChunk];
  for (int64_t head = 0; head < p.num_heads; ++head) {
    for (int first = 0; first < p.head_dim; first += kChunk) {
      int count = min(kChunk, p.head_dim - first);
      load_row(at(x, head * p.x_strides.head + first, p.x_dtype), count, p.x_dtype, a);
      load_row(at(residual, head * p.residual_strides.head + first, p.dtype), count, p.dtype, b);
      for (int i = 0; i < count; ++i) a[i] += b[i];
      narrow_row(a, count, p.dtype, at(out, head * p.out_strides.head + first, p.dtype));
    }
  }
}

// ---- norms

float sum_of(Vec x) {
  float sum = 0.0f;
  for (int i = 0; i < kWidth; ++i) sum += x[i];
  return sum;
}

// The sum of (h - mean), or of its square. Four sums, so that none waits for the one before.
float sum_row(const float* h, int64_t count, float mean, bool squares) {
  constexpr int kSums = 4;
  Vec sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= count; i += kSums * kWidth) {
    for (int j = 0; j < kSums; ++j) {
      Vec x = load(h + i + j * kWidth) - mean;
      sums[j] += squares ? x * x : x;
    }
  }
  float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; ++i) sum += squares ? (h[i] - mean) * (h[i] - mean) : h[i] - mean;
  return sum;
}

// h of a row: as it is stored, where there is a residual.
void add_residual(const NormParams& p, int64_t row, float* h) {
  float added[kChunk];
  for (int64_t first = 0; first < p.columns; first += kChunk) {
    int count = static_cast<int>(p.columns - first < kChunk ? p.columns - first : kChunk);
    float* part = h + first;
    load_row(at(p.residual, row * p.residual_stride + first, p.dtype), count, p.dtype, added);
    for (int i = 0; i < count; ++i) part[i] += added[i];
    void* stored = at(p.residual_out, row * p.residual_out_stride + first, p.dtype);
    narrow_row(part, count, p.dtype, stored);
    load_row(stored, count, p.dtype, part);
  }
}

void norm(const NormParams& p, const NormVectors& vectors, int64_t row, float* h) {
  widen(p.x, row * p.x_stride, p.columns, p.dtype, h);
  if (p.residual != nullptr) add_residual(p, row, h);
  float columns = static_cast<float>(p.columns);
  float mean = p.centred ? sum_row(h, p.columns, 0.0f, false) / columns : 0.0f;
  float variance = sum_row(h, p.columns, mean, true) / columns;
  float inverse = 1.0f / __builtin_sqrtf(variance + p.eps);
  for (int64_t i = 0; i < p.columns; ++i) h[i] = (h[i] - mean) * inverse * vectors.weight[i];
  if (vectors.bias != nullptr)
    for (int64_t i = 0; i < p.columns; ++i) h[i] += vectors.bias[i];
  narrow_row(h, static_cast<int>(p.columns), p.dtype, at(p.out, row * p.out_stride, p.dtype));
}

// ---- activations

// x times the logistic function of z.
Vec times_logistic(Vec x, Vec z) {
  Vec e = exp2_negative(z < 0.0f ? z : -z, kLog2e);
  return x * ((z < 0.0f ? e : splat(1.0f)) / (1.0f + e));
}

Vec gelu(Vec x) {
  Vec z = (x < 0.0f ? -x : x) * 0.70710678f;
  Vec t = 1.0f / (1.0f + 0.5f * z), q = splat(half_erfcx_term<kErfcxTerms>(kErfcxTerms - 1));
  for (int i = kErfcxTerms - 2; i >= 0; --i) q = q * t + half_erfcx_term<kErfcxTerms>(i);
  Vec tail = q * t * exp2_negative(-z * z, kLog2e);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

Vec activated(Vec x, Activation activation) {
  if (activation == Activation::silu) return times_logistic(x, x);
  if (activation == Activation::gelu) return gelu(x);
  return times_logistic(x, kGeluTanh * (kGeluCube * x * x * x + x));
}

// `count` columns of a row from `first` on: x, and its bias, to float.
void load_biased(const ActivationParams& p, int64_t row, int64_t first, int count, float* x) {
  float bias[kChunk];
  load_row(at(p.x, row * p.x_stride + first, p.dtype), count, p.dtype, x);
  if (p.bias == nullptr) return;
  load_row(at(p.bias, first, p.dtype), count, p.dtype, bias);
  for (int i = 0; i < count; ++i) x[i] += bias[i];
}

void activate(const ActivationParams& p, int64_t row) {
  float a[kChunk] = {}, b[kChunk];
  for (int64_t first = 0; first < p.columns; first += kChunk) {
    int count = static_cast<int>(p.columns - first < kChunk ? p.columns - first : kChunk);
    load_biased(p, row, first, count, a);
    for (int i = 0; i < count; i += kWidth)  // kChunk is a multiple of every width
      *reinterpret_cast<LooseVec*>(a + i) = activated(load(a + i), p.activation);
    if (p.gated) {
      load_biased(p, row, first + p.columns, count, b);
      for (int i = 0; i < count; ++i) a[i] *= b[i];
    }
    narrow_row(a, count, p.dtype, at(p.out, row * p.out_stride + first, p.dtype));
  }
}

}  // namespace

#define CUATTN_STRING(x) #x
#define CUATTN_NAME(x) CUATTN_STRING(x)
extern const RowsKernel kRowsKernel;
const RowsKernel kRowsKernel = {CUATTN_NAME(CUATTN_ISA), rotate, add, norm, activate, widen};

}  // namespace cuattn::cpu::CUATTN_ISA
