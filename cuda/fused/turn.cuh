// SPDX-License-Identifier: Apache-2.0
// Two pieces of a row and the columns of cos and sin that turn them, as apply_rope and quantize have
// them. Source: arXiv:2104.09864. Next: rope.cu, turned_rows.cuh.
#pragma once

#include "cuattn/device/rope.cuh"
#include "cuattn/params/fused.h"
#include "cuda/fused/rows.cuh"

namespace cuattn {
namespace {

CUATTN_HOST_DEVICE bool has_aligned_rows(const float* table, int64_t stride) {
  return reinterpret_cast<uintptr_t>(table) % 16 == 0 && stride % 4 == 0;
}
// Whether pieces of columns of cos and sin start on 16 bytes.
CUATTN_HOST_DEVICE bool has_aligned_tables(const RotateParams& p) {
  return has_aligned_rows(p.cos, p.cos_stride) && has_aligned_rows(p.sin, p.sin_stride);
}

// Where the two pieces begin that turn together: those of halves, and of neighbours likewise, so that
// the pieces of a warp lie side by side. One pair of neighbours (kSize 1) lies together.
template <int kSize>
struct TurnPlace {
  int low, high;

  __device__ __forceinline__ TurnPlace(const RotateParams& p, int column) {
    bool is_apart = kSize >= 4 || !p.interleaved;
    low = p.offset + (is_apart ? column : 2 * column);
    high = low + (is_apart ? p.rotary_dim / 2 : kSize);
  }
};

// kSize columns of cos and sin from `column` on; of neighbours those of the pairs in both pieces, which
// come from two places of the tables. `aligned`: has_aligned_tables.
template <int kSize>
struct Turn {
  using Floats = Piece<float, kSize>;
  Floats cos, sin;

  __device__ __forceinline__ void load(const RotateParams& p, int64_t position, int column,
                                       bool aligned) {
    const float* cos_row = p.cos + position * p.cos_stride;
    const float* sin_row = p.sin + position * p.sin_stride;
    if (kSize >= 4 && p.interleaved) {
      cos = load_two(p, cos_row, column, aligned);
      sin = load_two(p, sin_row, column, aligned);
    } else {
      cos = load_floats<kSize>(cos_row + column, aligned);
      sin = load_floats<kSize>(sin_row + column, aligned);
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) sin.x[i] = p.inverse ? -sin.x[i] : sin.x[i];
  }

  // The same of 8 columns that lie on 16 bytes, without a branch.
  __device__ __forceinline__ void load_aligned(const RotateParams& p, int64_t position,
                                               int column) {
    static_assert(kSize == 8, "two times 16 bytes of each table");
    int near = p.interleaved ? column / 2 : column;
    int far = p.interleaved ? near + p.rotary_dim / 4 : near + 4;
    const float* cos_row = p.cos + position * p.cos_stride;
    const float* sin_row = p.sin + position * p.sin_stride;
    auto cos_near = load_piece<4>(cos_row + near), cos_far = load_piece<4>(cos_row + far);
    auto sin_near = load_piece<4>(sin_row + near), sin_far = load_piece<4>(sin_row + far);
    float sign = p.inverse ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      cos.x[i] = i < 4 ? cos_near.x[i] : cos_far.x[i - 4];
      sin.x[i] = sign * (i < 4 ? sin_near.x[i] : sin_far.x[i - 4]);
    }
  }

  __device__ __forceinline__ void apply(bool interleaved, float (&low)[kSize],
                                        float (&high)[kSize]) const {
    interleaved ? turn_neighbours(low, high) : turn_halves(low, high);
  }

 private:
  // The floats of the pairs in a piece at `column`, then those of the piece rotary_dim / 2 behind it.
  static __device__ __forceinline__ Floats load_two(const RotateParams& p, const float* row,
                                                    int column, bool aligned) {
    constexpr int kHalf = kSize / 2 > 0 ? kSize / 2 : 1;
    bool far_aligned = aligned && p.rotary_dim % 16 == 0;
    auto near = load_floats<kHalf>(row + column / 2, aligned);
    auto far = load_floats<kHalf>(row + column / 2 + p.rotary_dim / 4, far_aligned);
    Floats both;
#pragma unroll
    for (int i = 0; i < kSize; ++i) both.x[i] = i < kHalf ? near.x[i] : far.x[i - kHalf];
    return both;
  }
  __device__ __forceinline__ void turn_halves(float (&low)[kSize], float (&high)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) turn_pair(cos.x[i], sin.x[i], low[i], high[i]);
  }
  // Elements 2 i and 2 i + 1 of both, end to end.
  __device__ __forceinline__ void turn_neighbours(float (&low)[kSize], float (&high)[kSize]) const {
    auto at = [&](int i) -> float& { return i < kSize ? low[i] : high[i - kSize]; };
#pragma unroll
    for (int i = 0; i < kSize; ++i) turn_pair(cos.x[i], sin.x[i], at(2 * i), at(2 * i + 1));
  }
  static __device__ __forceinline__ void turn_pair(float cos, float sin, float& a, float& b) {
    device::Rotated y = device::rotated(a, b, cos, sin);
    a = y.a, b = y.b;
  }
};

}  // namespace
}  // namespace cuattn
