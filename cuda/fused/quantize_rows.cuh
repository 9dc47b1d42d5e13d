// SPDX-License-Identifier: Apache-2.0
// Rows of 64, 128 or 256 numbers of 16 bits, as quantize mostly has them. A warp takes rows of its own
// through shared memory and back. It meets the others of its thread block for the largest size of a part,
// where that is wanted, and for codes by columns.
//
//   memory            shared memory, 4096 bytes     registers of 1, 2 or 4 threads
//   row 0  |~~~~~~|   row 0  |~~|~~|~~|~~|          x[0..63], x[0..63]    signs, butterflies
//   row 1  |~~~~~~|   row 1  |~~|~~|~~|~~|          x[0..63], x[0..63]    of 1, 2, 4 .. channels
//
// Pieces of 16 bytes change their places in a row's 128 bytes by the row, so that 8 threads read and
// write 8 rows, or 8 sixteens of rows by columns, without conflict. Codes lie where their rows lay.
// Next: quantize.cu, the kernels; row_tile.cuh, butterflies.
#pragma once

#include "cuda/fused/row_tile.cuh"

namespace cuattn {
namespace {

constexpr int kRowPieces = 8;  // of a thread
constexpr int kRowWarps = 16;  // of a thread block, at most

struct RowShared {
  unsigned sizes[2][kRowWarps];  // as bits, the largest of each warp: of this part, the one before
  alignas(16) uint32_t flips[4 * (kChannels / 2)];  // signs of R, of two channels in a word
};

// What shared memory holds of a part: its rows, then what they meet, a copy for each warp.
struct RowStage {
  int rows, copies;  // bytes
  bool has_mean, has_shift;

  RowStage(int lanes, bool has_mean, bool has_shift)
      : rows(kScaleRows * lanes * kChannels * 2),
        copies(4 * lanes * lanes * kChannels * 4),
        has_mean(has_mean),
        has_shift(has_shift) {}
  int mean() const { return rows; }
  int shift_mean() const { return rows + (has_mean ? copies : 0); }
  int bytes() const { return shift_mean() + (has_shift ? copies : 0); }
};

// What a thread has of the part that its block works on: a row, or half or a quarter of one. kLanes:
// threads of a row, of 64 channels each.
template <int kLanes>
struct RowWorker {
  static constexpr int kDim = kLanes * kChannels, kBytes = 2 * kDim;  // of a row of numbers
  static constexpr int kRows = 32 / kLanes;                           // of a warp
  static constexpr int kWarps = kScaleRows / kRows;

  const QuantizeParams& p;
  const Step& step;
  RowShared& shared;
  RowPlace at;  // the thread's row and channels
  char* stage;  // rows of the part, then a copy of what they meet for each warp
  Part part;
  float x[kChannels];

  __device__ RowWorker(const QuantizeParams& p, const Step& step, RowShared& shared, char* memory)
      : p(p), step(step), shared(shared), at(TileShape(kDim, 2)), stage(memory) {}

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  // Where 16 bytes of a row lie, its `piece`; a row of codes has room as one of numbers.
  static __device__ __forceinline__ int place(int row, int piece) {
    return row * kBytes + (piece & ~7) * 16 + ((piece ^ row ^ row >> 4) & 7) * 16;
  }
  // The same of a row `on` rows below. No bit is set both in `on` and in the number of the first row.
  static __device__ __forceinline__ int place_on(int at, int on) {
    return (at ^ (on & 7) * 16 ^ (on >> 4 & 7) * 16) + on * kBytes;
  }
  __device__ __forceinline__ float* means(int of) const {
    return reinterpret_cast<float*>(stage + of) + warp() * kDim;
  }

  // Asks for the rows of a part, and for what they are to meet.
  __device__ __forceinline__ void ask(const Part& wanted, char* to) const {
    constexpr int kPieces = kLanes * kRowPieces, kOn = 32 / kPieces;
    const int row = warp() * kRows + thread() / kPieces, piece = thread() % kPieces;
    const int64_t first = wanted.first() + row;
    const auto* from =
        static_cast<const char*>(p.x.data) + (wanted.offset(p.x, first) + piece * kSpan) * 2;
    const int64_t bytes_on = kOn * p.x.strides.seq * 2;
    const int there = static_cast<int>(max(min(p.rows - first, int64_t{kRows}), int64_t{0}));
    const uint32_t tile = smem_address(to);
    const int at = place(row, piece);
#pragma unroll
    for (int i = 0; i < kRowPieces; ++i, from += bytes_on) {
      bool is_there = i * kOn < there;
      cp_async16(tile + place_on(at, i * kOn), is_there ? from : p.x.data, is_there);
    }
    if (p.mean != nullptr)
      ask_means(p.mean + wanted.b * p.mean_batch + wanted.h * p.mean_head, to + step.mean_at);
    if (p.shift != nullptr)
      ask_means(p.shift_mean + wanted.b * p.shift_mean_batch +
                    wanted.h / p.shift_group * p.shift_mean_head,
                to + step.shift_at);
  }
  __device__ __forceinline__ void ask_means(const float* from, char* to) const {
    uint32_t copy = smem_address(to) + warp() * kDim * 4;
#pragma unroll
    for (int i = 4 * thread(); i < kDim; i += 128) cp_async16(copy + i * 4, from + i);
  }
  // Gives them the signs of R: each thread to what it has asked for.
  __device__ __forceinline__ void flip_means(int of) const {
    float* to = means(of);
#pragma unroll
    for (int i = 4 * thread(); i < kDim; i += 128) {
      auto& four = *reinterpret_cast<uint4*>(to + i);
      const uint32_t low = shared.flips[i / 2], high = shared.flips[i / 2 + 1];
      four = uint4{four.x ^ flip_of(low, 0), four.y ^ flip_of(low, 1), four.z ^ flip_of(high, 0),
                   four.w ^ flip_of(high, 1)};
    }
  }
  __device__ __forceinline__ void await_rows() const {
    cp_async_wait<1>();  // all but the next part's
    if (p.rotates && p.mean != nullptr) flip_means(step.mean_at);
    if (p.rotates && p.shift != nullptr) flip_means(step.shift_at);
    __syncwarp();
  }

  // The thread's channels as they are rounded, not yet divided by their scale nor by the size of R.
  __device__ __forceinline__ void prepare(bool wants_shift) {
    if (p.x.dtype == DType::f16) {
      p.rotates ? read<DType::f16, true>() : read<DType::f16, false>();
    } else {
      p.rotates ? read<DType::bf16, true>() : read<DType::bf16, false>();
    }
    if (wants_shift) write_shift();
    if (p.mean != nullptr) subtract_mean(means(step.mean_at) + at.lane * kChannels, kChannels, x);
    if (!p.rotates) return;
    mix<1>(x);
    mix<2>(x);
    mix<4>(x);
    mix<8>(x);
    mix<16>(x);
    mix<32>(x);
    if constexpr (kLanes > 1) mix_lanes<1>(at, x);
    if constexpr (kLanes > 2) mix_lanes<2>(at, x);
  }

  template <DType kType, bool kRotates>
  __device__ __forceinline__ void read() {
    const int row = place(at.row, at.lane * kRowPieces);
    const auto* flips = reinterpret_cast<const uint4*>(shared.flips) + at.lane * kRowPieces;
#pragma unroll
    for (int i = 0; i < kRowPieces; ++i) {
      RawPiece<false> raw;
      raw.take(stage + (row ^ i * 16));
      if (kRotates) raw.flip(flips[i]);
      raw.template unpack<kType>(reinterpret_cast<float (&)[kSpan]>(x[i * kSpan]));
    }
  }

  __device__ __forceinline__ void write_shift() const {
    const float* mean = means(step.shift_at) + at.lane * kChannels;
    const auto sum = static_cast<float>(dot_mean(mean, kChannels, kLanes, x));
    int64_t row = part.first() + at.row;
    if (at.lane == 0 && row < p.rows)
      p.shift[part.b * p.shift_batch + part.h * p.shift_head + row * p.shift_row] = sum;
  }

  // The largest finite size of the part. Rounding keeps the order of numbers, so one product is
  // enough. All threads of the block call it.
  __device__ __forceinline__ float measure(bool is_there, unsigned (&sizes)[kRowWarps]) const {
    const float size = is_there ? largest_finite(x) * step.norm : 0.0f;
    unsigned of_warp = __reduce_max_sync(kWarp, __float_as_uint(size));
    if (thread() == 0) sizes[warp()] = of_warp;
    __syncthreads();
    return __uint_as_float(__reduce_max_sync(kWarp, sizes[thread() % kWarps]));
  }

  // Codes of the thread's channels where the row lay. x is gone after it.
  template <bool kInt8>
  __device__ __forceinline__ void encode(const Divisor& by, bool is_there) {
    if (by.factor != 1.0f) {  // as good as never
#pragma unroll
      for (float& one : x) one *= by.factor;
    }
    const int row = place(at.row, at.lane * 4);
    __syncwarp();  // the other threads of the row have read it
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) y[k] = by.quotient(x[i * 16 + j * 4 + k]);
        words[j] = kInt8 ? pack_int8(y) : pack_e4m3(y);
        if (!is_there) words[j] = 0;
      }
      *reinterpret_cast<uint4*>(stage + (row ^ i * 16)) =
          uint4{words[0], words[1], words[2], words[3]};
    }
  }

  // Codes of the warp's rows to out.
  __device__ __forceinline__ void write_rows() const {
    __syncwarp();
    constexpr int kPieces = kLanes * 4, kOn = 32 / kPieces;
    const int row = warp() * kRows + thread() / kPieces, piece = thread() % kPieces;
    const int64_t first = part.first() + row;
    const int there = static_cast<int>(max(min(step.rows - first, int64_t{kRows}), int64_t{0}));
    auto* to = static_cast<uint8_t*>(p.out.data) + part.offset(p.out, first) + piece * 16;
    const int64_t bytes_on = kOn * p.out.strides.seq;
    const int at = place(row, piece);
#pragma unroll
    for (int i = 0; i < 4; ++i, to += bytes_on) {
      if (i * kOn < there)
        *reinterpret_cast<uint4*>(to) =
            *reinterpret_cast<const uint4*>(stage + place_on(at, i * kOn));
    }
  }

  // The same of the block's rows where the rows of a channel lie side by side: a thread turns 16 rows
  // of 4 channels, and 8 threads write all rows of a channel.
  __device__ __forceinline__ void write_columns() const {
    __syncthreads();
    constexpr int kThreadsOn = 32 * kWarps / 8;
    const int row = static_cast<int>(threadIdx.x) % 8 * 16;
    const int64_t there = step.rows - part.first() - row;
#pragma unroll 1
    for (int word = static_cast<int>(threadIdx.x) / 8; word < kDim / 4; word += kThreadsOn) {
      const int at = place(row, word / 4) + word % 4 * 4;
      uint32_t turned[4][4];  // [channel][four rows]
#pragma unroll
      for (int four = 0; four < 4; ++four) {
        uint32_t rows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          rows[i] = *reinterpret_cast<const uint32_t*>(stage + place_on(at, four * 4 + i));
        turn_bytes(rows, 1, four, turned);
      }
      uint8_t* to = static_cast<uint8_t*>(p.out.data) + part.offset(p.out, part.first() + row) +
                    word * 4 * p.out.channel;
      if (there >= 16) {
#pragma unroll
        for (int c = 0; c < 4; ++c, to += p.out.channel)
          *reinterpret_cast<uint4*>(to) =
              uint4{turned[c][0], turned[c][1], turned[c][2], turned[c][3]};
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < 4 * static_cast<int>(max(there, int64_t{0})); ++i)
        to[i % 4 * p.out.channel + i / 4] =
            static_cast<uint8_t>(stage[place(row + i / 4, word / 4) + word % 4 * 4 + i % 4]);
    }
    __syncthreads();  // before rows come where these lie
  }

  __device__ __forceinline__ float* scale_place() const {
    const Float8Scale& s = p.scale;
    return const_cast<float*>(s.data) + part.b * s.strides[0] + part.h / s.group * s.strides[1] +
           (p.part == ScalePart::rows ? part.block : 0) * s.strides[2];
  }
  // The scale of what was measured, where the part is not the only one that has it.
  __device__ __forceinline__ void raise_scale(float size) const {
    if (threadIdx.x != 0 || !(size > 0.0f)) return;
    atomicMax(reinterpret_cast<int*>(scale_place()), __float_as_int(scale_of(size, p.out.dtype)));
  }
  __device__ __forceinline__ float put_scale(float size) const {
    float scale = scale_of(size, p.out.dtype);
    if (threadIdx.x == 0 && part.first() < p.rows)
      *scale_place() = scale;  // rows beyond may have none
    return scale;
  }
  // Where nothing but 0 was measured, it is left as 0: 1 is put there.
  __device__ __forceinline__ float given_scale() const {
    if (part.first() >= p.rows) return 1.0f;  // rows beyond x are 0 by any
    if (p.scale.data == nullptr) return p.scale.number;
    float scale = *scale_place();
    if (!p.gives_scale || scale != 0.0f) return scale;
    if (threadIdx.x == 0) *scale_place() = 1.0f;
    return 1.0f;
  }

  __device__ __forceinline__ void run_part(unsigned (&sizes)[kRowWarps]) {
    float scale = step.measures ? 0.0f : given_scale();
    prepare(p.shift != nullptr && step.measures == p.gives_scale);
    bool is_there = part.first() + at.row < p.rows;
    if (step.measures) {
      float size = measure(is_there, sizes);
      if (!step.writes) return raise_scale(size);
      scale = put_scale(size);
    }
    Divisor by(scale, step.norm);
    if (p.out.dtype == DType::i8) {
      encode<true>(by, is_there);
    } else {
      encode<false>(by, is_there);
    }
    if (step.by_columns) return write_columns();
    write_rows();
  }

  // The parts of the block. The rows of the next one come while it works on one.
  __device__ __forceinline__ void run() {
    const auto heads = static_cast<uint32_t>(p.heads), batch = static_cast<uint32_t>(p.batch);
    int other = step.stage, half = 0;  // from this stage on
    find_flips(kDim, p.rotates, shared.flips);
    __syncthreads();
    Part next(step.from_last ? step.parts - 1 - blockIdx.x : blockIdx.x, heads, step.blocks);
#pragma unroll 1
    for (uint32_t index = blockIdx.x;; index += gridDim.x) {
      const bool asks = index < step.parts;
      __syncwarp();
      if (asks) ask(next, stage + other);
      cp_async_commit();
      if (index != blockIdx.x) {
        await_rows();
        run_part(shared.sizes[half]);
        half ^= 1;
      }
      if (!asks) return;
      part = next;
      next.advance(step.on, heads, step.blocks, batch);
      stage += other;
      other = -other;
    }
  }
};

}  // namespace
}  // namespace cuattn
