// SPDX-License-Identifier: Apache-2.0
// The mean of each channel of a head over the sequence, for quantize: blocks of a cluster, from
// sm_90 on, take rows in turn, and the first one adds their sums in a fixed order. Next:
// quantize_launch.cuh.
#pragma once

#include "cuattn/device/overlap.cuh"
#include "cuda/fused/turned_rows.cuh"

namespace cuattn {
namespace {

template <bool kWide>
constexpr int kMeanRows = kWide ? 4 : 8;  // of a thread, in flight together
constexpr int kMeanLanes = 4;             // of a row: 64 bytes in 16 bits
constexpr int kMeanCluster = 8;  // blocks that share the rows: 16 heads of 128 fill the device
constexpr int kMeanStep = kThreads / kMeanLanes;
constexpr int kMeanWarps = kThreads / 32;

template <int kMeanWidth>
struct MeanSums {
  double sum[kMeanWarps][kMeanWidth];
  int count[kMeanWarps][kMeanWidth];
  int lost[kMeanWidth];  // where rows are turned: not finite, but counted
};

// All blocks of the cluster, with what they wrote to shared memory.
__device__ __forceinline__ void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}

// `x` of this block, as it stands in block `rank`.
template <class T>
__device__ __forceinline__ T read_block(const T& x, int rank) {
#if __CUDA_ARCH__ >= 900
  const T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(&x), "r"(rank));
  return *there;
#else
  return x;
#endif
}

// The piece at `first` of what rows have together. False, and nothing added, where an element of
// it is not finite.
template <int kCount>
__device__ __forceinline__ bool add_together(int first, const float (&together)[kCount],
                                             double (&sum)[kCount]) {
  float check = 0.0f;
#pragma unroll
  for (int i = 0; i < kSpan; ++i) check += together[first + i] * 0.0f;  // NaN of what is not finite
  if (check != 0.0f) return false;
#pragma unroll
  for (int i = 0; i < kSpan; ++i) sum[first + i] += together[first + i];
  return true;
}

// Elements of kMeanRows rows, of 16 bits each, summed as float: 8 of them have bits to spare, so that
// little or nothing is rounded. False, and nothing added, where one is not finite.
template <DType kType>
__device__ __forceinline__ bool add_finite(const RawPiece<false> (&raw)[kMeanRows<false>],
                                           double (&sum)[kSpan], int (&count)[kSpan]) {
  float together[kSpan] = {};
#pragma unroll
  for (const RawPiece<false>& row : raw) {
    float x[kSpan];
    row.template unpack<kType>(x);
#pragma unroll
    for (int i = 0; i < kSpan; ++i) together[i] += x[i];
  }
  if (!add_together(0, together, sum)) return false;
#pragma unroll
  for (int i = 0; i < kSpan; ++i) count[i] += kMeanRows<false>;
  return true;
}

// Finite elements of the rows of one block.
template <bool kWide>
__device__ __forceinline__ void add_rows(const QuantizeParams& p, bool in_pieces, int64_t at,
                                         int64_t first, int64_t step, double (&sum)[kSpan],
                                         int (&count)[kSpan]) {
  bool is_half = !kWide && p.x.dtype == DType::f16;
  for (int64_t row = first; row < p.rows; row += step) {
    RawPiece<kWide> raw[kMeanRows<kWide>];
#pragma unroll
    for (int a = 0; a < kMeanRows<kWide>; ++a) {
      int64_t next = row + a * kMeanStep;
      if (next < p.rows) raw[a].load(p.x, in_pieces, at + next * p.x.strides.seq);
    }
    if constexpr (!kWide) {
      bool is_whole = row + (kMeanRows<kWide> - 1) * kMeanStep < p.rows;
      if (is_whole && (is_half ? add_finite<DType::f16>(raw, sum, count)
                               : add_finite<DType::bf16>(raw, sum, count)))
        continue;
    }
#pragma unroll
    for (int a = 0; a < kMeanRows<kWide>; ++a) {
      if (row + a * kMeanStep >= p.rows) break;
      float x[kSpan];
      raw[a].unpack(is_half, x);
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        if (!is_finite(x[i])) continue;
        sum[i] += x[i];
        ++count[i];
      }
    }
  }
}

// The same of rows that are turned first: load(row, x) gives kPieces pieces of one, rounded to the dtype
// of x. In the order of add_rows, so that the bits are those of rows that apply_rope has turned. Returns
// the number of rows; `lost`, in shared memory: how many elements of each channel are not finite.
template <bool kWide, int kPieces, class Load>
__device__ __forceinline__ int add_turned_rows(const QuantizeParams& p, int64_t first, int64_t step,
                                               const Load& load, double (&sum)[kPieces * kSpan],
                                               int* lost) {
  constexpr int kRows = kMeanRows<kWide>;
  int count = 0;
  for (int64_t row = first; row < p.rows; row += step) {
    bool is_added[kPieces] = {};
    if (!kWide && row + (kRows - 1) * kMeanStep < p.rows) {
      float together[kPieces * kSpan] = {};
#pragma unroll 1
      for (int a = 0; a < kRows; ++a) {
        float x[kPieces * kSpan];
        load(row + a * kMeanStep, x);
#pragma unroll
        for (int i = 0; i < kPieces * kSpan; ++i) together[i] += x[i];
      }
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        is_added[piece] = add_together(piece * kSpan, together, sum);
    }
    if (is_added[0] && is_added[kPieces - 1]) {
      count += kRows;
      continue;
    }
#pragma unroll 1
    for (int a = 0; a < kRows && row + a * kMeanStep < p.rows; ++a) {
      float x[kPieces * kSpan];
      load(row + a * kMeanStep, x);
#pragma unroll
      for (int i = 0; i < kPieces * kSpan; ++i) {
        if (is_added[i / kSpan]) continue;
        if (is_finite(x[i])) {
          sum[i] += x[i];
        } else {
          atomicAdd(lost + i, 1);
        }
      }
      ++count;
    }
  }
  return count;
}

// Of the finite elements of each channel of a head; 0 where there are none. A cluster takes a few
// channels of a head, of all rows. kPieces: those that a thread has of a row that is turned, or 0.
template <bool kWide, int kPieces>
__global__ void __launch_bounds__(kThreads, kPieces)
    means_kernel(const __grid_constant__ QuantizeParams p, bool in_pieces, int blocks) {
  constexpr int kOfThread = kPieces == 2 ? 2 * kSpan : kSpan, kMeanWidth = kMeanLanes * kOfThread;
  __shared__ MeanSums<kMeanWidth> sums;
  wait_for_previous_kernel();
  release_next_kernel();
  const int slices = ceil_div(p.dim, kMeanWidth), rank = blockIdx.x % blocks;
  int slice = blockIdx.x / blocks, head = slice / slices;
  int b = head / p.heads, h = head % p.heads;
  int lane = threadIdx.x % kMeanLanes * kOfThread, first = threadIdx.x / kMeanLanes;
  int channel = slice % slices * kMeanWidth + lane;
  double sum[kOfThread] = {};
  int count[kOfThread] = {};
  if constexpr (kPieces != 0) {
    if (threadIdx.x < kMeanWidth) sums.lost[threadIdx.x] = 0;
    __syncthreads();
  }
  if (channel < p.dim) {
    int64_t at = b * p.x.strides.batch + h * p.x.strides.head;
    int64_t of_block = kMeanStep * kMeanRows<kWide>;
    int64_t from = first + rank * of_block, on = blocks * of_block;
    if constexpr (kPieces == 0) {
      add_rows<kWide>(p, in_pieces, at + channel * p.x.channel, from, on, sum, count);
    } else {
      int seen = 0, *lost = sums.lost + lane;
      if constexpr (kPieces == 1) {
        TurnedPiece<kWide> piece{p, at, b, channel};
        seen = add_turned_rows<kWide, 1>(p, from, on, piece, sum, lost);
      } else if (p.x.dtype == DType::f16) {
        TurnedPair<DType::f16> pair(p, at, b, channel);
        seen = add_turned_rows<kWide, 2>(p, from, on, pair, sum, lost);
      } else {
        TurnedPair<DType::bf16> pair(p, at, b, channel);
        seen = add_turned_rows<kWide, 2>(p, from, on, pair, sum, lost);
      }
#pragma unroll
      for (int& of_channel : count) of_channel = seen;
    }
  }
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
#pragma unroll
    for (int other = kMeanLanes; other < 32; other *= 2) {
      sum[i] += __shfl_xor_sync(kWarp, sum[i], other);
      count[i] += __shfl_xor_sync(kWarp, count[i], other);
    }
    if (threadIdx.x % 32 >= kMeanLanes) continue;
    sums.sum[threadIdx.x / 32][lane + i] = sum[i];
    sums.count[threadIdx.x / 32][lane + i] = count[i];
  }
  __syncthreads();
  int of = threadIdx.x;
  if (of < kMeanWidth) {
#pragma unroll
    for (int warp = 1; warp < kMeanWarps; ++warp) {
      sums.sum[0][of] += sums.sum[warp][of];
      sums.count[0][of] += sums.count[warp][of];
    }
    if constexpr (kPieces != 0) sums.count[0][of] -= sums.lost[of];
  }
  meet_cluster();
  channel = slice % slices * kMeanWidth + of;
  if (rank == 0 && of < kMeanWidth && channel < p.dim) {
    if constexpr (kPieces == 2) channel = PairPlace(p.rope, channel).channel(channel);
    double total = 0.0;
    int64_t number = 0;
    for (int block = 0; block < blocks; ++block) {
      total += read_block(sums.sum[0][of], block);
      number += read_block(sums.count[0][of], block);
    }
    p.mean[b * p.mean_batch + h * p.mean_head + channel] =
        static_cast<float>(number == 0 ? 0.0 : total / static_cast<double>(number));
  }
  meet_cluster();  // no block ends while another reads what it holds
}

template <bool kWide, int kPieces>
void launch_means(const QuantizeParams& p, int major, cudaStream_t stream) {
  int blocks =
      kKernelsWait && major >= 9 && p.rows > kMeanStep * kMeanRows<kWide> ? kMeanCluster : 1;
  int width = (kPieces == 2 ? 2 : 1) * kMeanLanes * kSpan;
  int64_t slices = int64_t{p.batch} * p.heads * device::ceil_div(p.dim, width);
  launch_clusters(means_kernel<kWide, kPieces>, blocks_of("quantize", slices * blocks),
                  dim3(static_cast<unsigned>(blocks)), kThreads, 0, major, stream, p,
                  lies_in_pieces(p.x, item_of(p.x.dtype), 16), blocks);
}

template <bool kWide, bool kTurns>
void write_means(const QuantizeParams& p, int major, cudaStream_t stream) {
  if constexpr (!kTurns) {
    launch_means<kWide, 0>(p, major, stream);
  } else {
    if constexpr (!kWide) {
      if (turns_in_pieces(p.rope) && lies_in_pieces(p.x, 2, 16))
        return launch_means<false, 2>(p, major, stream);
    }
    launch_means<kWide, 1>(p, major, stream);
  }
}

}  // namespace
}  // namespace cuattn
