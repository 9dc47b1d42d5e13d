// SPDX-License-Identifier: Apache-2.0
// apply_rope, at the rate of memory: a thread holds as many columns of cos and sin as 16 bytes have
// elements, and turns with them the two pieces of four heads that they belong to. Source:
// arXiv:2104.09864. The same on the CPU: cpu/fused_rows.cpp.
#include "cuattn/device/rope.cuh"
#include "cuda/fused/rows.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kThreads = 256;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocksPerSm = 2;  // three would spill there
#else
constexpr int kBlocksPerSm = 3;  // that hide the loads of one another
#endif
constexpr int kHeads = 4;  // of an item: 8 loads of 16 bytes in flight

// How rows are dealt: a block takes `rows` of them, with `items` each, which are the pieces of
// groups of heads: first those that are turned, then those that are copied.
struct RotateTile {
  int rows, items, turned, copied;
};

template <DType kType, int kSize>
struct RotateRow {
  using T = Element<kType>;
  using P = PackedPiece<kType, kSize>;

  const RotateParams& p;
  const T* x;
  T* out;
  int heads;  // that there are of the group

  __device__ void copy(int column) const {
    int d = column < p.offset ? column : column + p.rotary_dim;
    P pieces[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      if (h < heads) pieces[h] = P::load(x + h * p.x_strides.head + d);
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      if (h < heads) pieces[h].store(out + h * p.out_strides.head + d);
  }

  // The two pieces of `kSize` columns of cos and sin. Neighbours have these from two places of the
  // tables, so that the pieces of a warp lie side by side, as halves do.
  __device__ void turn(int column, const float* cos_row, const float* sin_row, bool aligned) const {
    bool is_apart = kSize >= 4 || !p.interleaved;
    int d = p.offset + (is_apart ? column : 2 * column);
    int other = d + (is_apart ? p.rotary_dim / 2 : kSize);
    P a[kHeads], b[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) continue;
      a[h] = P::load(x + h * p.x_strides.head + d);
      b[h] = P::load(x + h * p.x_strides.head + other);
    }
    Piece<float, kSize> cos, sin;
    if (kSize >= 4 && p.interleaved) {
      cos = load_two(cos_row, column, aligned);
      sin = load_two(sin_row, column, aligned);
    } else {
      cos = load_floats<kSize>(cos_row + column, aligned);
      sin = load_floats<kSize>(sin_row + column, aligned);
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) sin.x[i] = p.inverse ? -sin.x[i] : sin.x[i];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) continue;
      float low[kSize], high[kSize];
      a[h].unpack(low), b[h].unpack(high);
      p.interleaved ? turn_neighbours(cos, sin, low, high) : turn_halves(cos, sin, low, high);
      a[h].pack(low), b[h].pack(high);
      a[h].store(out + h * p.out_strides.head + d);
      b[h].store(out + h * p.out_strides.head + other);
    }
  }

  using Floats = Piece<float, kSize>;
  // The floats of the pairs in a piece at `column`, then those of the piece rotary_dim / 2 behind it.
  __device__ Floats load_two(const float* row, int column, bool aligned) const {
    constexpr int kHalf = kSize / 2 > 0 ? kSize / 2 : 1;
    bool far_aligned = aligned && p.rotary_dim % 16 == 0;
    auto near = load_floats<kHalf>(row + column / 2, aligned);
    auto far = load_floats<kHalf>(row + column / 2 + p.rotary_dim / 4, far_aligned);
    Floats both;
#pragma unroll
    for (int i = 0; i < kSize; ++i) both.x[i] = i < kHalf ? near.x[i] : far.x[i - kHalf];
    return both;
  }
  static __device__ void turn_halves(const Floats& cos, const Floats& sin, float (&low)[kSize],
                                     float (&high)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) turn_pair(cos.x[i], sin.x[i], low[i], high[i]);
  }
  // Elements 2 i and 2 i + 1 of both, end to end.
  static __device__ void turn_neighbours(const Floats& cos, const Floats& sin, float (&low)[kSize],
                                         float (&high)[kSize]) {
    auto at = [&](int i) -> float& { return i < kSize ? low[i] : high[i - kSize]; };
#pragma unroll
    for (int i = 0; i < kSize; ++i) turn_pair(cos.x[i], sin.x[i], at(2 * i), at(2 * i + 1));
  }
  static __device__ void turn_pair(float cos, float sin, float& a, float& b) {
    Rotated y = rotated(a, b, cos, sin);
    a = y.a, b = y.b;
  }
};

__device__ bool has_aligned_rows(const float* table, int64_t stride) {
  return reinterpret_cast<uintptr_t>(table) % 16 == 0 && stride % 4 == 0;
}

template <DType kType, int kSize>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    rotate(const __grid_constant__ RotateParams p, const __grid_constant__ RotateTile tile) {
  using T = Element<kType>;
  int64_t first = int64_t{blockIdx.x} * tile.rows, total = p.batch * p.seqlen;
  int rows = static_cast<int>(min(int64_t{tile.rows}, total - first));
  int64_t first_b = first / p.seqlen;
  uint32_t first_s = static_cast<uint32_t>(first % p.seqlen);
  int pieces = tile.turned + tile.copied;
  bool aligned = has_aligned_rows(p.cos, p.cos_stride) && has_aligned_rows(p.sin, p.sin_stride);
  for (int index = threadIdx.x; index < rows * tile.items; index += kThreads) {
    int row = index / tile.items, item = index % tile.items;
    int head = item / pieces * kHeads, piece = item % pieces;
    uint32_t place = first_s + static_cast<uint32_t>(row);  // from the begin of sequence first_b on
    int64_t b = first_b + place / static_cast<uint32_t>(p.seqlen);
    int64_t s = place % static_cast<uint32_t>(p.seqlen);
    const T* x = static_cast<const T*>(p.x) + b * p.x_strides.batch + s * p.x_strides.seq +
                 head * p.x_strides.head;
    T* out = static_cast<T*>(p.out) + b * p.out_strides.batch + s * p.out_strides.seq +
             head * p.out_strides.head;
    RotateRow<kType, kSize> work{p, x, out, min(kHeads, p.num_heads - head)};
    if (piece < tile.turned) {
      int64_t position = p.position(b, s);
      work.turn(piece * kSize, p.cos + position * p.cos_stride, p.sin + position * p.sin_stride,
                aligned);
    } else {
      work.copy((piece - tile.turned) * kSize);
    }
  }
}

template <DType kType, int kSize>
void launch(const RotateParams& p, cudaStream_t stream) {
  RotateTile tile{};
  tile.turned = p.rotary_dim / 2 / kSize;
  tile.copied = p.x == p.out ? 0 : (p.head_dim - p.rotary_dim) / kSize;
  tile.items = ceil_div(p.num_heads, kHeads) * (tile.turned + tile.copied);
  tile.rows = std::max(1, kThreads / tile.items);
  int64_t blocks = ceil_div<int64_t>(p.batch * p.seqlen, tile.rows);
  rotate<kType, kSize><<<blocks_of("apply_rope", blocks), kThreads, 0, stream>>>(p, tile);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace

void launch_rotate(const RotateParams& p, cudaStream_t stream) {
  if (p.batch * p.seqlen == 0 || p.num_heads == 0) return;
  with_dtype("apply_rope", p.dtype, [&]<DType kType>() {
    constexpr int kItem = sizeof(Element<kType>), kSize = 16 / kItem;
    const Strides &in = p.x_strides, &out = p.out_strides;
    bool wide = p.rotary_dim % (2 * kSize) == 0 &&
                has_16_byte_pieces(kItem, {p.x, p.out}, p.head_dim, p.offset, in.batch, in.seq,
                                   in.head, out.batch, out.seq, out.head);
    wide ? launch<kType, kSize>(p, stream) : launch<kType, 1>(p, stream);
  });
}

}  // namespace cuattn
