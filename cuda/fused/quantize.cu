// SPDX-License-Identifier: Apache-2.0
// quantize on CUDA: a thread block takes 128 rows of a head, and while it works on them the next ones
// come. Where they have a scale of their own it finds the largest size and writes the codes at once.
// Else one kernel measures all rows and another writes the codes, from the end on, which L2 has read
// last. The largest size goes to its scale by an atomic maximum of its bits, which no order changes,
// so that codes and scales are those of the CPU.
// The same on the CPU: cpu/quantize.cpp. Next: quantize_part.cuh, what happens to a part;
// row_tile.cuh, to a row; dequantize.cu.
#include <algorithm>
#include <cmath>

#include "cuattn/device/overlap.cuh"
#include "cuda/fused/means.cuh"
#include "cuda/fused/quantize_part.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

// Of a multiprocessor, by the registers.
constexpr int kThreadsThere = 512;

constexpr int most_threads(bool wide, int dim) {
  return dim != 0 ? TileShape(dim, wide ? 4 : 2).threads() : (wide ? 2 : 4) * kScaleRows;
}

template <bool kWide, int kDim>
__global__ void __launch_bounds__(most_threads(kWide, kDim))
    quantize_step(const __grid_constant__ QuantizeParams p, const __grid_constant__ Step step) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Shared shared;
  wait_for_previous_kernel();
  release_next_kernel();
  Worker<kWide, kDim>(p, step, shared, memory).run();
}

// One thread an element of the scale: 0 before the maxima, or 1 where there are no rows.
__global__ void __launch_bounds__(kThreads)
    set_scales(const __grid_constant__ Float8Scale s, float value) {
  wait_for_previous_kernel();
  release_next_kernel();
  int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= s.extents[0] * s.extents[1] * s.extents[2]) return;
  int64_t line = index / s.extents[2];
  const_cast<float*>(
      s.data)[line / s.extents[1] * s.strides[0] + line % s.extents[1] * s.strides[1] +
              index % s.extents[2] * s.strides[2]] = value;
}

// Whether each block of rows of each head has a scale of its own, which no other block takes part in.
bool has_own_scales(const QuantizeParams& p) {
  const Float8Scale& s = p.scale;
  int64_t blocks = device::ceil_div<int64_t>(p.rows, kScaleRows);
  return p.gives_scale && p.part == ScalePart::rows && s.group == 1 && s.extents[0] == p.batch &&
         s.extents[1] == p.heads && s.extents[2] == blocks && p.out_rows >= p.rows;
}

// Kernels of one call, in order.
struct Launcher {
  const QuantizeParams& p;
  int major;
  cudaStream_t stream;
  const char* fn = "quantize";

  void set_scales(float value) const {
    const Float8Scale& s = p.scale;
    int64_t scales = s.extents[0] * s.extents[1] * s.extents[2];
    if (scales == 0) return;
    unsigned blocks = blocks_of(fn, device::ceil_div<int64_t>(scales, kThreads));
    launch_overlapping(cuattn::set_scales, blocks, kThreads, 0, major, stream, s, value);
  }

  // One kernel over `rows` rows of each head.
  template <bool kWide, int kDim>
  void launch(Step step, int64_t rows) const {
    static uint64_t allowed = 0;
    int64_t blocks = device::ceil_div<int64_t>(rows, kScaleRows);
    step.rows = rows;
    step.parts = blocks_of(fn, int64_t{p.batch} * p.heads * blocks);
    step.blocks = static_cast<uint32_t>(blocks);
    if (step.parts == 0) return;
    int item = item_of(p.x.dtype);
    const TileShape& shape = step.shape;
    int most = std::max(TileShape(2 * kChannels, item).bytes(), TileShape(kMostDim, item).bytes());
    int granted = granted_shared_memory() - static_cast<int>(sizeof(Shared));
    step.prefetches = 2 * shape.bytes() <= granted;
    int there = std::max(kThreadsThere / shape.threads(), 1);
    unsigned together =
        static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount) * there);
    unsigned grid = std::min(step.parts, together);
    // Backwards by a grid is forwards by all others.
    uint32_t on = step.from_last ? step.parts - grid : grid;
    step.on = Part(on, static_cast<uint32_t>(p.heads), step.blocks);
    allow_shared_memory(quantize_step<kWide, kDim>, std::min(2 * most, granted), allowed);
    launch_overlapping(quantize_step<kWide, kDim>, grid, shape.threads(),
                       (step.prefetches ? 2 : 1) * shape.bytes(), major, stream, p, step);
  }

  template <bool kWide, int kDim>
  void run() const {
    Step step{};
    step.shape = TileShape(p.dim, item_of(p.x.dtype));
    step.in_pieces = lies_in_pieces(p.x, item_of(p.x.dtype), 16);
    step.out_pieces = lies_in_pieces(p.out, 1, 8);
    step.by_columns = lies_by_columns(p.out);
    uint64_t mean_bits = reinterpret_cast<uintptr_t>(p.mean) | p.mean_batch * 4 | p.mean_head * 4;
    step.mean_pieces = mean_bits % 16 == 0;
    uint64_t shift_bits =
        reinterpret_cast<uintptr_t>(p.shift_mean) | p.shift_mean_batch * 4 | p.shift_mean_head * 4;
    step.shift_pieces = shift_bits % 16 == 0;
    step.norm = 1.0f;
    if (p.rotates) step.norm /= std::sqrt(static_cast<float>(hadamard_size(p.dim)));
    step.writes = true;
    step.measures = has_own_scales(p);
    if (p.gives_scale && !step.measures) {
      Step measuring = step;
      measuring.measures = true;
      measuring.writes = false;
      launch<kWide, kDim>(measuring, p.rows);
      step.from_last = true;
    }
    launch<kWide, kDim>(step, p.out_rows);
  }
};

}  // namespace

void launch_quantize(const QuantizeParams& p, cudaStream_t stream) {
  Launcher launcher{p, device_major(), stream};
  bool is_empty = p.batch == 0 || p.heads == 0;
  with_dtype(launcher.fn, p.x.dtype, [&]<DType kType>() {
    constexpr bool kWide = kType == DType::f32;
    if (p.gives_mean && !is_empty) write_means<kWide>(p, launcher.major, stream);
    bool shares_scales = p.gives_scale && !has_own_scales(p);
    if (shares_scales) launcher.set_scales(is_empty || p.rows == 0 ? 1.0f : 0.0f);
    if (is_empty) return;
    if (kWide || p.dim != 64 && p.dim != 128 && p.dim != 256) return launcher.run<kWide, 0>();
    if constexpr (!kWide) {
      if (p.dim == 64) return launcher.run<false, 64>();
      if (p.dim == 128) return launcher.run<false, 128>();
      launcher.run<false, 256>();
    }
  });
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
