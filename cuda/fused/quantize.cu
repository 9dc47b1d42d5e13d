// SPDX-License-Identifier: Apache-2.0
// quantize on CUDA: a thread block takes 128 rows of a head. Where they have a scale of their own it
// finds the largest size and writes the codes at once. Else it takes them twice: heads go in slices
// that L2 holds, and a kernel measures one slice and writes the codes of the slice before it, so that
// rows come from memory once. The largest size goes to its scale by an atomic maximum of its bits,
// which no order changes, so that codes and scales are those of the CPU.
// The same on the CPU: cpu/quantize.cpp. Next: row_tile.cuh, what happens to a row; dequantize.cu.
#include <algorithm>

#include "cuattn/device/overlap.cuh"
#include "cuda/fused/means.cuh"
#include "cuda/fused/row_tile.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kMostDim = 256;
constexpr int64_t kSliceBytes = 12ll << 20;  // of x: two slices and the codes fit 50 MB of L2
constexpr int32_t kMostAxis = 65535;         // of a grid, but its first
constexpr uint32_t kLead = 384;              // blocks that measure, before some write

struct Shared {
  int sizes[kMostDim];  // the largest, as bits: one of them, or one of each channel
  // Of the channels: what an element is multiplied by, 1 / scale in two parts.
  float factor[kMostDim], high[kMostDim], low[kMostDim];
};

// What a thread block has of a part: the tile in shared memory, its row in registers.
template <DType kType>
struct Worker {
  const QuantizeParams& p;
  const Step& step;
  Part part;
  TileShape shape;
  RowPlace at;
  float norm;
  Shared& shared;
  char* memory;
  float x[kChannels];

  __device__ Worker(const QuantizeParams& p, const Step& step, const Part& part, Shared& shared,
                    char* memory)
      : p(p),
        step(step),
        part(part),
        shape(p.dim, kType == DType::f32 ? 4 : 2),
        at(shape, p.dim),
        norm(p.rotates ? 1.0f / sqrtf(static_cast<float>(hadamard_size(p.dim))) : 1.0f),
        shared(shared),
        memory(memory) {
    if (p.rotates) at.find_flips(p.dim);
  }

  __device__ __forceinline__ bool by_channel() const {
    return p.part == ScalePart::channels && p.scale.data != nullptr;
  }

  // A row as it is rounded, not yet divided by its scale nor by the size of R.
  __device__ __forceinline__ void prepare(int64_t from, bool wants_shift) {
    __syncthreads();  // who reads the tile before has done so
    load_tile<kType>(p, step, part, shape, from, memory);
    await_tile();
    read_row<kType>(shape, at, memory, x);
    if (wants_shift) write_shift(from + at.row);
    if (p.mean != nullptr) subtract_mean(p, step, part, at, x);
    if (p.rotates) rotate_row(at, hadamard_size(p.dim), x);
  }

  // shift[row] = x[row] . shift_mean, from the row as it is given. All lanes of a warp call it.
  __device__ __forceinline__ void write_shift(int64_t row) const {
    const float* mean = p.shift_mean + part.b * p.shift_mean_batch +
                        part.h / p.shift_group * p.shift_mean_head + at.first;
    double dot[2] = {};
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      if (i / kRun * kRun < at.channels) dot[i % 2] += static_cast<double>(x[i]) * mean[i];
    }
    double sum = dot[0] + dot[1];
    for (int lane = 1; lane < shape.lanes; lane *= 2) sum += __shfl_xor_sync(kWarp, sum, 8 * lane);
    if (at.lane == 0 && row < min(part.first + kScaleRows, p.rows))
      p.shift[part.b * p.shift_batch + part.h * p.shift_head + row * p.shift_row] =
          static_cast<float>(sum);
  }

  // The largest finite size of the thread's channels. Rounding keeps the order of numbers, so one
  // product is enough.
  __device__ __forceinline__ float largest(bool is_there) const {
    float of_two[2] = {};
#pragma unroll
    for (int i = 0; i < kChannels; ++i) of_two[i % 2] = fmaxf(of_two[i % 2], fabsf(x[i]));
    float size = fmaxf(of_two[0], of_two[1]);  // no NaN
    if (!is_finite(size)) {
      size = 0.0f;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        if (is_finite(x[i])) size = fmaxf(size, fabsf(x[i]));
      }
    }
    return is_there ? size * norm : 0.0f;
  }

  // The largest finite size of each channel of a warp's rows, into shared.sizes: threads in two rows
  // give each other half of their channels and keep the larger of what they have twice, and so on. x
  // is gone after it.
  __device__ __forceinline__ void note_channels(bool is_there) {
#pragma unroll
    for (float& size : x) size = is_there && is_finite(size) ? fabsf(size) * norm : 0.0f;
    int first = at.first, kept = 8;
    halve<32>(1, first);
    halve<16>(2, first);
    halve<8>(4, first);
    if (shape.lanes <= 2) halve<4>(16, first), kept = 4;
    if (shape.lanes == 1) halve<2>(8, first), kept = 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < kept && first + i < p.dim) atomicMax(&shared.sizes[first + i], __float_as_int(x[i]));
    }
  }
  template <int kHalf>
  __device__ __forceinline__ void halve(int apart, int& first) {
    bool is_upper = (threadIdx.x & apart) != 0;
    if (is_upper) first += kHalf;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      float given = is_upper ? x[i] : x[i + kHalf];
      x[i] = fmaxf(is_upper ? x[i + kHalf] : x[i], __shfl_xor_sync(kWarp, given, apart));
    }
  }

  // The largest finite size of a tile, or of each of its channels, to shared.sizes.
  __device__ __forceinline__ void measure(bool is_there) {
    if (p.part == ScalePart::channels) return note_channels(is_there);
    unsigned of_warp = __reduce_max_sync(kWarp, __float_as_uint(largest(is_there)));
    if (threadIdx.x % 32 == 0) atomicMax(&shared.sizes[0], static_cast<int>(of_warp));
  }

  // Those that were measured into the scales.
  __device__ __forceinline__ void raise_scales() const {
    const Float8Scale& s = p.scale;
    for (int i = threadIdx.x; i < (p.part == ScalePart::channels ? p.dim : 1); i += blockDim.x) {
      int64_t place = p.part == ScalePart::rows ? part.block : i;
      const float* scale =
          s.data + part.b * s.strides[0] + part.h / s.group * s.strides[1] + place * s.strides[2];
      atomicMax(reinterpret_cast<int*>(const_cast<float*>(scale)), shared.sizes[i]);
    }
  }

  __device__ __forceinline__ float scale_at(int64_t place) const {
    float scale = p.scale.at(part.b, part.h, place);
    return p.gives_scale && !step.alone ? scale_of(scale) : scale;
  }
  __device__ __forceinline__ void find_channel_scales() {
    for (int i = threadIdx.x; i < p.dim; i += blockDim.x) {
      Divisor by(scale_at(i));
      shared.factor[i] = by.factor;
      shared.high[i] = by.high;
      shared.low[i] = by.low;
    }
  }

  // Codes of the row where it lay, beginning with its first channel.
  template <bool kByChannel>
  __device__ __forceinline__ void encode(const Divisor& by, bool is_there) {
    uint4* to = reinterpret_cast<uint4*>(memory + shape.at(at.row) + at.first);
    float factor = by.factor * norm;
    __syncwarp();  // the other thread of the row has read it
#pragma unroll
    for (int run = 0; run < kChannels; run += kRun) {
      if (kByChannel && run >= at.channels) continue;
      float y[kRun];
      if constexpr (kByChannel) {
        auto factors = load_floats<kRun>(shared.factor + at.first + run, true);
        auto high = load_floats<kRun>(shared.high + at.first + run, true);
        auto low = load_floats<kRun>(shared.low + at.first + run, true);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          float scaled = x[run + i] * (factors.x[i] * norm);
          y[i] = __fmaf_rn(scaled, high.x[i], scaled * low.x[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kRun; ++i) y[i] = by.quotient(x[run + i] * factor);
      }
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack_codes(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
      if (!is_there) words[0] = words[1] = words[2] = words[3] = 0;
      if (run < at.channels) to[run / kRun] = uint4{words[0], words[1], words[2], words[3]};
    }
  }

  // Codes of a tile to rows of out.
  __device__ __forceinline__ void write_rows(int64_t from) const {
    PiecePlace place(shape, p.dim);
    if (!place.is_there) return;
    int rows = static_cast<int>(min(int64_t{shape.rows}, part.last - from));
    const char* codes = memory + place.piece * kSpan;
    E4m3* to = static_cast<E4m3*>(p.out.data) + part.offset(p.out, from) +
               place.row * p.out.strides.seq + place.piece * kSpan * p.out.channel;
    int64_t on = place.rows_on * p.out.strides.seq;
    if (step.out_pieces) {
#pragma unroll 4
      for (int row = place.row; row < rows; row += place.rows_on, to += on)
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(codes + shape.at(row));
      return;
    }
    for (int row = place.row; row < rows; row += place.rows_on, to += on) {
      for (int i = 0; i < kSpan; ++i)
        to[i * p.out.channel].bits = static_cast<uint8_t>(codes[shape.at(row) + i]);
    }
  }

  // The same where the rows of a channel lie side by side: a thread turns 16 rows of 4 channels.
  __device__ __forceinline__ void write_columns(int64_t from) const {
    uint8_t* out = static_cast<uint8_t*>(p.out.data) + part.offset(p.out, from);
    int rows = static_cast<int>(min(int64_t{shape.rows}, part.last - from)), runs = shape.rows / 16;
    for (int i = threadIdx.x; i < p.dim / 4 * runs; i += blockDim.x) {
      int row = i % runs * 16, word = i / runs;
      const uint32_t* codes = reinterpret_cast<const uint32_t*>(memory + shape.at(row)) + word;
      uint32_t turned[4][4];  // [channel][four rows]
#pragma unroll
      for (int four = 0; four < 4; ++four, codes += shape.pitch)
        turn_bytes(codes, shape.pitch / 4, four, turned);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        uint8_t* to = out + (word * 4 + c) * p.out.channel + row;
        if (row + 16 <= rows) {
          *reinterpret_cast<uint4*>(to) =
              uint4{turned[c][0], turned[c][1], turned[c][2], turned[c][3]};
          continue;
        }
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          if (row + j < rows) to[j] = static_cast<uint8_t>(turned[c][j / 4] >> j % 4 * 8);
        }
      }
    }
  }

  // The scale of a part that is its own.
  __device__ __forceinline__ float take_scale() const {
    const Float8Scale& s = p.scale;
    float scale = scale_of(__int_as_float(shared.sizes[0]));
    if (threadIdx.x == 0 && part.first < p.rows)  // rows beyond x may have none
      const_cast<float*>(
          s.data)[part.b * s.strides[0] + part.h * s.strides[1] + part.block * s.strides[2]] =
          scale;
    return scale;
  }

  // Tiles of the part, once or, where all are measured before one is written, twice.
  __device__ __forceinline__ void run(bool measures, bool writes) {
    for (int i = threadIdx.x; i < (by_channel() ? p.dim : 1); i += blockDim.x) shared.sizes[i] = 0;
    if (writes && by_channel()) find_channel_scales();
    Divisor by{};  // of rows beyond x, which may have no scale, any
    if (!measures && !by_channel() && part.first < p.rows) by = Divisor(scale_at(part.block));
    int tiles = static_cast<int>(ceil_div<int64_t>(part.last - part.first, shape.rows));
    bool is_twice = measures && writes && tiles > 1;
#pragma unroll 1
    for (int i = 0; i < (is_twice ? 2 * tiles : tiles); ++i) {
      bool is_last = i >= tiles || !is_twice;  // time that it comes
      int64_t from = part.first + int64_t{i >= tiles ? i - tiles : i} * shape.rows;
      prepare(from, p.shift != nullptr && i < tiles && measures == p.gives_scale);
      bool is_there = from + at.row < p.rows;
      if (measures && i < tiles) measure(is_there);
      if (measures && i == tiles - 1) {
        __syncthreads();
        if (!writes) return raise_scales();
        by = Divisor(take_scale());
      }
      if (!writes || !is_last) continue;
      if (by_channel()) {
        encode<true>(by, is_there);
      } else {
        encode<false>(by, is_there);
      }
      __syncthreads();
      if (step.by_columns) {
        write_columns(from);
      } else {
        write_rows(from);
      }
    }
  }
};

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

template <DType kType>
__global__ void __launch_bounds__((kType == DType::f32 ? 2 : 4) * kScaleRows)
    quantize_step(const __grid_constant__ QuantizeParams p, const __grid_constant__ Step step) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Shared shared;
  bool is_measured = false;
  uint32_t unit = step.alone ? 0 : unit_of(step, is_measured);
  bool is_early = is_measured && step.starts_early;
  if (!is_early) wait_for_previous_kernel();
  release_next_kernel();
  Part part = step.alone    ? Part(p.out_rows)
              : is_measured ? Part(step.groups, step.first_measured, unit, p.rows)
                            : Part(step.groups, step.first_written, unit, p.out_rows);
  Worker<kType>(p, step, part, shared, memory).run(is_measured || step.alone, !is_measured);
  if (is_early) wait_for_previous_kernel();  // all do: the next kernel counts on both
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

// Whether each block of rows of each head has a scale of its own, which no other block takes part in.
bool has_own_scales(const QuantizeParams& p) {
  const Float8Scale& s = p.scale;
  int64_t blocks = device::ceil_div<int64_t>(p.rows, kScaleRows);
  return p.gives_scale && p.part == ScalePart::rows && s.group == 1 && s.extents[0] == p.batch &&
         s.extents[1] == p.heads && s.extents[2] == blocks && p.out_rows >= p.rows &&
         p.heads <= kMostAxis && p.batch <= kMostAxis;
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
    static uint64_t allowed = 0;
    dim3 blocks = blocks_of(fn, int64_t{step.measured} + step.written);
    if (blocks.x == 0) return;
    if (step.alone) {
      blocks.x = static_cast<unsigned>(device::ceil_div<int64_t>(p.out_rows, kScaleRows));
      blocks.y = static_cast<unsigned>(p.heads);
      blocks.z = static_cast<unsigned>(p.batch);
    }
    int item = item_of(kType);
    TileShape shape(p.dim, item);
    int most = std::max(TileShape(2 * kChannels, item).bytes(), TileShape(kMostDim, item).bytes());
    allow_shared_memory(quantize_step<kType>, most, allowed);
    launch_overlapping(quantize_step<kType>, blocks, shape.threads(), shape.bytes(), major, stream,
                       p, step);
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
    step.alone = has_own_scales(p);
    int64_t bytes = std::max<int64_t>(heads * p.rows * p.dim * item_of(kType), 1);
    int64_t slice =
        p.gives_scale && !step.alone ? std::max<int64_t>(kSliceBytes / bytes, 1) : groups.count;
    auto of_slice = [&](int64_t first, int64_t blocks) {
      int64_t in_slice = std::max<int64_t>(std::min(slice, groups.count - first), 0);
      return static_cast<uint32_t>(in_slice * blocks);
    };
    int64_t lag = p.gives_scale && !step.alone ? slice : 0;
    for (int64_t first = 0; first < groups.count + lag; first += std::max<int64_t>(slice, 1)) {
      step.first_measured = first;
      step.first_written = first - lag;
      step.measured = lag > 0 ? of_slice(first, to_measure) : 0;
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
    bool shares_scales = p.gives_scale && !has_own_scales(p);
    if (shares_scales) launcher.set_scales(false);
    if (!is_empty) launcher.run<kType>();
    if (shares_scales) launcher.set_scales(true);
  });
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
