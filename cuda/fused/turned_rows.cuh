// SPDX-License-Identifier: Apache-2.0
// Rows that quantize turns first, with the bits of apply_rope: a tile in shared memory in place, by
// threads that have both elements of a pair, and for the mean of the keys in registers. Next:
// quantize_part.cuh, means.cuh.
#pragma once

#include "cuda/fused/codes.cuh"
#include "cuda/fused/steps.cuh"
#include "cuda/fused/turn.cuh"

namespace cuattn {
namespace {

// Whether the pieces of a row turn as wholes, in twos, by columns of the tables that lie on 16 bytes.
inline bool turns_in_pieces(const RotateParams& p) {
  return p.rotary_dim % (2 * kSpan) == 0 && p.offset % kSpan == 0 && has_aligned_tables(p);
}

// One element of x, and its nearest in the dtype.
template <bool kWide>
struct Number {
  using Bits = std::conditional_t<kWide, uint32_t, uint16_t>;

  static __device__ __forceinline__ float read(const void* data, int64_t at, bool is_half) {
    return number(static_cast<const Bits*>(data)[at], is_half);
  }
  static __device__ __forceinline__ float number(Bits bits, bool is_half) {
    if constexpr (kWide) {
      return __uint_as_float(bits);
    } else {
      return is_half ? to_float(Half{bits}) : to_float(Bfloat16{bits});
    }
  }
  static __device__ __forceinline__ Bits round(float x, bool is_half) {
    if constexpr (kWide) {
      return __float_as_uint(x);
    } else {
      return is_half ? from_float<Half>(x).bits : from_float<Bfloat16>(x).bits;
    }
  }
};

// ---- a tile

// Two pieces of a row of a tile, kSpan channels each, or two elements (kSize 1).
template <bool kWide, int kSize>
__device__ __forceinline__ void turn_two(const Turn<kSize>& turn, bool interleaved, bool is_half,
                                         char* low_at, char* high_at) {
  float low[kSize], high[kSize];
  if constexpr (kSize == 1) {
    using N = Number<kWide>;
    low[0] = N::read(low_at, 0, is_half), high[0] = N::read(high_at, 0, is_half);
    turn.apply(interleaved, low, high);
    *reinterpret_cast<typename N::Bits*>(low_at) = N::round(low[0], is_half);
    *reinterpret_cast<typename N::Bits*>(high_at) = N::round(high[0], is_half);
  } else {
    RawPiece<kWide> a, b;
    a.take(low_at), b.take(high_at);
    a.unpack(is_half, low), b.unpack(is_half, high);
    turn.apply(interleaved, low, high);
    a.pack(is_half, low), b.pack(is_half, high);
    a.store(low_at), b.store(high_at);
  }
}

// The first `rows` rows of a tile that is there, which begins at row `from` of a part. All threads call
// it; a barrier later all rows are turned. kTogether: rows whose cos and sin come together.
template <bool kWide, int kSize, int kTogether>
__device__ __forceinline__ void turn_tile(const QuantizeParams& p, const TileShape& shape,
                                          const Part& part, int64_t from, int rows, char* memory) {
  constexpr int kItem = kWide ? 4 : 2;
  const RotateParams& rope = p.rope;
  bool is_half = p.x.dtype == DType::f16;
  int thread = static_cast<int>(threadIdx.x);
  int shift = 32 - __clz(rope.rotary_dim / 2 / kSize - 1);  // threads of a row, as a power of two
  int column = (thread & ((1 << shift) - 1)) * kSize, on = shape.threads() >> shift;
  if (column >= rope.rotary_dim / 2) rows = 0;
  TurnPlace<kSize> place(rope, column);
#pragma unroll 1
  for (int first = thread >> shift; first < rows; first += kTogether * on) {
    Turn<kSize> turns[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int64_t position = rope.position(part.b, from + min(first + i * on, rows - 1));
      if constexpr (kSize == 1) {
        turns[i].load(rope, position, column, false);
      } else {
        turns[i].load_aligned(rope, position, column);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int row = first + i * on;
      char* at = memory + shape.at(row);
      if (row < rows)
        turn_two<kWide, kSize>(turns[i], rope.interleaved, is_half, at + place.low * kItem,
                               at + place.high * kItem);
    }
  }
}

// ---- the mean of the keys

// Which 16 channels a thread of the mean has: two pieces that turn together, or two that stay.
struct PairPlace {
  int low, high, column;
  bool turns;

  __device__ __forceinline__ PairPlace(const RotateParams& rope, int channel) {
    int first = channel / (2 * kSpan) * 2 * kSpan;
    turns = first < rope.rotary_dim;
    column = turns ? first / 2 : 0;
    TurnPlace<kSpan> place(rope, column);
    low = turns ? place.low : staying(rope, first - rope.rotary_dim);
    high = turns ? place.high : staying(rope, first - rope.rotary_dim + kSpan);
  }
  // The channel of a row that `channel` of those stands for.
  __device__ __forceinline__ int channel(int channel) const {
    int i = channel % (2 * kSpan);
    return i < kSpan ? low + i : high + i - kSpan;
  }

 private:
  static __device__ __forceinline__ int staying(const RotateParams& rope, int index) {
    return index < rope.offset ? index : index + rope.rotary_dim;
  }
};

// They of a row, turned and rounded. Pieces of x lie side by side on 16 bytes.
template <DType kType>
struct TurnedPair {
  const QuantizeParams& p;
  int64_t low_at, high_at;  // of row 0
  int b;
  PairPlace place;

  __device__ TurnedPair(const QuantizeParams& p, int64_t at, int b, int channel)
      : p(p), b(b), place(p.rope, channel) {
    low_at = at + place.low;
    high_at = at + place.high;
  }
  __device__ __forceinline__ void operator()(int64_t row, float (&x)[2 * kSpan]) const {
    RawPiece<false> pieces[2];
    pieces[0].load(p.x, true, low_at + row * p.x.strides.seq);
    pieces[1].load(p.x, true, high_at + row * p.x.strides.seq);
    Turn<kSpan> turn;
    turn.load_aligned(p.rope, p.rope.position(b, row), place.column);
    auto& low = reinterpret_cast<float (&)[kSpan]>(x[0]);
    auto& high = reinterpret_cast<float (&)[kSpan]>(x[kSpan]);
    pieces[0].template unpack<kType>(low), pieces[1].template unpack<kType>(high);
    turn.apply(p.rope.interleaved, low, high);
    RawPiece<false> turned[2];
    turned[0].template pack<kType>(low), turned[1].template pack<kType>(high);
    if (!place.turns) turned[0] = pieces[0], turned[1] = pieces[1];
    turned[0].template unpack<kType>(low), turned[1].template unpack<kType>(high);
  }
};

// A piece of a row, turned and rounded: by single elements, wherever their partners lie.
template <bool kWide>
struct TurnedPiece {
  const QuantizeParams& p;
  int64_t at;  // of channel 0 in row 0
  int b, channel;

  __device__ __forceinline__ void operator()(int64_t row, float (&x)[kSpan]) const {
    const RotateParams& rope = p.rope;
    int64_t position = rope.position(b, row), from = at + row * p.x.strides.seq;
    bool is_half = p.x.dtype == DType::f16;
    auto read = [&](int c) {
      return Number<kWide>::read(p.x.data, from + c * p.x.channel, is_half);
    };
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      int c = channel + i, d = c - rope.offset, half = rope.rotary_dim / 2;
      if (d < 0 || d >= rope.rotary_dim) {
        x[i] = read(c);
        continue;
      }
      bool is_low = rope.interleaved ? d % 2 == 0 : d < half;
      int column = rope.interleaved ? d / 2 : is_low ? d : d - half;
      TurnPlace<1> place(rope, column);
      Turn<1> turn;
      turn.load(rope, position, column, false);
      float low[1] = {read(place.low)}, high[1] = {read(place.high)};
      turn.apply(rope.interleaved, low, high);
      float found = is_low ? low[0] : high[0];
      x[i] = Number<kWide>::number(Number<kWide>::round(found, is_half), is_half);
    }
  }
};

}  // namespace
}  // namespace cuattn
