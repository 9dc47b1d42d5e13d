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
constexpr int kMeanLanes = 4;             // of a row: 64 bytes in 16 bits
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

// Elements of kMeanRows rows, of 16 bits each, summed as float: 8 of them have bits to spare, so that
// little or nothing is rounded. False, and nothing added, where one is not finite.
template <DType kType>
__device__ __forceinline__ bool add_finite(const RawPiece<false> (&raw)[kMeanRows<false>],
                                           double (&sum)[kSpan], int (&count)[kSpan]) {
  float together[kSpan] = {}, check = 0.0f;
#pragma unroll
  for (const RawPiece<false>& row : raw) {
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
    count[i] += kMeanRows<false>;
  }
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
  double sum[kSpan] = {};
  int count[kSpan] = {};
  if (channel < p.dim) {
    int64_t at = b * p.x.strides.batch + h * p.x.strides.head + channel * p.x.channel;
    int64_t of_block = kMeanStep * kMeanRows<kWide>;
    add_rows<kWide>(p, in_pieces, at, first + rank * of_block, blocks * of_block, sum, count);
  }
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
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
