// SPDX-License-Identifier: Apache-2.0
// What the kernels of this folder share: pieces of rows, of 16 bytes where the rows allow it. Next:
// norm.cu.
#pragma once

#include "cuattn/device/convert.cuh"
#include "cuda/host/launch.h"

namespace cuattn {
namespace {

using namespace device;

template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Piece {
  T x[kSize];
};

template <int kSize, class T>
__device__ __forceinline__ Piece<T, kSize> load_piece(const T* from) {
  return *reinterpret_cast<const Piece<T, kSize>*>(from);
}

// kSize floats, by 16 bytes where `aligned` says that they start so.
template <int kSize>
__device__ __forceinline__ Piece<float, kSize> load_floats(const float* from, bool aligned) {
  Piece<float, kSize> y;
  if constexpr (kSize % 4 == 0) {
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
        auto four = *reinterpret_cast<const Piece<float, 4>*>(from + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) y.x[i + j] = four.x[j];
      }
      return y;
    }
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) y.x[i] = from[i];
  return y;
}

template <class T, int kSize>
__device__ __forceinline__ void store_piece(T* to, const float (&x)[kSize]) {
  Piece<T, kSize> y;
#pragma unroll
  for (int i = 0; i < kSize; ++i) y.x[i] = from_float<T>(x[i]);
  *reinterpret_cast<Piece<T, kSize>*>(to) = y;
}

// A piece as it lies in memory, for kernels that keep many: two 16-bit elements a register, where a Piece
// takes one for each.
template <DType kType, int kSize>
struct alignas(kSize * sizeof(Element<kType>)) PackedPiece {
  using T = Element<kType>;
  static constexpr bool kPairs = sizeof(T) == 2 && kSize > 1;
  static constexpr int kWords = kPairs ? kSize / 2 : kSize;
  std::conditional_t<kPairs, uint32_t, T> w[kWords];

  static __device__ PackedPiece load(const T* from) {
    return *reinterpret_cast<const PackedPiece*>(from);
  }
  __device__ void store(T* to) const { *reinterpret_cast<PackedPiece*>(to) = *this; }
  __device__ void unpack(float (&x)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (!kPairs) {
        x[i] = to_float(w[i]);
      } else if constexpr (kType == DType::bf16) {
        float2 pair = unpack_bf16(w[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      } else {
        x[2 * i] = to_float(Half{static_cast<uint16_t>(w[i])});
        x[2 * i + 1] = to_float(Half{static_cast<uint16_t>(w[i] >> 16)});
      }
    }
  }
  __device__ void pack(const float (&x)[kSize]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kPairs) {
        w[i] = pack2<kType>(x[2 * i], x[2 * i + 1]);
      } else {
        w[i] = from_float<T>(x[i]);
      }
    }
  }
};

// Whether rows of `item` bytes an element can be cut into pieces of 16 bytes. `elements`: all
// strides and lengths; nullptr may lie anywhere.
template <class... Elements>
bool has_16_byte_pieces(int item, std::initializer_list<const void*> starts, Elements... elements) {
  uint64_t bits = 0;
  for (const void* start : starts) bits |= reinterpret_cast<uintptr_t>(start);
  for (int64_t element : {int64_t{elements}...}) bits |= static_cast<uint64_t>(element * item);
  return copy_unit(bits) == 16;
}

// Calls kernel-launching `body` with the dtype as a template value.
template <class Body>
void with_dtype(const char* function, DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32: return body.template operator()<DType::f32>();
    case DType::f16: return body.template operator()<DType::f16>();
    case DType::bf16: return body.template operator()<DType::bf16>();
    default: CUATTN_ASSERT(false, function, ": dtype ", static_cast<int>(dtype));
  }
}

// Blocks of a one-dimensional grid, for `function` of the caller.
inline unsigned blocks_of(const char* function, int64_t blocks) {
  CUATTN_REQUIRE(blocks <= 0x7fffffff, function, ": x must need at most 2147483647 thread blocks, ",
                 "got ", blocks, "; split the call");
  return static_cast<unsigned>(blocks);
}

}  // namespace
}  // namespace cuattn
