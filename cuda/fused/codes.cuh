// SPDX-License-Identifier: Apache-2.0
// What quantize does with a row: loads of 16 bytes, the rotation, and quotients to the last bit.
// kLanes neighbours of a warp share a row; a thread has kPieces runs of 8 channels of it, so that
// most steps of a rotation stay inside a thread. Source: QuaRot, arXiv:2404.00456; Markstein,
// "Computation of elementary functions on the IBM RISC System/6000 processor". Next: quantize.cu.
#pragma once

#include "cuattn/params/quantize.h"
#include "cuda/fused/rows.cuh"

namespace cuattn {
namespace {

constexpr int kThreads = 256;
constexpr int kSpan = 8;  // channels of a piece
constexpr float kSmallestNormal = 1.17549435e-38f;
constexpr uint32_t kWarp = 0xffffffffu;

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// 1 where all elements are 0: no code but 0 is written then, and no scale is 0.
__device__ __forceinline__ float scale_of(float largest) {
  return largest == 0.0f ? 1.0f : fmaxf(largest / kLargestE4m3, kSmallestNormal);
}

// 8 channels as they lie in memory: 16 bytes, 32 of float32.
template <DType kType>
struct RawPiece {
  static constexpr int kWords = kType == DType::f32 ? 2 : 1;
  uint4 words[kWords];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = uint4{0, 0, 0, 0};
  }

  // `in_pieces`: they lie side by side on 16 bytes.
  __device__ __forceinline__ void load(const QuantizeArray& array, bool in_pieces, int64_t at) {
    const auto* from = static_cast<const Element<kType>*>(array.data) + at;
    if (in_pieces) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
      return;
    }
    uint32_t lone[4 * kWords];
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      if constexpr (kType == DType::f32) {
        lone[i] = __float_as_uint(from[i * array.channel]);
      } else {
        uint32_t high = from[(2 * i + 1) * array.channel].bits;
        lone[i] = high << 16 | from[2 * i * array.channel].bits;
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = uint4{lone[4 * i], lone[4 * i + 1], lone[4 * i + 2], lone[4 * i + 3]};
  }

  __device__ __forceinline__ void unpack(float (&x)[kSpan]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t word[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kType == DType::f32) {
          x[4 * i + j] = __uint_as_float(word[j]);
        } else if constexpr (kType == DType::bf16) {
          float2 pair = unpack_bf16(word[j]);
          x[2 * j] = pair.x;
          x[2 * j + 1] = pair.y;
        } else {
          x[2 * j] = to_float(Half{static_cast<uint16_t>(word[j])});
          x[2 * j + 1] = to_float(Half{static_cast<uint16_t>(word[j] >> 16)});
        }
      }
    }
  }
};

// The place of a thread in a round of kStep rows.
template <int kLanes, int kPieces>
struct RowLane {
  static constexpr int kStep = kThreads / kLanes;
  static constexpr int kStride = kLanes * kSpan;  // channels from one piece to the next
  int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  uint32_t flips[kPieces] = {};  // signs of R: bit i of a piece's channel i

  __device__ __forceinline__ int channel(int piece) const { return lane * kSpan + piece * kStride; }

  // All lanes of a warp call it: each hashes some channels.
  __device__ __forceinline__ void find_flips() {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
      for (int part = 0; part < kStride; part += 32) {
        int i = piece * kStride + part + static_cast<int>(threadIdx.x % 32);
        uint32_t signs = __ballot_sync(kWarp, flips_channel(i));
        if (lane * kSpan / 32 * 32 == part) flips[piece] = signs >> lane * kSpan % 32;
      }
    }
  }
};

template <int kStep, int kPieces>
__device__ __forceinline__ void mix_pieces(float (&x)[kPieces][kSpan]) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if ((piece & kStep) != 0) continue;
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      float a = x[piece][i], b = x[piece + kStep][i];
      x[piece][i] = a + b;
      x[piece + kStep][i] = a - b;
    }
  }
}

// x R without the last factor 1 / sqrt(size), in the order of the CPU: runs of 1, 2 and 4 channels
// inside a piece, then between lanes, then between pieces. All lanes of a warp call it.
template <int kLanes, int kPieces>
__device__ __forceinline__ void rotate_row(const RowLane<kLanes, kPieces>& at, int32_t size,
                                           float (&x)[kPieces][kSpan]) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      uint32_t sign = at.flips[piece] << (31 - i) & 0x80000000u;
      x[piece][i] = __uint_as_float(__float_as_uint(x[piece][i]) ^ sign);
    }
#pragma unroll
    for (int half = 1; half < kSpan; half *= 2) {
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        if ((i & half) != 0) continue;
        float a = x[piece][i], b = x[piece][i + half];
        x[piece][i] = a + b;
        x[piece][i + half] = a - b;
      }
    }
  }
#pragma unroll
  for (int half = 1; half < kLanes; half *= 2) {
    if (half * kSpan >= size) return;
    float sign = (at.lane & half) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        float other = __shfl_xor_sync(kWarp, x[piece][i], half);
        x[piece][i] = __fmaf_rn(x[piece][i], sign, other);  // exact but for the sum, as + and -
      }
    }
  }
  if constexpr (kPieces % 2 == 0) {
    if (kLanes * kSpan < size) mix_pieces<1>(x);
  }
  if constexpr (kPieces == 4) {
    if (kLanes * kSpan * 2 < size) mix_pieces<2>(x);
  }
}

// x / scale to the last bit, by its reciprocal: each step halves no error but squares it, and the
// second one rounds as the quotient would (Markstein). Signs of zeros stay.
struct Divisor {
  float scale, reciprocal;
  bool is_usual;  // no step can leave the range of float where the code is not 0

  __device__ explicit Divisor(float scale)
      : scale(scale), reciprocal(1.0f / scale), is_usual(scale >= 0x1p-60f && scale <= 0x1p60f) {}

  __device__ __forceinline__ float quotient(float x) const {
    float q = x * reciprocal;
    q = __fmaf_rn(__fmaf_rn(q, scale, -x), -reciprocal, q);
    return __fmaf_rn(__fmaf_rn(q, scale, -x), -reciprocal, q);
  }
};

// 8 codes in two words.
__device__ __forceinline__ uint2 pack_codes(const float (&x)[kSpan]) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = pack2_e4m3(x[2 * i], x[2 * i + 1]);
  return uint2{pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// Bit 7 of each byte that is a NaN; other bits mean nothing.
__device__ __forceinline__ uint32_t find_nans(uint2 codes) {
  return ((codes.x & 0x7f7f7f7fu) + 0x01010101u) | ((codes.y & 0x7f7f7f7fu) + 0x01010101u);
}

// Codes of a row's pieces. The quick quotients of what is not finite are NaN: then, and for odd
// scales, all are divided as ever.
template <int kPieces>
__device__ __forceinline__ void divide_row(const Divisor& by, const float (&x)[kPieces][kSpan],
                                           uint2 (&codes)[kPieces]) {
  uint32_t nans = 0;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    float y[kSpan];
#pragma unroll
    for (int i = 0; i < kSpan; ++i) y[i] = by.quotient(x[piece][i]);
    codes[piece] = pack_codes(y);
    nans |= find_nans(codes[piece]);
  }
  if ((nans & 0x80808080u) == 0 && by.is_usual) return;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    float y[kSpan];
#pragma unroll
    for (int i = 0; i < kSpan; ++i) y[i] = x[piece][i] / by.scale;
    codes[piece] = pack_codes(y);
  }
}

// Turns 4 rows of 4 bytes, `pitch` words apart, into words of 4 rows, one of each channel.
__device__ __forceinline__ void turn_bytes(const uint32_t* from, int pitch, int four,
                                           uint32_t (&turned)[4][4]) {
  uint32_t a = from[0], b = from[pitch], c = from[2 * pitch], d = from[3 * pitch];
  uint32_t low0 = __byte_perm(a, b, 0x5140), low1 = __byte_perm(c, d, 0x5140);
  uint32_t high0 = __byte_perm(a, b, 0x7362), high1 = __byte_perm(c, d, 0x7362);
  turned[0][four] = __byte_perm(low0, low1, 0x5410);
  turned[1][four] = __byte_perm(low0, low1, 0x7632);
  turned[2][four] = __byte_perm(high0, high1, 0x5410);
  turned[3][four] = __byte_perm(high0, high1, 0x7632);
}

inline int item_of(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::e4m3 ? 1 : 2; }

// Whether 8 channels of a row lie side by side on `bytes`.
inline bool lies_in_pieces(const QuantizeArray& array, int item, uintptr_t bytes) {
  uint64_t bits = reinterpret_cast<uintptr_t>(array.data);
  for (int64_t stride : {array.strides.batch, array.strides.seq, array.strides.head})
    bits |= static_cast<uint64_t>(stride * item);
  return array.channel == 1 && bits % bytes == 0;
}

}  // namespace
}  // namespace cuattn
