// SPDX-License-Identifier: Apache-2.0
// add_residual, at the rate of memory: a sum of float32 or the dtype and of the dtype, rounded once.
// The same on the CPU: cpu/fused_rows.cpp.
#include "cuda/fused/rows.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kThreads = 256;

// kSize elements as floats.
template <int kSize, class T>
__device__ __forceinline__ void load_values(const T* from, float (&to)[kSize]) {
  if constexpr (std::is_same_v<T, float>) {
    Piece<float, kSize> piece = load_floats<kSize>(from, true);
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = piece.x[i];
  } else {
    Piece<T, kSize> piece = load_piece<kSize>(from);
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = to_float(piece.x[i]);
  }
}

// A thread has one piece of a head: its place among all pieces, as `Index` counts them.
template <DType kX, DType kType, int kSize, class Index>
__global__ void __launch_bounds__(kThreads) add_residual(const __grid_constant__ AddParams p) {
  Index index = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  const Index pieces = static_cast<Index>(p.head_dim / kSize);
  const Index heads = static_cast<Index>(p.num_heads), rows = static_cast<Index>(p.seqlen);
  if (index >= pieces * heads * rows * static_cast<Index>(p.batch)) return;
  const int64_t column = static_cast<int64_t>(index % pieces) * kSize;
  index /= pieces;
  const int64_t head = static_cast<int64_t>(index % heads);
  index /= heads;
  const int64_t row = static_cast<int64_t>(index % rows), b = static_cast<int64_t>(index / rows);
  auto place = [&](const Strides& s) { return b * s.batch + row * s.seq + head * s.head + column; };
  float x[kSize], residual[kSize];
  load_values(static_cast<const Element<kX>*>(p.x) + place(p.x_strides), x);
  load_values(static_cast<const Element<kType>*>(p.residual) + place(p.residual_strides), residual);
#pragma unroll
  for (int i = 0; i < kSize; ++i) x[i] += residual[i];
  store_piece(static_cast<Element<kType>*>(p.out) + place(p.out_strides), x);
}

template <DType kX, DType kType, int kSize>
void launch(const AddParams& p, int64_t pieces, cudaStream_t stream) {
  unsigned blocks = blocks_of("add_residual", (pieces - 1) / kThreads + 1);
  // Note: divisions of 64 bits take three times as long.
  auto kernel = pieces <= 0x7fffffff ? add_residual<kX, kType, kSize, uint32_t>
                                     : add_residual<kX, kType, kSize, uint64_t>;
  kernel<<<blocks, kThreads, 0, stream>>>(p);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <DType kX, DType kType>
void launch(const AddParams& p, cudaStream_t stream) {
  constexpr int kItem = sizeof(Element<kType>), kSize = 16 / kItem;
  const Strides &x = p.x_strides, &r = p.residual_strides, &o = p.out_strides;
  bool is_wide = has_16_byte_pieces(kItem, {p.residual, p.out}, p.head_dim, r.batch, r.seq, r.head,
                                    o.batch, o.seq, o.head) &&
                 has_16_byte_pieces(sizeof(Element<kX>), {p.x}, x.batch, x.seq, x.head);
  int64_t elements = p.batch * p.seqlen * p.num_heads * p.head_dim;
  is_wide ? launch<kX, kType, kSize>(p, elements / kSize, stream)
          : launch<kX, kType, 1>(p, elements, stream);
}

}  // namespace

void launch_add(const AddParams& p, cudaStream_t stream) {
  with_dtype("add_residual", p.dtype, [&]<DType kType>() {
    p.x_dtype == DType::f32 ? launch<DType::f32, kType>(p, stream)
                            : launch<kType, kType>(p, stream);
  });
}

}  // namespace cuattn
