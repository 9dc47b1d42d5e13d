// SPDX-License-Identifier: Apache-2.0
// quantize on CUDA: a thread block takes 128 rows of a head, once for the largest size and once for
// the codes. Heads go in slices that L2 holds: a kernel measures one slice and writes the codes of
// the slice before it, so that rows come from memory once. The largest size goes to its scale by an
// atomic maximum of its bits, which no order changes, so that codes and scales are those of the CPU.
// The same on the CPU: cpu/quantize.cpp. Next: codes.cuh, what happens to a row; dequantize.cu.
#include <algorithm>

#include "cuattn/device/overlap.cuh"
#include "cuda/fused/codes.cuh"
#include "cuda/fused/means.cuh"
#include "cuda/fused/steps.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kMostDim = 256;
template <DType kType, int kLanes>
constexpr int kRows =
    kType == DType::f32 || kLanes == 8 ? 1 : 2;  // of a thread, in flight together
constexpr int64_t kSliceBytes = 12ll << 20;      // of x: two slices and the codes fit 50 MB of L2
constexpr uint32_t kLead = 256;                  // blocks that measure, before some write
constexpr int kBlockWords = kScaleRows / 16;     // runs of 16 rows, which lie together in a channel

// The rows of one round that are this thread's: all are loaded before one is used.
template <DType kType, int kLanes, int kPieces>
struct Round {
  RawPiece<kType> raw[kRows<kType, kLanes>][kPieces];

  __device__ __forceinline__ void load(const QuantizeParams& p, const Step& step, const Part& part,
                                       const RowLane<kLanes, kPieces>& at, int64_t first) {
#pragma unroll
    for (int r = 0; r < kRows<kType, kLanes>; ++r) {
      int64_t row = first + at.row + r * at.kStep;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        int channel = at.channel(piece);
        if (row < min(part.last, p.rows) && channel < p.dim) {
          raw[r][piece].load(p.x, step.in_pieces, part.offset(p.x, row) + channel * p.x.channel);
        } else {
          raw[r][piece].clear();
        }
      }
    }
  }
};

// A row as it is rounded, not yet divided by its scale nor by the size of R. All lanes of a warp
// call it; `is_there`: the row is one of x.
template <DType kType, int kLanes, int kPieces>
__device__ __forceinline__ void prepare_row(const QuantizeParams& p, const Step& step,
                                            const Part& part, const RowLane<kLanes, kPieces>& at,
                                            const RawPiece<kType> (&raw)[kPieces], bool is_there,
                                            float (&x)[kPieces][kSpan]) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    raw[piece].unpack(x[piece]);
    int channel = at.channel(piece);
    if (p.mean == nullptr || !is_there || channel >= p.dim) continue;
    const float* from = p.mean + part.b * p.mean_batch + part.h * p.mean_head + channel;
    auto mean = load_floats<kSpan>(from, step.mean_pieces);
#pragma unroll
    for (int i = 0; i < kSpan; ++i) x[piece][i] -= mean.x[i];
  }
  if (p.rotates) rotate_row(at, hadamard_size(p.dim), x);
}

// shift[row] = x[row] . shift_mean, from the row as it is given. All lanes of a warp call it.
template <DType kType, int kLanes, int kPieces>
__device__ __forceinline__ void write_shift(const QuantizeParams& p, const Part& part,
                                            const RowLane<kLanes, kPieces>& at,
                                            const RawPiece<kType> (&raw)[kPieces], int64_t row) {
  const float* mean =
      p.shift_mean + part.b * p.shift_mean_batch + part.h / p.shift_group * p.shift_mean_head;
  double dot = 0.0;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    float x[kSpan];
    raw[piece].unpack(x);
    int channel = at.channel(piece);
    if (channel >= p.dim) continue;
#pragma unroll
    for (int i = 0; i < kSpan; ++i) dot += static_cast<double>(x[i]) * mean[channel + i];
  }
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) dot += __shfl_xor_sync(kWarp, dot, lane);
  if (at.lane == 0 && row < min(part.last, p.rows))
    p.shift[part.b * p.shift_batch + part.h * p.shift_head + row * p.shift_row] =
        static_cast<float>(dot);
}

// The largest finite size of what x / R's size holds. Rounding keeps the order of numbers, so one
// product is enough.
template <int kPieces>
__device__ __forceinline__ float largest_of(const float (&x)[kPieces][kSpan], float norm) {
  float largest = 0.0f;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) largest = fmaxf(largest, fabsf(x[piece][i]));  // no NaN
  }
  if (is_finite(largest)) return largest * norm;
  largest = 0.0f;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      if (is_finite(x[piece][i])) largest = fmaxf(largest, fabsf(x[piece][i]));
    }
  }
  return largest * norm;
}

// The largest of a warp's sizes of 8 channels, which every kLanes-th thread has, to those of the block.
template <int kLanes>
__device__ __forceinline__ void note_channels(const float (&size)[kSpan], bool is_there,
                                              int* of_block) {
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
    float largest = size[i];
#pragma unroll
    for (int lane = kLanes; lane < 32; lane *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kWarp, largest, lane));
    if (threadIdx.x % 32 < kLanes && is_there) atomicMax(&of_block[i], __float_as_int(largest));
  }
}

__device__ __forceinline__ float norm_of(const QuantizeParams& p) {
  return p.rotates ? 1.0f / sqrtf(static_cast<float>(hadamard_size(p.dim))) : 1.0f;
}

// The same where each channel stands alone: a thread keeps the maxima of 8 channels at a time, over
// all of its rows.
template <DType kType, int kLanes, int kPieces>
__device__ __forceinline__ void measure_channels(const QuantizeParams& p, const Step& step,
                                                 const Part& part,
                                                 const RowLane<kLanes, kPieces>& at, int* sizes) {
#pragma unroll 1
  for (int piece = 0; piece < kPieces; ++piece) {
    float largest[kSpan] = {};
    int channel = at.channel(piece);
    if (channel < p.dim) {
      Piece<float, kSpan> mean{};
      if (p.mean != nullptr)
        mean = load_floats<kSpan>(p.mean + part.b * p.mean_batch + part.h * p.mean_head + channel,
                                  step.mean_pieces);
#pragma unroll 4
      for (int64_t row = part.first + at.row; row < part.last; row += at.kStep) {
        RawPiece<kType> raw;
        raw.load(p.x, step.in_pieces, part.offset(p.x, row) + channel * p.x.channel);
        float x[kSpan];
        raw.unpack(x);
#pragma unroll
        for (int i = 0; i < kSpan; ++i) {
          float size = fabsf(x[i] - mean.x[i]);
          largest[i] = fmaxf(largest[i], is_finite(size) ? size : 0.0f);
        }
      }
    }
    note_channels<kLanes>(largest, channel < p.dim, sizes + channel);
  }
}

// The largest finite size of a block of rows, or of each of its channels, into its scale.
template <DType kType, int kLanes, int kPieces>
__device__ __forceinline__ void measure(const QuantizeParams& p, const Step& step, const Part& part,
                                        RowLane<kLanes, kPieces>& at) {
  __shared__ int sizes[kMostDim];
  bool by_channel = p.part == ScalePart::channels;
  int width = by_channel ? p.dim : 1;
  for (int i = threadIdx.x; i < width; i += kThreads) sizes[i] = 0;
  __syncthreads();
  float norm = norm_of(p), largest = 0.0f;
  bool alone = by_channel && !p.rotates && p.shift == nullptr;
  if (alone) measure_channels<kType>(p, step, part, at, sizes);
#pragma unroll 1
  for (int64_t first = alone ? part.last : part.first; first < part.last;
       first += kRows<kType, kLanes> * at.kStep) {
    Round<kType, kLanes, kPieces> round;
    round.load(p, step, part, at, first);
#pragma unroll
    for (int r = 0; r < kRows<kType, kLanes>; ++r) {
      int64_t row = first + at.row + r * at.kStep;
      if (p.shift != nullptr) write_shift(p, part, at, round.raw[r], row);
      float x[kPieces][kSpan];
      prepare_row(p, step, part, at, round.raw[r], row < part.last, x);
      if (!by_channel) {
        largest = fmaxf(largest, largest_of(x, norm));
        continue;
      }
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
        for (float& size : x[piece]) size = is_finite(size) ? fabsf(size) * norm : 0.0f;
        int channel = at.channel(piece);
        note_channels<kLanes>(x[piece], channel < p.dim, sizes + channel);
      }
    }
  }
  if (!by_channel) {
    unsigned of_warp = __reduce_max_sync(kWarp, __float_as_uint(largest));
    if (threadIdx.x % 32 == 0) atomicMax(&sizes[0], static_cast<int>(of_warp));
  }
  __syncthreads();
  const Float8Scale& s = p.scale;
  for (int i = threadIdx.x; i < width; i += kThreads) {
    int64_t place = p.part == ScalePart::rows ? part.block : i;
    const float* scale =
        s.data + part.b * s.strides[0] + part.h / s.group * s.strides[1] + place * s.strides[2];
    atomicMax(reinterpret_cast<int*>(const_cast<float*>(scale)), sizes[i]);
  }
}

// Codes of a row by the scales of its channels.
template <int kLanes, int kPieces>
__device__ __forceinline__ void divide_channels(const QuantizeParams& p, const Part& part,
                                                const RowLane<kLanes, kPieces>& at,
                                                const float (&x)[kPieces][kSpan],
                                                uint2 (&codes)[kPieces]) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    float y[kSpan];
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      float scale = p.scale.at(part.b, part.h, min(at.channel(piece) + i, p.dim - 1));
      y[i] = x[piece][i] / (p.gives_scale ? scale_of(scale) : scale);
    }
    codes[piece] = pack_codes(y);
  }
}

// Words of shared memory from one row to the next: 4 rows of 32 bytes fall on all banks. Each 16
// rows begin 4 banks on, for write_columns.
CUATTN_HOST_DEVICE int staged_pitch(int dim) { return (dim / 4 + 31) / 32 * 32 + 8; }
__device__ __forceinline__ int staged_row(int row, int pitch) { return row * pitch + row / 16 * 4; }

template <int kPieces>
__device__ __forceinline__ void store_codes(const QuantizeParams& p, bool in_pieces, E4m3* to,
                                            uint2 codes) {
  if (in_pieces) {
    *reinterpret_cast<uint2*>(to) = codes;
    return;
  }
#pragma unroll
  for (int i = 0; i < kSpan; ++i)
    to[i * p.out.channel].bits = static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> i % 4 * 8);
}

// Codes of a block that lie by rows in shared memory, to where the rows of a channel lie side by
// side: a thread turns 16 rows of 4 channels.
__device__ __forceinline__ void write_columns(const QuantizeParams& p, const Part& part,
                                              const uint32_t* staged) {
  uint8_t* out = static_cast<uint8_t*>(p.out.data) + part.offset(p.out, part.first);
  int pitch = staged_pitch(p.dim);
  for (int i = threadIdx.x; i < p.dim / 4 * kBlockWords; i += kThreads) {
    int row = i % kBlockWords * 16, word = i / kBlockWords;
    const uint32_t* from = staged + staged_row(row, pitch) + word;
    uint32_t turned[4][4];  // [channel][four rows]
#pragma unroll
    for (int four = 0; four < 4; ++four, from += 4 * pitch) turn_bytes(from, pitch, four, turned);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      uint8_t* to = out + (word * 4 + c) * p.out.channel + row;
      if (part.first + row + 16 <= part.last) {
        *reinterpret_cast<uint4*>(to) =
            uint4{turned[c][0], turned[c][1], turned[c][2], turned[c][3]};
        continue;
      }
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if (part.first + row + j < part.last)
          to[j] = static_cast<uint8_t>(turned[c][j / 4] >> j % 4 * 8);
      }
    }
  }
}

// Codes of a block of rows; those beyond x are 0.
template <DType kType, int kLanes, int kPieces>
__device__ __forceinline__ void write_codes(const QuantizeParams& p, const Step& step,
                                            const Part& part, RowLane<kLanes, kPieces>& at,
                                            uint32_t* staged) {
  bool by_channel = p.part == ScalePart::channels && p.scale.data != nullptr;
  bool has_scale = !by_channel && part.first < p.rows;  // rows beyond x may have none
  float scale = has_scale ? p.scale.at(part.b, part.h, part.block) : 1.0f;
  Divisor by(p.gives_scale && has_scale ? scale_of(scale) : scale);
  float norm = norm_of(p);
  int pitch = staged_pitch(p.dim);
#pragma unroll 1
  for (int64_t first = part.first; first < part.last; first += kRows<kType, kLanes> * at.kStep) {
    Round<kType, kLanes, kPieces> round;
    round.load(p, step, part, at, first);
#pragma unroll
    for (int r = 0; r < kRows<kType, kLanes>; ++r) {
      int64_t row = first + at.row + r * at.kStep;
      if (p.shift != nullptr && !p.gives_scale) write_shift(p, part, at, round.raw[r], row);
      float x[kPieces][kSpan];
      prepare_row(p, step, part, at, round.raw[r], row < p.rows, x);
      if (row >= part.last) continue;
      uint2 codes[kPieces];
      if (p.rotates) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
          for (int i = 0; i < kSpan; ++i) x[piece][i] *= norm;
        }
      }
      if (by_channel) {
        divide_channels(p, part, at, x, codes);
      } else {
        divide_row(by, x, codes);
      }
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        int channel = at.channel(piece);
        if (channel >= p.dim) continue;
        if (row >= p.rows) codes[piece] = uint2{0, 0};
        if (step.by_columns) {
          uint32_t* to = staged + staged_row(static_cast<int>(row - part.first), pitch);
          *reinterpret_cast<uint2*>(to + channel / 4) = codes[piece];
        } else {
          store_codes<kPieces>(
              p, step.out_pieces,
              static_cast<E4m3*>(p.out.data) + part.offset(p.out, row) + channel * p.out.channel,
              codes[piece]);
        }
      }
    }
  }
  if (!step.by_columns) return;
  __syncthreads();
  write_columns(p, part, staged);
}

// Which of the step's blocks this one is: some that measure lead, then both kinds in turn. Codes are
// written from the end of a slice on, which L2 has read last.
__device__ __forceinline__ uint32_t unit_of(const Step& step, bool& is_measured) {
  uint32_t index = blockIdx.x;
  is_measured = index < step.lead;
  if (is_measured) return index;
  index -= step.lead;
  auto before = static_cast<uint32_t>(index * step.ratio >> 32);
  is_measured = static_cast<uint32_t>((index + 1) * step.ratio >> 32) != before;
  return is_measured ? step.lead + before : step.written - 1 - (index - before);
}

// Blocks of a multiprocessor: rows of 192 would spill with two.
template <int kLanes, int kPieces>
constexpr int kResident = kLanes == 8 && kPieces == 3 ? 1 : 2;

template <DType kType, int kLanes, int kPieces>
__global__ void __launch_bounds__(kThreads, (kResident<kLanes, kPieces>))
    quantize_step(const __grid_constant__ QuantizeParams p, const __grid_constant__ Step step) {
  extern __shared__ __align__(16) uint32_t staged[];
  bool is_measured;
  uint32_t unit = unit_of(step, is_measured);
  RowLane<kLanes, kPieces> at;
  if (p.rotates) at.find_flips();
  bool is_early = is_measured && step.starts_early;
  if (!is_early) wait_for_previous_kernel();
  release_next_kernel();
  if (is_measured) {
    measure<kType>(p, step, Part(step.groups, step.first_measured, unit, p.rows), at);
    if (is_early) wait_for_previous_kernel();  // all do: the next kernel counts on both
  } else {
    write_codes<kType>(p, step, Part(step.groups, step.first_written, unit, p.out_rows), at,
                       staged);
  }
}

// One thread an element of the scale: 0 before the maxima, then what they give.
__global__ void __launch_bounds__(kThreads)
    set_scales(const __grid_constant__ Float8Scale s, bool is_last) {
  wait_for_previous_kernel();
  release_next_kernel();
  int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= s.extents[0] * s.extents[1] * s.extents[2]) return;
  int64_t line = index / s.extents[2];
  float& scale = const_cast<float*>(
      s.data)[line / s.extents[1] * s.strides[0] + line % s.extents[1] * s.strides[1] +
              index % s.extents[2] * s.strides[2]];
  scale = is_last ? scale_of(scale) : 0.0f;
}

bool lies_by_columns(const QuantizeArray& array) {
  uint64_t bits = reinterpret_cast<uintptr_t>(array.data);
  for (int64_t stride : {array.strides.batch, array.strides.head, array.channel})
    bits |= static_cast<uint64_t>(stride);
  return array.strides.seq == 1 && array.channel != 1 && bits % 16 == 0;
}

// Those of the scales where they are made, else heads alone.
Groups groups_of(const QuantizeParams& p) {
  if (!p.gives_scale) return {1, 1, p.heads, int64_t{p.batch} * p.heads};
  int32_t across = static_cast<int32_t>(p.scale.extents[1]);
  bool has_batches = p.scale.extents[0] == p.batch;
  return {has_batches ? 1 : p.batch, p.heads / across, across,
          int64_t{has_batches ? p.batch : 1} * across};
}

// Kernels of one call, in order.
struct Launcher {
  const QuantizeParams& p;
  int major;
  cudaStream_t stream;
  const char* fn = "quantize";

  void set_scales(bool is_last) const {
    const Float8Scale& s = p.scale;
    int64_t scales = s.extents[0] * s.extents[1] * s.extents[2];
    if (scales == 0) return;
    unsigned blocks = blocks_of(fn, device::ceil_div<int64_t>(scales, kThreads));
    launch_overlapping(cuattn::set_scales, blocks, kThreads, 0, major, stream, s, is_last);
  }

  template <DType kType>
  void launch(const Step& step) const {
    unsigned blocks = blocks_of(fn, int64_t{step.measured} + step.written);
    if (blocks == 0) return;
    int shared = step.by_columns ? (kScaleRows * staged_pitch(p.dim) + kBlockWords * 4) * 4 : 0;
    auto with = [&](auto* kernel) {
      launch_overlapping(kernel, blocks, kThreads, shared, major, stream, p, step);
    };
    switch (p.dim <= 128 ? (p.dim + 31) / 32 : (p.dim + 63) / 64 + 4) {
      case 1: return with(quantize_step<kType, 4, 1>);
      case 2: return with(quantize_step<kType, 4, 2>);
      case 3: return with(quantize_step<kType, 4, 3>);
      case 4: return with(quantize_step<kType, 4, 4>);
      case 7: return with(quantize_step<kType, 8, 3>);
      default: return with(quantize_step<kType, 8, 4>);
    }
  }

  template <DType kType>
  void run() const {
    Step step{};
    step.groups = groups_of(p);
    step.in_pieces = lies_in_pieces(p.x, item_of(kType), 16);
    step.out_pieces = lies_in_pieces(p.out, 1, 8);
    step.by_columns = lies_by_columns(p.out);
    uint64_t mean_bits = reinterpret_cast<uintptr_t>(p.mean) | p.mean_batch * 4 | p.mean_head * 4;
    step.mean_pieces = mean_bits % 16 == 0;
    const Groups& groups = step.groups;
    int64_t heads = int64_t{groups.batches} * groups.heads;
    int64_t to_measure = heads * device::ceil_div<int64_t>(p.rows, kScaleRows);
    int64_t to_write = heads * device::ceil_div<int64_t>(p.out_rows, kScaleRows);
    blocks_of(fn, groups.count * (to_measure + to_write));
    int64_t bytes = std::max<int64_t>(heads * p.rows * p.dim * item_of(kType), 1);
    int64_t slice = p.gives_scale ? std::max<int64_t>(kSliceBytes / bytes, 1) : groups.count;
    auto of_slice = [&](int64_t first, int64_t blocks) {
      int64_t in_slice = std::max<int64_t>(std::min(slice, groups.count - first), 0);
      return static_cast<uint32_t>(in_slice * blocks);
    };
    int64_t lag = p.gives_scale ? slice : 0;
    for (int64_t first = 0; first < groups.count + lag; first += std::max<int64_t>(slice, 1)) {
      step.first_measured = first;
      step.first_written = first - lag;
      step.measured = p.gives_scale ? of_slice(first, to_measure) : 0;
      step.written = step.first_written < 0 ? 0 : of_slice(step.first_written, to_write);
      step.lead = std::min(step.measured, kLead);
      uint64_t rest = step.measured - step.lead, all = std::max<uint64_t>(rest + step.written, 1);
      step.ratio = ((rest << 32) + all - 1) / all;
      launch<kType>(step);
      step.starts_early = to_measure > 0;  // the first one has waited for x and the zeros
    }
  }
};

}  // namespace

void launch_quantize(const QuantizeParams& p, cudaStream_t stream) {
  Launcher launcher{p, device_major(), stream};
  bool is_empty = p.batch == 0 || p.heads == 0;
  with_dtype(launcher.fn, p.x.dtype, [&]<DType kType>() {
    if (p.gives_mean && !is_empty) write_means<kType>(p, launcher.major, stream);
    if (p.gives_scale) launcher.set_scales(false);
    if (!is_empty) launcher.run<kType>();
    if (p.gives_scale) launcher.set_scales(true);
  });
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
