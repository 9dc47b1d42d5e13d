// SPDX-License-Identifier: Apache-2.0
// What a thread block of quantize does to its parts: asks for a tile, prepares its rows, measures them,
// writes their codes. Next: quantize.cu, the kernels.
#pragma once

#include "cuda/fused/row_tile.cuh"

namespace cuattn {
namespace {

constexpr int kMostDim = 256;

struct Shared {
  int sizes[kMostDim];  // the largest, as bits: one of them, or one of each channel
  // Of the channels: what an element is multiplied by, norm / scale in two parts.
  alignas(16) float factor[kMostDim], high[kMostDim], low[kMostDim];
  alignas(16) uint32_t flips[kMostDim / 2];  // signs of R, of two channels in a word
};

// What a thread has of the part that its block works on: the tile in shared memory, its row in
// registers.
template <bool kWide>
struct Worker {
  const QuantizeParams& p;
  const Step& step;
  Shared& shared;
  char* memory;  // the tile
  RowPlace at;
  Part part;
  float x[kChannels];

  __device__ Worker(const QuantizeParams& p, const Step& step, Shared& shared, char* memory)
      : p(p), step(step), shared(shared), memory(memory), at(shape()) {}

  __device__ __forceinline__ const TileShape& shape() const { return step.shape; }
  __device__ __forceinline__ int dim() const { return p.dim; }
  // Channels that the thread has.
  __device__ __forceinline__ int channels() const {
    return max(min(p.dim - at.first, kChannels), 0);
  }
  __device__ __forceinline__ bool by_channel() const {
    return p.part == ScalePart::channels && p.scale.data != nullptr;
  }

  // Asks for rows of a part from `from` on, and for what all of them are to meet.
  __device__ __forceinline__ void ask(const Part& wanted, int64_t from, char* to) const {
    const TileShape shape = this->shape();
    if (p.mean != nullptr)
      load_channels(p.mean + wanted.b * p.mean_batch + wanted.h * p.mean_head, dim(),
                    step.mean_pieces, to);
    if (p.shift != nullptr)
      load_channels(p.shift_mean + wanted.b * p.shift_mean_batch +
                        wanted.h / p.shift_group * p.shift_mean_head,
                    dim(), step.shift_pieces, to + shape.shift_mean());
    load_tile<kWide>(p, step, wanted, shape, from, to);
    cp_async_commit();
  }
  // All threads call it, and have done with the other tile.
  __device__ __forceinline__ void await_tile() const {
    cp_async_wait<0>();
    if (p.rotates && p.mean != nullptr) flip_channels(shared.flips, dim(), memory);
    if (p.rotates && p.shift != nullptr)
      flip_channels(shared.flips, dim(), memory + shape().shift_mean());
    __syncthreads();
  }

  // A row of the tile as it is rounded, not yet divided by its scale nor by the size of R.
  __device__ __forceinline__ void prepare(int64_t from, bool wants_shift) {
    const char* row = memory + at.offset + at.first * (kWide ? 4 : 2);
    const uint32_t* flips = shared.flips + at.first / 2;
    if constexpr (kWide) {
      read_row<DType::f32>(row, flips, channels(), x);
    } else if (p.x.dtype == DType::f16) {
      read_row<DType::f16>(row, flips, channels(), x);
    } else {
      read_row<DType::bf16>(row, flips, channels(), x);
    }
    if (wants_shift) write_shift(from + at.row);
    if (p.mean != nullptr)
      subtract_mean(reinterpret_cast<const float*>(memory) + at.first, channels(), x);
    if (p.rotates) rotate_row(at, hadamard_size(p.dim), x);
  }

  // All lanes of a warp call it.
  __device__ __forceinline__ void write_shift(int64_t row) const {
    const auto* mean = reinterpret_cast<const float*>(memory + shape().shift_mean()) + at.first;
    const auto sum = static_cast<float>(dot_mean(mean, channels(), shape().lanes, x));
    if (at.lane == 0 && row < min(part.first() + kScaleRows, p.rows))
      p.shift[part.b * p.shift_batch + part.h * p.shift_head + row * p.shift_row] = sum;
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
    if (shape().lanes <= 2) halve<4>(16, first), kept = 4;
    if (shape().lanes == 1) halve<2>(8, first), kept = 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < kept && first + i < dim()) atomicMax(&shared.sizes[first + i], __float_as_int(x[i]));
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
    unsigned of_warp =
        __reduce_max_sync(kWarp, __float_as_uint(is_there ? largest_finite(x) * step.norm : 0.0f));
    if (threadIdx.x % 32 == 0) atomicMax(&shared.sizes[0], static_cast<int>(of_warp));
  }

  // Before the part, and for the next one.
  __device__ __forceinline__ void clear_sizes() const {
    for (int i = threadIdx.x; i < sizes(); i += blockDim.x) shared.sizes[i] = 0;
  }
  __device__ __forceinline__ int sizes() const { return p.part == ScalePart::channels ? dim() : 1; }

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
    for (int i = threadIdx.x; i < dim(); i += blockDim.x) {
      Divisor by(scale_at(i, true), step.norm);
      shared.factor[i] = by.factor;
      shared.high[i] = by.high;
      shared.low[i] = by.low;
    }
  }

  // Codes of the row where it lay, beginning with its first channel. x is gone after it.
  __device__ __forceinline__ void encode(const Divisor& by, bool is_there) {
    auto* to = reinterpret_cast<uint4*>(memory + at.offset + at.first);
    bool apart = by_channel(), is_int8 = p.out.dtype == DType::i8;
    if (!apart && by.factor != 1.0f) {  // as good as never
#pragma unroll
      for (float& one : x) one *= by.factor;
    }
    __syncwarp();  // the other thread of the row has read it
#pragma unroll
    for (int run = 0; run < kChannels; run += kRun) {
      float y[kRun] = {};
      if (!apart) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) y[i] = by.quotient(x[run + i]);
      } else if (run < channels()) {
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
      if (run < channels()) to[run / kRun] = uint4{words[0], words[1], words[2], words[3]};
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
        float scaled = x[run + i + j] * factors.x[j];
        y[i + j] = __fmaf_rn(scaled, high.x[j], scaled * low.x[j]);
      }
    }
  }

  // Codes of a tile to rows of out.
  __device__ __forceinline__ void write_rows(int64_t from) const {
    const TileShape shape = this->shape();
    PiecePlace place(shape);
    if (!place.is_there) return;
    int rows = static_cast<int>(min(int64_t{shape.rows}, step.last(part) - from));
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
    const TileShape shape = this->shape();
    uint8_t* out = static_cast<uint8_t*>(p.out.data) + part.offset(p.out, from);
    int rows = static_cast<int>(min(int64_t{shape.rows}, step.last(part) - from)),
        runs = shape.rows / 16;
    for (int i = threadIdx.x; i < dim() / 4 * runs; i += blockDim.x) {
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
      by = Divisor(scale_at(part.block, threadIdx.x == 0), step.norm);
    int tiles = 1;
    if (kWide)
      tiles = static_cast<int>(ceil_div<int64_t>(step.last(part) - part.first(), shape().rows));
    bool is_twice = measures && writes && tiles > 1;
#pragma unroll 1
    for (int i = 0; i < (is_twice ? 2 * tiles : tiles); ++i) {
      bool is_last = i >= tiles || !is_twice;  // time that it comes
      int64_t from = part.first() + int64_t{i >= tiles ? i - tiles : i} * shape().rows;
      if (i > 0) {
        __syncthreads();  // who reads the tile before has done so
        ask(part, from, memory);
        await_tile();
      }
      prepare(from, p.shift != nullptr && i < tiles && measures == p.gives_scale);
      bool is_there = from + at.row < p.rows;
      if (measures && i < tiles) measure(is_there);
      if (measures && i == tiles - 1) {
        __syncthreads();
        if (!writes) return raise_scales();
        by = Divisor(take_scale(), step.norm);
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
  // of this form of the loop; a way out from its middle costs them.
  __device__ __forceinline__ void run() {
    const auto heads = static_cast<uint32_t>(p.heads), batch = static_cast<uint32_t>(p.batch);
    int other = step.prefetches ? shape().bytes() : 0;  // from this tile on
    find_flips(dim(), p.rotates, shared.flips);
    clear_sizes();
    __syncthreads();
    Part next(step.from_last ? step.parts - 1 - blockIdx.x : blockIdx.x, heads, step.blocks);
    ask(next, next.first(), memory);
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < step.parts; index += gridDim.x) {
      part = next;
      next.advance(step.on, heads, step.blocks, batch);
      if (step.writes && by_channel()) find_channel_scales();
      await_tile();  // and for who still reads the other one
      bool is_last = index + gridDim.x >= step.parts;
      if (step.prefetches && !is_last) ask(next, next.first(), memory + other);
      run_part();
      memory += other;
      other = -other;
      if (step.prefetches || is_last) continue;
      __syncthreads();
      ask(next, next.first(), memory);
    }
  }
};

}  // namespace
}  // namespace cuattn
