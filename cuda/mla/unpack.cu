// SPDX-License-Identifier: Apache-2.0
// Packed latents of 656 bytes (params/pages.h) that lists of tokens name become rows of bfloat16, for
// mla/sm90/decode.cuh, which has no room to unpack them. Entries that are no token are left out, so
// that the others stand together in the order of the list, and their number is the context.
//
//   list   | 70 | -1 | 3 | 9 | -1 | 3 | ...       a thread block has a stretch of it, and counts
//   rows   | 70 |  3 | 9 | 3 | ...                the tokens before; each warp unpacks four of 32
//
// Next: mla/sm80/packed.cuh (unpacked in shared memory), cpu/latents.h (in plain loops).
#include "cuattn/device/convert.cuh"
#include "cuattn/params/paged.h"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32, kTokens = 32 / kWarps;  // of a warp at a time
constexpr int kHalf = PackedLatent::kLatent / 2;  // columns: a lane has eight of each half
static_assert(kHalf == 32 * 8 && kHalf == 2 * PackedLatent::kScaled && PackedLatent::kRope == 64);

// How many entries a thread block has. Those of a list are not more than 128, so that counting costs
// little beside 656 bytes a token.
constexpr int32_t stretch_of(int32_t capacity) {
  int32_t least = capacity / 128 + 1;
  return least <= 64 ? 64 : (least - 1) / 32 * 32 + 32;
}

// Tokens among the first `count` entries of a list, eight of a thread on their way at once.
__device__ int32_t count_tokens(const PagedParams& p, int32_t list, int32_t count) {
  __shared__ int32_t of_warps[kWarps];
  const int32_t* entries = p.pages.entry(list, 0);
  const int64_t slots = p.pages.num_blocks * p.pages.block_size;
  int32_t found = 0;
  for (int32_t begin = threadIdx.x; begin < count; begin += 8 * kThreads) {
    int32_t slot[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int32_t entry = begin + i * kThreads;
      slot[i] = entry < count ? entries[entry] : -1;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) found += slot[i] >= 0 && slot[i] < slots ? 1 : 0;
  }
  found = __reduce_add_sync(0xffffffffu, found);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  int32_t sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp];
  return sum;
}

// What a lane has of a token, on its way.
struct Part {
  uint2 codes[2];  // of each half
  float scales[2];
  uint32_t rope;

  __device__ __forceinline__ void load(const char* token, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t column = half * kHalf + lane * 8;
      codes[half] = *reinterpret_cast<const uint2*>(token + column);
      scales[half] = reinterpret_cast<const float*>(
          token + PackedLatent::kScalesAt)[column / PackedLatent::kScaled];
    }
    rope = reinterpret_cast<const uint32_t*>(token + PackedLatent::kRopeAt)[lane];
  }
  __device__ __forceinline__ void store(char* row, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      reinterpret_cast<uint4*>(row)[half * 32 + lane] =
          device::unpack_latents(codes[half].x, codes[half].y, scales[half]);
    reinterpret_cast<uint32_t*>(row + 2 * PackedLatent::kLatent)[lane] = rope;
  }
};

__global__ void __launch_bounds__(kThreads)
    unpack_lists(const __grid_constant__ PagedParams p, int32_t stretch, int32_t stretches) {
  const PagedWork& w = p.work;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t list = blockIdx.x / stretches;
  const int32_t first = static_cast<int32_t>(blockIdx.x) % stretches * stretch;
  const int32_t length = w.context_lens == nullptr ? w.capacity : context_of(w, list);
  if (first >= length && first > 0) return;
  const int32_t end = min(first + stretch, length);
  int32_t before = count_tokens(p, list, first);
  char* gRows =
      static_cast<char*>(p.latent.own_rows) + int64_t{list} * w.capacity * PackedLatent::kRowBytes;
  for (int32_t entry = first; entry < end; entry += 32) {
    LatentPlace place{};  // of the entry of this lane
    if (entry + lane < end) place = latent_place(p, list, entry + lane);
    const int64_t at = place.at(p.k_strides);
    const uint32_t there = __ballot_sync(0xffffffffu, place.exists);
    Part parts[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = warp * kTokens + i;
      const char* from = static_cast<const char*>(p.k_cache) + __shfl_sync(0xffffffffu, at, token);
      if ((there >> token & 1) != 0) parts[i].load(from, lane);
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = warp * kTokens + i;
      const int64_t row = before + __popc(there & ((1u << token) - 1));
      if ((there >> token & 1) != 0) parts[i].store(gRows + row * PackedLatent::kRowBytes, lane);
    }
    before += __popc(there);
  }
  if (end == length && threadIdx.x == 0) p.latent.own_lens[list] = before;
}

}  // namespace

PagedParams launch_unpack(const PagedParams& p, cudaStream_t stream) {
  const PagedWork& w = p.work;
  int32_t stretch = stretch_of(w.capacity);
  int32_t stretches = w.capacity <= stretch ? 1 : (w.capacity - 1) / stretch + 1;
  unsigned blocks = grid_blocks(int64_t{w.num_seqs} * stretches, "sm90");
  unpack_lists<<<blocks, kThreads, 0, stream>>>(p, stretch, stretches);
  CUATTN_CUDA_TRY(cudaGetLastError());
  PagedParams rows = p;
  rows.work.context_lens = p.latent.own_lens;
  rows.kv_dtype = p.dtype;
  rows.k_cache = rows.v_cache = p.latent.own_rows;
  rows.latent.rope_cache = static_cast<char*>(p.latent.own_rows) + 2 * PackedLatent::kLatent;
  rows.k_strides = {int64_t{w.capacity} * PackedLatent::kColumns, 0, PackedLatent::kColumns};
  rows.v_strides = rows.latent.strides = rows.k_strides;
  rows.pages = {w.num_seqs, w.capacity > 0 ? w.capacity : 1, nullptr, 0, 0};
  return rows;
}

}  // namespace cuattn
