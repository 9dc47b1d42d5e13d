// SPDX-License-Identifier: Apache-2.0
// What both passes of the sm90 backward kernels share: the state of query rows, tensor maps, tiles
// on their way to shared memory, and the two products. The letters are those of cpu/backward.cpp.
// Used by queries.cuh and keys.cuh. Next: include/cuattn/backward_tiles.h (the shapes).
#pragma once

#include "cuattn/backward_tiles.h"
#include "cuattn/device/dropout_sm90.cuh"
#include "cuattn/device/mask.cuh"
#include "cuattn/device/overlap.cuh"
#include "cuattn/device/wgmma48_sm90.cuh"
#include "cuattn/schedule.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_maps.h"

namespace cuattn::backward {

constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
// Threads share out the registers that a CTA is launched with (168 each). Warps that draw want more.
template <bool kDraws>
struct Registers {
  static constexpr int kOfConsumer = kDraws ? 232 : 240, kOfProducer = kDraws ? 40 : 24;
  static_assert(kConsumers * kOfConsumer + kOfProducer <= 3 * (65536 / kThreads / 8 * 8));
};

__device__ __forceinline__ float positive_infinity() { return __int_as_float(0x7f800000); }

// ---- The state of query rows (backward_tiles.h). The queries pass writes all rows of its tiles of
// kRowPad: those that take no part with {+inf, 0}. Rows of the last tile of a keys pass may lie
// beyond them, and hold anything.
struct RowStates {
  float *lse, *delta;  // lse in base 2
  int64_t pitch;       // of a head

  // Where row 0 of a sequence and head lies.
  __device__ __forceinline__ int64_t place(const AttentionParams& f, const Span& queries,
                                           int32_t batch, int32_t head) const {
    int64_t first = f.cu_seqlens_q != nullptr ? queries.start : int64_t{batch} * f.seqlen_q;
    return head * pitch + sm90_row_place(first, batch);
  }
};

inline RowStates row_states(const AttentionParams& f, void* workspace) {
  RowStates states{static_cast<float*>(workspace), nullptr, sm90_row_pitch(f.total_q, f.batch)};
  states.delta = states.lse + states.pitch * f.num_heads_q;
  return states;
}

// ---- Tensor maps: (columns, tokens, heads, batch, 1), boxes of 64 columns of `rows` tokens. They
// begin where tensors begin, so a box in a ragged tensor brings rows of the neighbour, too; what lies
// past the tensor comes as zeros.
struct Maps {
  device::TensorMap q, k, v, dout;
  device::TensorMap bias;  // of the biased form
};

// Row and batch of a box: those of row `first` of a sequence.
struct BoxPlace {
  int32_t row, batch;
  __device__ __forceinline__ BoxPlace(bool ragged, const Span& span, int32_t b, int32_t first)
      : row(static_cast<int32_t>(span.start) + first), batch(ragged ? 0 : b) {}
};

inline device::TensorMap rows_map(const AttentionParams& f, bool ragged, const void* base,
                                  const Strides& s, int32_t columns, int64_t tokens, int32_t heads,
                                  int32_t rows) {
  if (tokens == 0 || f.batch == 0)  // never read, but mapped
    base = f.total_q > 0 ? f.q : f.total_kv > 0 ? f.k : f.scores.bias;
  return tensor_map(f.dtype, base, {columns, tokens, heads, ragged ? 1 : f.batch, 1},
                    {s.seq, s.head, s.batch, 0}, {64, rows, 1, 1, 1});
}

// Boxes of `query_rows` rows of Q and dO, and of `keys` rows of K and V.
inline Maps make_maps(const BackwardParams& p, int32_t query_rows, int32_t keys, ScoreForm form) {
  const AttentionParams& f = p.forward;
  bool ragged_q = f.cu_seqlens_q != nullptr, ragged_kv = f.cu_seqlens_kv != nullptr;
  int64_t rows = ragged_q ? f.total_q : f.seqlen_q, rows_kv = ragged_kv ? f.total_kv : f.seqlen_kv;
  return {
      rows_map(f, ragged_q, f.q, f.q_strides, f.head_dim, rows, f.num_heads_q, query_rows),
      rows_map(f, ragged_kv, f.k, f.k_strides, f.head_dim, rows_kv, f.num_heads_kv, keys),
      rows_map(f, ragged_kv, f.v, f.v_strides, f.head_dim_v, rows_kv, f.num_heads_kv, keys),
      rows_map(f, ragged_q, p.dout, p.dout_strides, f.head_dim_v, rows, f.num_heads_q, query_rows),
      form == ScoreForm::biased ? bias_map(f) : device::TensorMap{}};
}

// ---- Tiles in shared memory: panels of 64 columns (mma_sm90.cuh).

// By one thread: a tile of kRows rows, a box for each panel; kPanels * kRows * 128 bytes.
template <int kRows, int kPanels>
__device__ __forceinline__ void load_tile(uint32_t smem, const device::TensorMap& map,
                                          uint32_t full, const BoxPlace& from, int32_t head,
                                          uint64_t l2_hint) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    device::tma_load(smem + panel * kRows * 128, &map, full, panel * 64, from.row, head, from.batch,
                     0, l2_hint);
  }
}

// By one thread: a tile of a bias, [panel of 64 keys][kRows queries][64]; kRows * kKeys * 2 bytes.
template <int kRows, int kKeys>
__device__ __forceinline__ void load_bias(uint32_t smem, const Maps& maps, uint32_t full,
                                          const ScoreParams& s, int32_t key, int32_t row,
                                          int32_t head, int32_t batch) {
  static_assert(kRows % 64 == 0 && kKeys % 64 == 0);
  if (s.bias_stride_head == 0) head = 0;
  if (s.bias_stride_batch == 0) batch = 0;
#pragma unroll
  for (int box = 0; box < kRows / 64 * (kKeys / 64); ++box) {
    const int panel = box / (kRows / 64), down = box % (kRows / 64) * 64;
    device::tma_load(smem + (panel * kRows + down) * 128, &maps.bias, full, key + panel * 64,
                     row + down, head, batch, 0, device::kEvictNormal);
  }
}

// Bytes that lie together, to shared memory; sizes and addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* from, uint32_t bytes,
                                          uint32_t full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(from), "r"(bytes), "r"(full)
      : "memory");
}

// Zeros for the rows [first, kRows) of a tile, by a group of consumers for itself: they may hold
// anything, and 0 x NaN is NaN. wgmma may read them when finish_clearing returns.
template <int kRows, int kPanels>
__device__ __forceinline__ void clear_tile(uint32_t tile, int first) {
  for (int i = threadIdx.x % 128; i < (kRows - first) * kPanels * 8; i += 128) {
    int chunk = i % 8, panel = i / 8 % kPanels, row = first + i / (8 * kPanels);
    device::store_shared16(tile + panel * kRows * 128 + row * 128 + chunk * 16, uint4{0, 0, 0, 0});
  }
}
constexpr uint32_t kClearBarrier = 4;  // and the next one: named barriers of the groups
__device__ __forceinline__ void finish_clearing(int group) {
  device::async_proxy_fence();
  device::named_barrier_sync(kClearBarrier + group, 128);
}

// ---- Dropout: the last warps of the group of producers draw, each every kDrawers-th part of the
// tiles, counted on from tile to tile.
// Z is a factor of all kept probabilities, so it stays out of the tiles: dx = Z P (dP - Delta / Z)
// where kept, and dq, dk and dv are multiplied by it in the end.

constexpr int kDrawers = 3;  // all warps but the one that loads

// Who draws; negative: not this warp.
__device__ __forceinline__ int drawer_number() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0) - (4 - kDrawers);
}
// By a whole warp: its bits are there for whoever waits for `full`.
__device__ __forceinline__ void hand_over(uint32_t full) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) device::barrier_arrive(full);
}

// ---- Products of a group of consumers; the caller fences before and commits behind.

// result (64 x kColumns) = left right^T: 64 rows at `left` of a tile of kLeftRows, and a tile of
// kColumns rows, both of kDim columns.
template <DType kType, int kDim, int kLeftRows, int kColumns>
__device__ __forceinline__ void multiply_rows(float (&result)[kColumns / 2], uint32_t left,
                                              uint32_t right) {
  const uint64_t a = device::wgmma_descriptor(left, 0), b = device::wgmma_descriptor(right, 0);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    device::Wgmma<kType, kColumns>::template ss<0>(
        result, device::advance(a, step / 4 * kLeftRows * 128 + step % 4 * 32),
        device::advance(b, step / 4 * kColumns * 128 + step % 4 * 32), step != 0);
  }
}

// sum (64 x kDim) += weights right: weights (64 x kRows) packed in registers in the order of a wgmma
// A operand, `right` a tile of kRows rows.
template <DType kType, int kDim, int kRows>
__device__ __forceinline__ void add_weighted(float (&sum)[kDim / 2],
                                             const uint32_t (&weights)[kRows / 4], uint32_t right) {
  const uint64_t b = device::wgmma_descriptor(right, kRows * 128);
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
    const auto& a = reinterpret_cast<const uint32_t (&)[4]>(weights[4 * step]);
    device::Wgmma<kType, kDim>::template rs<1>(sum, a, device::advance(b, step * 2048), 1);
  }
}

// ---- Numbers of an accumulator

// The smaller one; NaN stays NaN.
__device__ __forceinline__ float at_most(float x, float limit) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
}

// Packs an accumulator as an A operand.
template <DType kType, int kCount>
__device__ __forceinline__ void pack(uint32_t (&packed)[kCount / 2], const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) packed[i] = device::pack2<kType>(x[2 * i], x[2 * i + 1]);
}

// 16-bit columns [first, first + kColumns) of a row, from the accumulators of half `half` of its
// lanes, times `factor`. A quad turns its 4 x 4 words, so that each lane holds all columns of a block
// of 8. `row` points at the row's first column.
template <DType kType, int kColumns>
__device__ __forceinline__ void store_row(const float (&sum)[kColumns / 2], int half, float factor,
                                          void* row, int first, int32_t dim, bool used,
                                          bool stored) {
  static_assert(kColumns % 32 == 0);
  const int quad = threadIdx.x % 4;
  auto value = [&](int block, int i) {
    return used ? sum[4 * block + 2 * half + i] * factor : 0.0f;
  };
#pragma unroll
  for (int block = 0; block < kColumns / 8; block += 4) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = device::pack2<kType>(value(block + i, 0), value(block + i, 1));
    device::quad_transpose(words);
    const int column = first + (block + quad) * 8;
    if (stored && column < dim) {
      *reinterpret_cast<uint4*>(static_cast<char*>(row) + 2 * column) = {words[0], words[1],
                                                                         words[2], words[3]};
    }
  }
}

}  // namespace cuattn::backward
