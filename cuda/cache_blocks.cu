// SPDX-License-Identifier: Apache-2.0
// copy_blocks: one kernel for all layers and pairs. swap_blocks: copies by the copy engines, which
// leave the multiprocessors to others. The same on the CPU: cpu/cache.cpp.
#include <algorithm>

#include "cuattn/cache_params.h"
#include "cuattn/device/math.cuh"
#include "launch.h"
#include "launchers.h"

namespace cuattn {
namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr int kLoads = 4;  // 16 bytes each, in flight in a thread
constexpr int64_t kSliceBytes = kThreads * kLoads * 16;

// Pointers and pairs travel as kernel parameters, of which there are 4 KB: nothing is allocated.
constexpr int kMaxCaches = 256, kMaxPairs = 120;

struct CopyLaunch {
  char* caches[kMaxCaches];  // num_k of the first kind, then the second
  int64_t host_pairs[2 * kMaxPairs];
  const int64_t* pairs;  // nullptr: host_pairs
  int64_t num_pairs, num_blocks;
  int64_t block_bytes[2], block_stride[2];
  int32_t num_k, num_caches, slices;
};
static_assert(sizeof(CopyLaunch) <= 4096, "kernel parameters");

__device__ void copy_slice(const char* from, char* to, int64_t begin, int64_t end) {
  uint4 x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int64_t at = begin + (i * kThreads + threadIdx.x) * 16;
    if (at < end) x[i] = *reinterpret_cast<const uint4*>(from + at);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int64_t at = begin + (i * kThreads + threadIdx.x) * 16;
    if (at < end) *reinterpret_cast<uint4*>(to + at) = x[i];
  }
}

// A thread block copies one slice of one block of one cache, and takes further ones where the grid
// is smaller than the work.
__global__ void __launch_bounds__(kThreads) copy_blocks(const __grid_constant__ CopyLaunch p) {
  int64_t total = p.num_pairs * p.num_caches * p.slices;
  for (int64_t index = blockIdx.x; index < total; index += gridDim.x) {
    int64_t slice = index % p.slices, rest = index / p.slices;
    int cache = static_cast<int>(rest % p.num_caches);
    int64_t pair = rest / p.num_caches;
    int kind = cache < p.num_k ? 0 : 1;
    int64_t begin = slice * kSliceBytes;
    if (begin >= p.block_bytes[kind]) continue;
    int64_t source = p.pairs != nullptr ? p.pairs[2 * pair] : p.host_pairs[2 * pair];
    int64_t target = p.pairs != nullptr ? p.pairs[2 * pair + 1] : p.host_pairs[2 * pair + 1];
    if (!is_copy(source, target, p.num_blocks)) continue;
    char* data = p.caches[cache];
    copy_slice(data + source * p.block_stride[kind], data + target * p.block_stride[kind], begin,
               p.block_bytes[kind]);
  }
}

// All pairs, in the caches that the launch holds.
void launch_pairs(CopyLaunch& launch, const BlockCopyParams& p, cudaStream_t stream) {
  int64_t step = p.pairs_on_host ? kMaxPairs : p.num_pairs;
  for (int64_t first = 0; first < p.num_pairs; first += step) {
    launch.num_pairs = std::min(p.num_pairs - first, step);
    launch.pairs = p.pairs_on_host ? nullptr : p.pairs;
    if (p.pairs_on_host) std::copy_n(p.pairs + 2 * first, 2 * launch.num_pairs, launch.host_pairs);
    int64_t blocks = launch.num_pairs * launch.num_caches * launch.slices;
    constexpr int64_t kMaxBlocks = 1 << 30;
    copy_blocks<<<static_cast<unsigned>(std::min(blocks, kMaxBlocks)), kThreads, 0, stream>>>(
        launch);
    CUATTN_CUDA_TRY(cudaGetLastError());
  }
}

}  // namespace

void launch_copy_blocks(const BlockCopyParams& p, cudaStream_t stream) {
  CopyLaunch launch{};
  launch.num_blocks = p.num_blocks;
  launch.block_bytes[0] = p.k.block_bytes;
  launch.block_bytes[1] = p.v.block_bytes;
  launch.block_stride[0] = p.k.block_stride;
  launch.block_stride[1] = p.v.block_stride;
  int64_t largest = std::max(p.k.block_bytes, p.v.block_bytes);
  CUATTN_ASSERT(largest / kSliceBytes < 0x7fffffff, "blocks of ", largest, " bytes");
  launch.slices = static_cast<int32_t>(ceil_div(largest, kSliceBytes));
  if (launch.slices == 0) return;
  int32_t total = p.k.count + p.v.count;
  for (int32_t first = 0; first < total; first += kMaxCaches) {
    launch.num_caches = std::min(total - first, kMaxCaches);
    launch.num_k = std::clamp(p.k.count - first, 0, launch.num_caches);
    for (int32_t i = 0; i < launch.num_caches; ++i) {
      int32_t at = first + i;
      launch.caches[i] =
          static_cast<char*>(at < p.k.count ? p.k.data[at] : p.v.data[at - p.k.count]);
    }
    launch_pairs(launch, p, stream);
  }
}

void launch_swap_blocks(const BlockSwapParams& p, cudaStream_t stream) {
  bool dense = p.src_stride == p.block_bytes && p.dst_stride == p.block_bytes;
  for (int64_t i = 0, run = 1; i < p.num_pairs; i += run, run = 1) {
    const int64_t* pair = p.pairs + 2 * i;
    while (i + run < p.num_pairs && pair[2 * run] == pair[0] + run &&
           pair[2 * run + 1] == pair[1] + run)
      ++run;  // neighbours that stay neighbours
    const char* from = static_cast<const char*>(p.src) + pair[0] * p.src_stride;
    char* to = static_cast<char*>(p.dst) + pair[1] * p.dst_stride;
    auto width = static_cast<size_t>(p.block_bytes), height = static_cast<size_t>(run);
    if (dense || run == 1) {
      CUATTN_CUDA_TRY(cudaMemcpyAsync(to, from, width * height, cudaMemcpyDefault, stream));
    } else {
      CUATTN_CUDA_TRY(cudaMemcpy2DAsync(to, static_cast<size_t>(p.dst_stride), from,
                                        static_cast<size_t>(p.src_stride), width, height,
                                        cudaMemcpyDefault, stream));
    }
  }
}

}  // namespace cuattn
