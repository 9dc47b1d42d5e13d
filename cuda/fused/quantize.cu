// SPDX-License-Identifier: Apache-2.0
// quantize on CUDA: a thread block takes 128 rows of a head, and while it works on them the next ones
// come. Where they have a scale of their own it finds the largest size and writes the codes at once.
// Else one kernel measures all rows and another writes the codes, from the end on, which L2 has read
// last. The largest size goes to its scale by an atomic maximum of its bits, which no order changes,
// so that codes and scales are those of the CPU.
// quantize_rows takes numbers of 16 bits, 64, 128 or 256 a row, where all lies in pieces of 16 bytes and two
// stages are in shared memory; quantize_step takes any, and scales of channels. The same on the CPU: cpu/quantize.cpp. Next:
// quantize_rows.cuh and quantize_part.cuh, what happens to a part; dequantize.cu.
#include <algorithm>
#include <cmath>

#include "cuattn/device/overlap.cuh"
#include "cuda/fused/means.cuh"
#include "cuda/fused/quantize_part.cuh"
#include "cuda/fused/quantize_rows.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

// Of a multiprocessor, by the registers.
constexpr int kThreadsThere = 512;

template <bool kWide>
__global__ void __launch_bounds__((kWide ? 2 : 4) * kScaleRows)
    quantize_step(const __grid_constant__ QuantizeParams p, const __grid_constant__ Step step) {
  extern __shared__ __align__(128) char memory[];
  __shared__ Shared shared;
  wait_for_previous_kernel();
  release_next_kernel();
  Worker<kWide>(p, step, shared, memory).run();
}

template <int kLanes>
__global__ void __launch_bounds__(RowWorker<kLanes>::kWarps * 32,
                                  kRowWarps / RowWorker<kLanes>::kWarps)
    quantize_rows(const __grid_constant__ QuantizeParams p, const __grid_constant__ Step step) {
  extern __shared__ __align__(128) char memory[];
  __shared__ RowShared shared;
  wait_for_previous_kernel();
  release_next_kernel();
  RowWorker<kLanes>(p, step, shared, memory).run();
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

  // Whether rows are taken by warps.
  bool by_warps(const Step& step) const {
    bool is_whole = p.dim == 64 || p.dim == 128 || p.dim == 256;
    return p.x.dtype != DType::f32 && is_whole && step.in_pieces && step.mean_pieces &&
           step.shift_pieces && p.part != ScalePart::channels &&
           2 * step.stage + static_cast<int>(sizeof(RowShared)) <= granted_shared_memory() &&
           (step.by_columns || lies_in_pieces(p.out, 1, 16));
  }

  // One kernel over `rows` rows of each head. `tile`: bytes of shared memory for a part, `most` of any.
  template <class Kernel>
  void launch(Kernel* kernel, Step step, int64_t rows, int tile, int most, int shared,
              uint64_t& allowed) const {
    int64_t blocks = device::ceil_div<int64_t>(rows, kScaleRows);
    step.rows = rows;
    step.parts = blocks_of(fn, int64_t{p.batch} * p.heads * blocks);
    step.blocks = static_cast<uint32_t>(blocks);
    if (step.parts == 0) return;
    int granted = granted_shared_memory() - shared, threads = step.shape.threads();
    step.prefetches = 2 * tile <= granted;
    int there = std::max(kThreadsThere / threads, 1);
    unsigned together =
        static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount) * there);
    unsigned grid = std::min(step.parts, together);
    // Backwards by a grid is forwards by all others.
    uint32_t on = step.from_last ? step.parts - grid : grid;
    step.on = Part(on, static_cast<uint32_t>(p.heads), step.blocks);
    allow_shared_memory(kernel, std::min(2 * most, granted), allowed);
    launch_overlapping(kernel, grid, threads, (step.prefetches ? 2 : 1) * tile, major, stream, p,
                       step);
  }
  template <bool kWide>
  void launch_tiles(const Step& step, int64_t rows) const {
    static uint64_t allowed = 0;
    int item = kWide ? 4 : 2;
    int most = std::max(TileShape(2 * kChannels, item).bytes(), TileShape(kMostDim, item).bytes());
    launch(quantize_step<kWide>, step, rows, step.shape.bytes(), most, sizeof(Shared), allowed);
  }
  template <int kLanes>
  void launch_rows(const Step& step, int64_t rows) const {
    static uint64_t allowed = 0;
    launch(quantize_rows<kLanes>, step, rows, step.stage, RowStage(kLanes, true, true).bytes(),
           sizeof(RowShared), allowed);
  }

  // All of one step.
  void launch_step(const Step& step, int64_t rows) const {
    if (p.x.dtype == DType::f32) return launch_tiles<true>(step, rows);
    if (!by_warps(step)) return launch_tiles<false>(step, rows);
    if (p.dim == 64) return launch_rows<1>(step, rows);
    if (p.dim == 128) return launch_rows<2>(step, rows);
    launch_rows<4>(step, rows);
  }

  void run() const {
    Step step{};
    step.shape = TileShape(p.dim, item_of(p.x.dtype));
    RowStage stage(step.shape.lanes, p.mean != nullptr, p.shift != nullptr);
    step.stage = stage.bytes();
    step.mean_at = stage.mean();
    step.shift_at = stage.shift_mean();
    step.in_pieces = lies_in_pieces(p.x, item_of(p.x.dtype), 16);
    step.out_pieces = lies_in_pieces(p.out, 1, 8);
    step.by_columns = lies_by_columns(p.out);
    uint64_t mean_bits = reinterpret_cast<uintptr_t>(p.mean) | p.mean_batch * 4 | p.mean_head * 4;
    step.mean_pieces = p.mean == nullptr || mean_bits % 16 == 0;
    uint64_t shift_bits =
        reinterpret_cast<uintptr_t>(p.shift_mean) | p.shift_mean_batch * 4 | p.shift_mean_head * 4;
    step.shift_pieces = p.shift == nullptr || shift_bits % 16 == 0;
    step.norm = 1.0f;
    if (p.rotates) step.norm /= std::sqrt(static_cast<float>(hadamard_size(p.dim)));
    step.writes = true;
    step.measures = has_own_scales(p);
    if (p.gives_scale && !step.measures) {
      Step measuring = step;
      measuring.measures = true;
      measuring.writes = false;
      launch_step(measuring, p.rows);
      step.from_last = true;
    }
    launch_step(step, p.out_rows);
  }
};

}  // namespace

void launch_quantize(const QuantizeParams& p, cudaStream_t stream) {
  Launcher launcher{p, device_major(), stream};
  bool is_empty = p.batch == 0 || p.heads == 0;
  if (p.gives_mean && !is_empty) {
    if (p.x.dtype == DType::f32) {
      write_means<true>(p, launcher.major, stream);
    } else {
      write_means<false>(p, launcher.major, stream);
    }
  }
  bool shares_scales = p.gives_scale && !has_own_scales(p);
  if (shares_scales) launcher.set_scales(is_empty || p.rows == 0 ? 1.0f : 0.0f);
  if (!is_empty) launcher.run();
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
