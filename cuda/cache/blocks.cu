// SPDX-License-Identifier: Apache-2.0
// copy_blocks: one kernel for all layers and pairs, by 16 bytes where all blocks start on 16, else
// by the widest unit on which they do. swap_blocks: copies by the copy engines, which leave the
// multiprocessors to others, where the pieces are large; a few thread blocks where they are small.
// The same on the CPU: cpu/cache.cpp.
#include <algorithm>

#include "cuattn/device/math.cuh"
#include "cuattn/params/cache.h"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr int kLoads = 4;  // units in flight in a thread

constexpr int64_t kSliceUnits = kThreads * kLoads;  // of a thread block

// Pointers and pairs travel as kernel parameters, of which there are 4 KB: nothing is allocated.
constexpr int kMaxCaches = 256, kMaxPairs = 120;

struct CopyLaunch {
  char* caches[kMaxCaches];  // num_k of the first kind, then the second
  int64_t host_pairs[2 * kMaxPairs];
  const int64_t* pairs;  // nullptr: host_pairs
  int64_t num_blocks;
  int64_t block_bytes[2], block_stride[2];
  uint32_t num_k, num_caches, slices;
};
static_assert(sizeof(CopyLaunch) <= 4096, "kernel parameters");

template <class Unit>
__device__ void copy_slice(const char* from, char* to, int64_t begin, int64_t end) {
  constexpr int kUnit = sizeof(Unit);
  Unit x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int64_t at = begin + (i * kThreads + threadIdx.x) * kUnit;
    if (at < end) x[i] = *reinterpret_cast<const Unit*>(from + at);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int64_t at = begin + (i * kThreads + threadIdx.x) * kUnit;
    if (at < end) *reinterpret_cast<Unit*>(to + at) = x[i];
  }
}

// Calls `body` with a value of the type that is `unit` bytes wide.
template <class Body>
void with_unit(int unit, Body&& body) {
  switch (unit) {
    case 16: return body(uint4{});
    case 8: return body(uint64_t{});
    case 4: return body(uint32_t{});
    case 2: return body(uint16_t{});
    default: return body(uint8_t{});
  }
}

// A thread block copies one slice of one block of one cache.
template <class Unit>
__global__ void __launch_bounds__(kThreads) copy_blocks(const __grid_constant__ CopyLaunch p) {
  unsigned slices = p.slices, caches = p.num_caches;
  unsigned slice = blockIdx.x % slices, rest = blockIdx.x / slices;
  unsigned cache = rest % caches, pair = rest / caches;
  int kind = cache < p.num_k ? 0 : 1;
  int64_t begin = slice * kSliceUnits * sizeof(Unit);
  if (begin >= p.block_bytes[kind]) return;
  // Note: one pointer to either would read parameters as if they were global memory, which is slow.
  int64_t source = p.pairs != nullptr ? p.pairs[2 * pair] : p.host_pairs[2 * pair];
  int64_t target = p.pairs != nullptr ? p.pairs[2 * pair + 1] : p.host_pairs[2 * pair + 1];
  if (!is_copy(source, target, p.num_blocks)) return;
  char* data = p.caches[cache];
  copy_slice<Unit>(data + source * p.block_stride[kind], data + target * p.block_stride[kind],
                   begin, p.block_bytes[kind]);
}

// All pairs, in the caches that the launch holds.
template <class Unit>
void launch_pairs(CopyLaunch& launch, const BlockCopyParams& p, cudaStream_t stream) {
  int64_t blocks = int64_t{launch.num_caches} * launch.slices;  // of one pair
  int64_t step = std::max<int64_t>(0x7fffffff / blocks, 1);
  if (p.pairs_on_host) step = std::min<int64_t>(step, kMaxPairs);
  for (int64_t first = 0; first < p.num_pairs; first += step) {
    int64_t count = std::min(p.num_pairs - first, step);
    launch.pairs = p.pairs_on_host ? nullptr : p.pairs + 2 * first;
    if (p.pairs_on_host) std::copy_n(p.pairs + 2 * first, 2 * count, launch.host_pairs);
    copy_blocks<Unit><<<static_cast<unsigned>(count * blocks), kThreads, 0, stream>>>(launch);
    CUATTN_CUDA_TRY(cudaGetLastError());
  }
}

// A copy engine takes some 2.5 us more for each piece, so it reaches half of PCIe's rate with
// pieces of 128 KB. A thread block has 16 KB in flight: 32 of them cover PCIe's latency, and
// an eighth of the threads of 32 multiprocessors is what others lose.
constexpr int64_t kEngineBytes = 512 << 10;
constexpr unsigned kHostBlocks = 32;
constexpr int kMaxSwaps = 240;

struct SwapLaunch {
  const char* from;
  char* to;
  int64_t from_stride, to_stride, block_bytes;
  uint32_t num_pairs, slices;
  int64_t pairs[2 * kMaxSwaps];
};
static_assert(sizeof(SwapLaunch) <= 4096, "kernel parameters");

template <class Unit>
__global__ void __launch_bounds__(kThreads) swap_blocks(const __grid_constant__ SwapLaunch p) {
  for (unsigned index = blockIdx.x; index < p.num_pairs * p.slices; index += gridDim.x) {
    const int64_t* pair = p.pairs + 2 * (index / p.slices);
    copy_slice<Unit>(p.from + pair[0] * p.from_stride, p.to + pair[1] * p.to_stride,
                     index % p.slices * kSliceUnits * sizeof(Unit), p.block_bytes);
  }
}

// Neighbours from pair `i` on that stay neighbours.
int64_t run_of(const BlockSwapParams& p, int64_t i) {
  const int64_t* pair = p.pairs + 2 * i;
  int64_t run = 1;
  while (i + run < p.num_pairs && pair[2 * run] == pair[0] + run &&
         pair[2 * run + 1] == pair[1] + run)
    ++run;
  return run;
}

// Block 0 of one side of a swap (0: source) as a kernel sees it, if it can: memory of the device or
// pinned memory, from the lowest block named to the highest. Else nullptr.
char* seen_by_kernels(const BlockSwapParams& p, int side, bool& on_host) {
  auto* data = static_cast<char*>(side == 0 ? const_cast<void*>(p.src) : p.dst);
  int64_t stride = side == 0 ? p.src_stride : p.dst_stride, low = p.pairs[side], high = low;
  for (int64_t i = 1; i < p.num_pairs; ++i) {
    low = std::min(low, p.pairs[2 * i + side]);
    high = std::max(high, p.pairs[2 * i + side]);
  }
  cudaPointerAttributes begin{}, end{};
  CUATTN_CUDA_TRY(cudaPointerGetAttributes(&begin, data + low * stride));
  CUATTN_CUDA_TRY(cudaPointerGetAttributes(&end, data + high * stride + p.block_bytes - 1));
  if (begin.devicePointer == nullptr || end.devicePointer == nullptr) return nullptr;
  on_host = on_host || begin.type == cudaMemoryTypeHost;
  return static_cast<char*>(begin.devicePointer) - low * stride;
}

uint64_t bits_of(const void* data) { return reinterpret_cast<uintptr_t>(data); }
uint64_t bits_of(int64_t size) { return static_cast<uint64_t>(size); }

// By a kernel; false where it cannot.
bool swap_scattered(const BlockSwapParams& p, cudaStream_t stream) {
  bool on_host = false;
  char *from = seen_by_kernels(p, 0, on_host), *to = seen_by_kernels(p, 1, on_host);
  if (from == nullptr || to == nullptr) return false;
  int unit = copy_unit(bits_of(from) | bits_of(to) | bits_of(p.src_stride) | bits_of(p.dst_stride) |
                       bits_of(p.block_bytes));
  if (on_host && unit < 4) return false;  // too small for PCIe: a copy engine moves whole blocks
  int64_t slices = ceil_div(p.block_bytes, kSliceUnits * unit);
  SwapLaunch launch{
      from, to, p.src_stride, p.dst_stride, p.block_bytes, 0, static_cast<uint32_t>(slices), {}};
  for (int64_t first = 0; first < p.num_pairs; first += kMaxSwaps) {
    int64_t count = std::min<int64_t>(p.num_pairs - first, kMaxSwaps);
    launch.num_pairs = static_cast<uint32_t>(count);
    std::copy_n(p.pairs + 2 * first, 2 * count, launch.pairs);
    auto blocks = static_cast<unsigned>(count * slices);
    blocks = on_host ? std::min(blocks, kHostBlocks) : blocks;
    with_unit(unit, [&](auto one) {
      swap_blocks<decltype(one)><<<blocks, kThreads, 0, stream>>>(launch);
    });
    CUATTN_CUDA_TRY(cudaGetLastError());
  }
  return true;
}

}  // namespace

void launch_copy_blocks(const BlockCopyParams& p, cudaStream_t stream) {
  CopyLaunch launch{};
  launch.num_blocks = p.num_blocks;
  launch.block_bytes[0] = p.k.block_bytes;
  launch.block_bytes[1] = p.v.block_bytes;
  launch.block_stride[0] = p.k.block_stride;
  launch.block_stride[1] = p.v.block_stride;
  uint64_t starts = bits_of(p.k.block_bytes) | bits_of(p.k.block_stride) |
                    bits_of(p.v.block_bytes) | bits_of(p.v.block_stride);
  for (int32_t i = 0; i < p.k.count; ++i) starts |= bits_of(p.k.data[i]);
  for (int32_t i = 0; i < p.v.count; ++i) starts |= bits_of(p.v.data[i]);
  int unit = copy_unit(starts);
  int64_t largest = std::max(p.k.block_bytes, p.v.block_bytes), slice = kSliceUnits * unit;
  // 128 GiB by 16 bytes, 8 GiB by single ones.
  CUATTN_REQUIRE(largest / slice < 0x7fffffff / kMaxCaches,
                 "copy_blocks: k_caches must have blocks of less than ",
                 0x7fffffff / kMaxCaches * slice, " bytes where blocks start on ", unit,
                 " bytes, got ", largest, "; cut them");
  launch.slices = static_cast<uint32_t>(ceil_div(largest, slice));
  if (launch.slices == 0) return;
  int32_t total = p.k.count + p.v.count;
  for (int32_t first = 0; first < total; first += kMaxCaches) {
    int32_t count = std::min(total - first, kMaxCaches);
    launch.num_caches = static_cast<uint32_t>(count);
    launch.num_k = static_cast<uint32_t>(std::clamp(p.k.count - first, 0, count));
    for (int32_t i = 0; i < count; ++i) {
      int32_t at = first + i;
      launch.caches[i] =
          static_cast<char*>(at < p.k.count ? p.k.data[at] : p.v.data[at - p.k.count]);
    }
    with_unit(unit, [&](auto one) { launch_pairs<decltype(one)>(launch, p, stream); });
  }
}

void launch_swap_blocks(const BlockSwapParams& p, cudaStream_t stream) {
  int64_t runs = 0;
  for (int64_t i = 0; i < p.num_pairs; i += run_of(p, i)) ++runs;
  if (runs > 1 && p.num_pairs * p.block_bytes < runs * kEngineBytes && swap_scattered(p, stream))
    return;
  bool dense = p.src_stride == p.block_bytes && p.dst_stride == p.block_bytes;
  for (int64_t i = 0, run = 1; i < p.num_pairs; i += run) {
    run = run_of(p, i);
    const int64_t* pair = p.pairs + 2 * i;
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
