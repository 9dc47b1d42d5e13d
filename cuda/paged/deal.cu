// SPDX-License-Identifier: Apache-2.0
// The deal of paged attention (PagedDeal in params/deal.h): the tiles of a step stand in rows,
// every worker takes an equal stretch of one. One block: the lengths are few and the kernel is
// short. Next: device/paged/tasks.cuh (who reads it).
#include "cuattn/device/math.cuh"
#include "cuattn/device/overlap.cuh"
#include "cuattn/params/deal.h"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kThreads = 1024;

// Inclusive sum over the block; every thread takes part. `warp_sums`: 32 words.
__device__ int32_t block_scan(int32_t value, int32_t* warp_sums) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    int32_t left = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += left;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value += warp_sums[w];
  __syncthreads();  // warp_sums is written again in the next round
  return value;
}

__global__ void __launch_bounds__(kThreads) paged_deal(const PagedWork w, int32_t* deal) {
  constexpr int kShared = 8192;  // 32 KB: the search of longer batches reads global memory
  __shared__ int32_t first_shared[kShared];
  __shared__ int32_t warp_sums[kThreads / 32];
  __shared__ int32_t all_tiles, longest;
  device::wait_for_previous_kernel();
  int32_t* first_tile = deal + PagedDeal::first_tile(w, 0);
  if (threadIdx.x == 0) all_tiles = longest = 0;
  __syncthreads();
  for (int32_t base = 0; base < w.num_seqs; base += kThreads) {
    int32_t b = base + threadIdx.x;
    int32_t tiles = b < w.num_seqs ? paged_tiles(w, paged_span(w, b)) : 0;
    int32_t end = all_tiles + block_scan(tiles, warp_sums);
    int32_t of_warp = __reduce_max_sync(0xffffffffu, tiles);
    if (threadIdx.x % 32 == 0) atomicMax(&longest, of_warp);
    if (b < w.num_seqs) first_tile[b] = end - tiles;
    if (b < w.num_seqs && b < kShared) first_shared[b] = end - tiles;
    __syncthreads();
    if (threadIdx.x == kThreads - 1) all_tiles = end;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    first_tile[w.num_seqs] = all_tiles;
    if (w.num_seqs < kShared) first_shared[w.num_seqs] = all_tiles;
  }
  __syncthreads();

  int64_t step = tiles_per_worker(w, all_tiles, longest);
  if (threadIdx.x == 0) {
    deal[PagedDeal::kTiles] = all_tiles;
    deal[PagedDeal::kTilesPerWorker] = static_cast<int32_t>(step);
    deal[PagedDeal::kTile] = w.tile;
    deal[PagedDeal::kNumWorkers] = w.num_workers;
    deal[PagedDeal::kTracks] = w.tracks;
  }
  const int32_t* first = w.num_seqs < kShared ? first_shared : first_tile;
  for (int32_t worker = threadIdx.x; worker < w.num_workers; worker += kThreads) {
    PagedStart start = worker_start(w, first, step, worker);
    int32_t* to = deal + PagedDeal::worker(worker);
    to[PagedDeal::kWorkerHead] = start.head_group;
    to[PagedDeal::kWorkerSeq] = start.b;
    to[PagedDeal::kWorkerTile] = start.tile;
    to[PagedDeal::kWorkerCount] = start.count;
  }
}

}  // namespace

void launch_paged_deal(const PagedWork& work, int32_t* deal, cudaStream_t stream) {
  launch_overlapping(paged_deal, 1, kThreads, 0, device_major(), stream, work, deal);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
