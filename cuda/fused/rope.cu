// SPDX-License-Identifier: Apache-2.0
// apply_rope, at the rate of memory: a thread holds as many columns of cos and sin as 16 bytes have
// elements, and turns with them the two pieces of four heads that they belong to. Source:
// arXiv:2104.09864. The same on the CPU: cpu/fused_rows.cpp.
#include "cuda/fused/rows.cuh"
#include "cuda/fused/turn.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kThreads = 256, kBlocksPerSm = 3;  // blocks that hide the loads of one another
constexpr int kHeads = 4;                        // of an item: 8 loads of 16 bytes in flight

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

  // The two pieces of `kSize` columns of cos and sin, from `column` on.
  __device__ void turn(int column, int64_t position, bool aligned) const {
    TurnPlace<kSize> place(p, column);
    P a[kHeads], b[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) continue;
      a[h] = P::load(x + h * p.x_strides.head + place.low);
      b[h] = P::load(x + h * p.x_strides.head + place.high);
    }
    Turn<kSize> turn;
    turn.load(p, position, column, aligned);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) continue;
      float low[kSize], high[kSize];
      a[h].unpack(low), b[h].unpack(high);
      turn.apply(p.interleaved, low, high);
      a[h].pack(low), b[h].pack(high);
      a[h].store(out + h * p.out_strides.head + place.low);
      b[h].store(out + h * p.out_strides.head + place.high);
    }
  }
};

template <DType kType, int kSize>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    rotate(const __grid_constant__ RotateParams p, const __grid_constant__ RotateTile tile) {
  using T = Element<kType>;
  int64_t first = int64_t{blockIdx.x} * tile.rows, total = p.batch * p.seqlen;
  int rows = static_cast<int>(min(int64_t{tile.rows}, total - first));
  int64_t first_b = first / p.seqlen;
  uint32_t first_s = static_cast<uint32_t>(first % p.seqlen);
  int pieces = tile.turned + tile.copied;
  bool aligned = has_aligned_tables(p);
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
      work.turn(piece * kSize, p.position(b, s), aligned);
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
