// SPDX-License-Identifier: Apache-2.0
// quantize on CUDA: a thread block takes 128 rows of a head, and while it works on them the next ones
// come. Where they have a scale of their own it finds the largest size and writes the codes at once.
// Else one kernel measures all rows and another writes the codes, from the end on, which L2 has read
// last. The largest size goes to its scale by an atomic maximum of its bits, which no order changes,
// so that codes and scales are those of the CPU.
// The same on the CPU: cpu/quantize.cpp. Next: row_tile.cuh, what happens to a row; dequantize.cu.
#include <algorithm>
#include <cmath>

#include "cuattn/device/overlap.cuh"
#include "cuda/fused/means.cuh"
#include "cuda/fused/row_tile.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kMostDim = 256;
constexpr int kThreadsThere = 512;  // of a multiprocessor, by the registers of quantize_step

struct Shared {
  int sizes[kMostDim];  // the largest, as bits: one of them, or one of each channel
  // Of the channels: what an element is multiplied by, 1 / scale in two parts.
  float factor[kMostDim], high[kMostDim], low[kMostDim];
  uint32_t flips[kMostDim / 32];  // signs of R
};

// What a thread has of the part that its block works on: the tile in shared memory, its row in
// registers.
template <bool kWide>
struct Worker {
  const QuantizeParams& p;
  const Step& step;
  const TileShape& shape;
  RowPlace at;
  Shared& shared;
  char* memory;  // the tile
  Part part;
  float x[kChannels];

  __device__ Worker(const QuantizeParams& p, const Step& step, Shared& shared, char* memory)
      : p(p), step(step), shape(step.shape), at(shape, p.dim), shared(shared), memory(memory) {
    if (p.rotates) find_flips(p.dim, shared.flips);
  }

  __device__ __forceinline__ bool by_channel() const {
    return p.part == ScalePart::channels && p.scale.data != nullptr;
  }

  // A row of the tile as it is rounded, not yet divided by its scale nor by the size of R.
  __device__ __forceinline__ void prepare(int64_t from, bool wants_shift) {
    if constexpr (kWide) {
      read_row<DType::f32>(shape, at, memory, x);
    } else if (p.x.dtype == DType::f16) {
      read_row<DType::f16>(shape, at, memory, x);
    } else {
      read_row<DType::bf16>(shape, at, memory, x);
    }
    if (wants_shift) write_shift(from + at.row);
    if (p.mean != nullptr) subtract_mean(p, step, part, at, x);
    if (p.rotates) rotate_row(at, shared.flips, hadamard_size(p.dim), x);
  }

  // shift[row] = x[row] . shift_mean, from the row as it is given. All lanes of a warp call it.
  __device__ __forceinline__ void write_shift(int64_t row) const {
    const float* mean = p.shift_mean + part.b * p.shift_mean_batch +
                        part.h / p.shift_group * p.shift_mean_head + at.first;
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < kChannels; i += 4) {  // as float, for conversions to double are slow
      if (i / kRun * kRun >= at.channels) continue;
      auto of_four = load_floats<4>(mean + i, step.shift_pieces);
      float four = x[i] * of_four.x[0];
#pragma unroll
      for (int j = 1; j < 4; ++j) four = __fmaf_rn(x[i + j], of_four.x[j], four);
      sum += four;
    }
    for (int lane = 1; lane < shape.lanes; lane *= 2) sum += __shfl_xor_sync(kWarp, sum, 8 * lane);
    if (at.lane == 0 && row < min(part.first() + kScaleRows, p.rows))
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
    return is_there ? size * step.norm : 0.0f;
  }

  // The largest finite size of each channel of a warp's rows, into shared.sizes: threads in two rows
  // give each other half of their channels and keep the larger of what they have twice, and so on. x
  // is gone after it.
  __device__ __forceinline__ void note_channels(bool is_there) {
#pragma unroll
    for (float& size : x) size = is_there && is_finite(size) ? fabsf(size) * step.norm : 0.0f;
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

  // Before the part, and for the next one.
  __device__ __forceinline__ void clear_sizes() const {
    for (int i = threadIdx.x; i < sizes(); i += blockDim.x) shared.sizes[i] = 0;
  }
  __device__ __forceinline__ int sizes() const { return p.part == ScalePart::channels ? p.dim : 1; }

  // The scales of what was measured into those of the call: that of the largest size is the largest.
  __device__ __forceinline__ void raise_scales() const {
    const Float8Scale& s = p.scale;
    for (int i = threadIdx.x; i < sizes(); i += blockDim.x) {
      int64_t place = p.part == ScalePart::rows ? part.block : i;
      const float* scale =
          s.data + part.b * s.strides[0] + part.h / s.group * s.strides[1] + place * s.strides[2];
      float size = __int_as_float(shared.sizes[i]);
      if (size > 0.0f)
        atomicMax(reinterpret_cast<int*>(const_cast<float*>(scale)),
                  __float_as_int(scale_of(size, p.out.dtype)));
      shared.sizes[i] = 0;  // of the next part
    }
  }

  // Where nothing but 0 was measured, it is left as 0: 1 is put there.
  __device__ __forceinline__ float scale_at(int64_t place, bool puts) const {
    const Float8Scale& s = p.scale;
    float scale = s.at(part.b, part.h, place);
    if (!p.gives_scale || scale != 0.0f) return scale;
    if (puts)
      const_cast<float*>(
          s.data)[part.b * s.strides[0] + part.h / s.group * s.strides[1] + place * s.strides[2]] =
          1.0f;
    return 1.0f;
  }
  __device__ __forceinline__ void find_channel_scales() {
    for (int i = threadIdx.x; i < p.dim; i += blockDim.x) {
      Divisor by(scale_at(i, true));
      shared.factor[i] = by.factor;
      shared.high[i] = by.high;
      shared.low[i] = by.low;
    }
  }

  // Codes of the row where it lay, beginning with its first channel.
  __device__ __forceinline__ void encode(const Divisor& by, bool is_there) {
    uint4* to = reinterpret_cast<uint4*>(memory + shape.at(at.row) + at.first);
    float factor = by.factor * step.norm;
    bool apart = by_channel(), is_int8 = p.out.dtype == DType::i8;
    __syncwarp();  // the other thread of the row has read it
#pragma unroll
    for (int run = 0; run < kChannels; run += kRun) {
      float y[kRun] = {};
      if (!apart) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) y[i] = by.quotient(x[run + i] * factor);
      } else if (run < at.channels) {
        divide_by_channel(run, y);
      }
      uint32_t words[4];
      if (is_int8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = pack_int8(y + 4 * i);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = pack_e4m3(y + 4 * i);
      }
      if (!is_there) words[0] = words[1] = words[2] = words[3] = 0;
      if (run < at.channels) to[run / kRun] = uint4{words[0], words[1], words[2], words[3]};
    }
  }
  __device__ __forceinline__ void divide_by_channel(int run, float (&y)[kRun]) const {
#pragma unroll
    for (int i = 0; i < kRun; i += 4) {
      int channel = at.first + run + i;
      auto factors = load_floats<4>(shared.factor + channel, true);
      auto high = load_floats<4>(shared.high + channel, true);
      auto low = load_floats<4>(shared.low + channel, true);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float scaled = x[run + i + j] * (factors.x[j] * step.norm);
        y[i + j] = __fmaf_rn(scaled, high.x[j], scaled * low.x[j]);
      }
    }
  }

  // Codes of a tile to rows of out.
  __device__ __forceinline__ void write_rows(int64_t from) const {
    PiecePlace place(shape, p.dim);
    if (!place.is_there) return;
    int rows = static_cast<int>(min(int64_t{shape.rows}, part.last(step) - from));
    const char* codes = memory + place.piece * kSpan;
    auto* to = static_cast<uint8_t*>(p.out.data) + part.offset(p.out, from) +
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
        to[i * p.out.channel] = static_cast<uint8_t>(codes[shape.at(row) + i]);
    }
  }

  // The same where the rows of a channel lie side by side: a thread turns 16 rows of 4 channels.
  __device__ __forceinline__ void write_columns(int64_t from) const {
    uint8_t* out = static_cast<uint8_t*>(p.out.data) + part.offset(p.out, from);
    int rows = static_cast<int>(min(int64_t{shape.rows}, part.last(step) - from)),
        runs = shape.rows / 16;
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
    float scale = scale_of(__int_as_float(shared.sizes[0]), p.out.dtype);
    if (threadIdx.x == 0 && part.first() < p.rows)  // rows beyond x may have none
      const_cast<float*>(
          s.data)[part.b * s.strides[0] + part.h * s.strides[1] + part.block * s.strides[2]] =
          scale;
    return scale;
  }

  // Tiles of the part, once or, where all are measured before one is written, twice. The first is
  // there.
  __device__ __forceinline__ void run_part() {
    bool measures = step.measures, writes = step.writes;
    Divisor by{};  // of rows beyond x, which may have no scale, any
    if (!measures && !by_channel() && part.first() < p.rows)
      by = Divisor(scale_at(part.block, threadIdx.x == 0));
    int tiles = 1;
    if (kWide)
      tiles = static_cast<int>(ceil_div<int64_t>(part.last(step) - part.first(), shape.rows));
    bool is_twice = measures && writes && tiles > 1;
#pragma unroll 1
    for (int i = 0; i < (is_twice ? 2 * tiles : tiles); ++i) {
      bool is_last = i >= tiles || !is_twice;  // time that it comes
      int64_t from = part.first() + int64_t{i >= tiles ? i - tiles : i} * shape.rows;
      if (i > 0) {
        __syncthreads();  // who reads the tile before has done so
        load_tile<kWide>(p, step, part, shape, from, memory);
        await_tile();
      }
      prepare(from, p.shift != nullptr && i < tiles && measures == p.gives_scale);
      bool is_there = from + at.row < p.rows;
      if (measures && i < tiles) measure(is_there);
      if (measures && i == tiles - 1) {
        __syncthreads();
        if (!writes) return raise_scales();
        by = Divisor(take_scale());
      }
      if (!writes || !is_last) continue;
      encode(by, is_there);
      __syncthreads();
      if (step.by_columns) {
        write_columns(from);
      } else {
        write_rows(from);
      }
    }
    if (measures) clear_sizes();  // a barrier ago all had them
  }

  // The parts of the block. The first tile of the next one comes while it works on one.
  // Note: where ptxas does not see that all threads take the same way, shuffles cost spills. It sees it
  // of this form of the loop; a way out from its middle, or a part kept for the next round, costs them.
  __device__ __forceinline__ void run() {
    int other = step.prefetches ? shape.bytes() : 0;  // from this tile on
    clear_sizes();
    ask(blockIdx.x, memory);
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < step.parts; index += gridDim.x) {
      part = Part(p, step, index);
      if (step.writes && by_channel()) find_channel_scales();
      await_tile();  // and for who still reads the other one
      bool is_last = index + gridDim.x >= step.parts;
      if (step.prefetches && !is_last) ask(index + gridDim.x, memory + other);
      run_part();
      memory += other;
      other = -other;
      if (step.prefetches || is_last) continue;
      __syncthreads();
      ask(index + gridDim.x, memory);
    }
  }
  __device__ __forceinline__ void ask(uint32_t index, char* to) const {
    Part wanted(p, step, index);
    load_tile<kWide>(p, step, wanted, shape, wanted.first(), to);
  }
};

template <bool kWide>
__global__ void __launch_bounds__((kWide ? 2 : 4) * kScaleRows)
    quantize_step(const __grid_constant__ QuantizeParams p, const __grid_constant__ Step step) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Shared shared;
  wait_for_previous_kernel();
  release_next_kernel();
  Worker<kWide>(p, step, shared, memory).run();
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

bool lies_by_columns(const QuantizeArray& array) {
  uint64_t bits = reinterpret_cast<uintptr_t>(array.data);
  for (int64_t stride : {array.strides.batch, array.strides.head, array.channel})
    bits |= static_cast<uint64_t>(stride);
  return array.strides.seq == 1 && array.channel != 1 && bits % 16 == 0;
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
  template <bool kWide>
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
    allow_shared_memory(quantize_step<kWide>, std::min(2 * most, granted), allowed);
    launch_overlapping(quantize_step<kWide>, std::min(step.parts, together), shape.threads(),
                       (step.prefetches ? 2 : 1) * shape.bytes(), major, stream, p, step);
  }

  template <bool kWide>
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
      launch<kWide>(measuring, p.rows);
      step.from_last = true;
    }
    launch<kWide>(step, p.out_rows);
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
    if (!is_empty) launcher.run<kWide>();
  });
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
