// SPDX-License-Identifier: Apache-2.0
// The mean of each channel of a head over the sequence, for quantize: blocks of a cluster, from
// sm_90 on, take rows in turn, and the first one adds their sums in a fixed order. Next:
// quantize.cu.
#pragma once

#include "cuattn/device/overlap.cuh"
#include "cuda/fused/codes.cuh"

namespace cuattn {
namespace {

template <bool kWide>
constexpr int kMeanRows = kWide ? 4 : 8;  // of a thread, in flight together
constexpr int kMeanLanes = 8;             // of a row: 128 bytes in 16 bits
constexpr int kMeanCluster = 8;  // blocks that share the rows: 16 heads of 128 fill the device
constexpr int kMeanWidth = kMeanLanes * kSpan;
constexpr int kMeanStep = kThreads / kMeanLanes;
constexpr int kMeanWarps = kThreads / 32;

struct MeanSums {
  double sum[kMeanWarps][kMeanWidth];
  int count[kMeanWarps][kMeanWidth];
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

// What a thread adds up: 8 channels of its rows.
template <bool kWide>
struct MeanRows {
  static constexpr int kRows = kMeanRows<kWide>;
  using Raw = RawPiece<kWide>[kRows];

  const QuantizeParams& p;
  const bool in_pieces, is_half;
  const int64_t at;  // of row 0
  double sum[kSpan] = {};
  int count[kSpan] = {};

  __device__ MeanRows(const QuantizeParams& p, bool in_pieces, int64_t at)
      : p(p), in_pieces(in_pieces), is_half(!kWide && p.x.dtype == DType::f16), at(at) {}

  // Rows that lie in pieces and are all there, so that nothing stands between one load and the next.
  __device__ __forceinline__ bool is_whole(int64_t row) const {
    return in_pieces && row + (kRows - 1) * kMeanStep < p.rows;
  }
  __device__ __forceinline__ void load(int64_t row, Raw& raw) const {
#pragma unroll
    for (int a = 0; a < kRows; ++a)
      raw[a].load(p.x, true, at + (row + a * kMeanStep) * p.x.strides.seq);
  }

  __device__ __forceinline__ void add_row(const RawPiece<kWide>& raw) {
    float x[kSpan];
    raw.unpack(is_half, x);
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      if (!is_finite(x[i])) continue;
      sum[i] += x[i];
      ++count[i];
    }
  }
  // Any rows, one after the other.
  __device__ __forceinline__ void add_slowly(int64_t row) {
#pragma unroll 1
    for (int a = 0; a < kRows; ++a, row += kMeanStep) {
      if (row >= p.rows) return;
      RawPiece<kWide> raw;
      raw.load(p.x, in_pieces, at + row * p.x.strides.seq);
      add_row(raw);
    }
  }

  // Elements of 16 bits are summed as float: 8 of them have bits to spare, so that little or nothing is
  // rounded. False, and nothing added, where one is not finite.
  template <DType kType>
  __device__ __forceinline__ bool add_finite(const Raw& raw) {
    float together[kSpan] = {}, check = 0.0f;
#pragma unroll
    for (const RawPiece<kWide>& row : raw) {
      float x[kSpan];
      row.template unpack<kType>(x);
#pragma unroll
      for (int i = 0; i < kSpan; ++i) together[i] += x[i];
    }
#pragma unroll
    for (float x : together) check += x * 0.0f;  // NaN of what is not finite
    if (check != 0.0f) return false;
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      sum[i] += together[i];
      count[i] += kRows;
    }
    return true;
  }

  __device__ __forceinline__ void add(int64_t row, const Raw& raw) {
    if constexpr (kWide) {
#pragma unroll
      for (const RawPiece<true>& one : raw) add_row(one);
    } else if (!(is_half ? add_finite<DType::f16>(raw) : add_finite<DType::bf16>(raw))) {
      add_slowly(row);
    }
  }

  // Adds rows that are loaded while the next ones come. False: those are not whole.
  __device__ __forceinline__ bool step_on(int64_t& row, int64_t step, const Raw& raw, Raw& next) {
    bool is_next = is_whole(row + step);
    if (is_next) load(row + step, next);
    add(row, raw);
    row += step;
    return is_next;
  }

  // The rows of one block.
  __device__ __forceinline__ void add_all(int64_t first, int64_t step) {
    int64_t row = first;
    if (is_whole(row)) {
      Raw raw, next;
      load(row, raw);
#pragma unroll 1
      while (step_on(row, step, raw, next) && step_on(row, step, next, raw)) {
      }
    }
#pragma unroll 1
    for (; row < p.rows; row += step) add_slowly(row);
  }
};

// Of the finite elements of each channel of a head; 0 where there are none. A cluster takes a few
// channels of a head, of all rows.
template <bool kWide>
__global__ void __launch_bounds__(kThreads)
    means_kernel(const __grid_constant__ QuantizeParams p, bool in_pieces, int blocks) {
  __shared__ MeanSums sums;
  wait_for_previous_kernel();
  release_next_kernel();
  int slices = ceil_div(p.dim, kMeanWidth), rank = blockIdx.x % blocks;
  int slice = blockIdx.x / blocks, head = slice / slices;
  int b = head / p.heads, h = head % p.heads;
  int lane = threadIdx.x % kMeanLanes * kSpan, first = threadIdx.x / kMeanLanes;
  int channel = slice % slices * kMeanWidth + lane;
  MeanRows<kWide> rows(p, in_pieces,
                       b * p.x.strides.batch + h * p.x.strides.head + channel * p.x.channel);
  int64_t of_block = kMeanStep * kMeanRows<kWide>;
  if (channel < p.dim) rows.add_all(first + rank * of_block, blocks * of_block);
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
#pragma unroll
    for (int other = kMeanLanes; other < 32; other *= 2) {
      rows.sum[i] += __shfl_xor_sync(kWarp, rows.sum[i], other);
      rows.count[i] += __shfl_xor_sync(kWarp, rows.count[i], other);
    }
    if (threadIdx.x % 32 >= kMeanLanes) continue;
    sums.sum[threadIdx.x / 32][lane + i] = rows.sum[i];
    sums.count[threadIdx.x / 32][lane + i] = rows.count[i];
  }
  __syncthreads();
  int of = threadIdx.x;
  if (of < kMeanWidth) {
#pragma unroll
    for (int warp = 1; warp < kMeanWarps; ++warp) {
      sums.sum[0][of] += sums.sum[warp][of];
      sums.count[0][of] += sums.count[warp][of];
    }
  }
  meet_cluster();
  channel = slice % slices * kMeanWidth + of;
  if (rank == 0 && of < kMeanWidth && channel < p.dim) {
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

template <bool kWide>
void write_means(const QuantizeParams& p, int major, cudaStream_t stream) {
  int blocks =
      kKernelsWait && major >= 9 && p.rows > kMeanStep * kMeanRows<kWide> ? kMeanCluster : 1;
  int64_t slices = int64_t{p.batch} * p.heads * device::ceil_div(p.dim, kMeanWidth);
  launch_clusters(means_kernel<kWide>, blocks_of("quantize", slices * blocks),
                  dim3(static_cast<unsigned>(blocks)), kThreads, 0, major, stream, p,
                  lies_in_pieces(p.x, item_of(p.x.dtype), 16), blocks);
}

}  // namespace
}  // namespace cuattn
