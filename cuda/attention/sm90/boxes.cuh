// SPDX-License-Identifier: Apache-2.0
// How tiles of K and V come to forward.cuh: rows of a tensor, or blocks of a paged cache, nhd
// or hnd, with a multiple of 16 tokens a block (chunked prefill). The other kernels of
// attention_varlen take gathered keys (src/attention/pages.cpp).
#pragma once

#include "cuda/attention/sm90/schedule.cuh"

namespace cuattn {

// Rows [first, first + kRows) of K or V, on their way to shared memory. Rows past the tensor become
// zeros. Here keys are rows: one thread, a box of the TMA for each panel of 64 columns.
template <int kRows, int kPanels>
struct RowBox {
  static constexpr uint32_t kBytes = kPanels * kRows * 128;
  int32_t row, head, batch;

  __device__ __forceinline__ RowBox(const AttentionParams& p, const Sm90Keys& keys,
                                    const Sm90Schedule&, uint32_t, int32_t first, int)
      : row(keys.start + first), head(keys.head), batch(p.cu_seqlens_kv ? 0 : keys.batch) {}

  __device__ __forceinline__ void load(const device::TensorMap& map, uint32_t smem,
                                       uint32_t full) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      device::tma_load(smem + panel * kRows * 128, &map, full, panel * 64, row, head, batch, 0,
                       device::kEvictLast);
    }
  }
};

// Rows of V behind the last key may hold anything, and 0 x NaN is NaN. Each group of consumers for
// itself.
template <int kRows, int kPanels>
__device__ __forceinline__ void clear_rows(uint32_t v, int first, int group) {
  for (int i = threadIdx.x % 128; i < (kRows - first) * kPanels * 8; i += 128) {
    int chunk = i % 8, panel = i / 8 % kPanels, row = first + i / (8 * kPanels);
    device::store_shared16(v + panel * kRows * 128 + row * 128 + chunk * 16, uint4{0, 0, 0, 0});
  }
  device::async_proxy_fence();
  device::named_barrier_sync(4 + group, 128);
}

// Here they lie in blocks. A box is a panel of a run that lies together; the lanes of kPageLoaders
// warps have one each.
constexpr int kPageLoaders = 3;

// What the block table says of the runs of a key tile, copied to shared memory kAhead tiles before
// it is needed; each loader has its own. Note: loads to registers share a scoreboard, and each tile
// waited for what the next one had just asked for: chunked prefill was 8 % slower.
template <int kRows>
struct BlockIds {
  static constexpr int kAhead = 2, kSlots = 4, kRuns = kRows / kMinPageRows;
  static constexpr int kBytes = 4 * kSlots * kRuns;  // of a loader
  uint32_t smem;

  __device__ __forceinline__ uint32_t slot(int tile) const {
    return smem + tile % kSlots * (4 * kRuns);
  }
  __device__ __forceinline__ void ask(const AttentionParams& p, const Sm90Keys& keys,
                                      const Sm90Schedule& s, int tile, int first) const {
    int32_t run = threadIdx.x % 32, token = tile * kRows + run * s.page_rows;
    if (tile >= first && run * s.page_rows < kRows && token < keys.used) {
      device::cp_async4(slot(tile) + 4 * run,
                        p.pages.entry(keys.batch, s.block_size.quotient(token)));
    }
    device::cp_async_commit();
  }
  __device__ __forceinline__ void await() const {
    device::cp_async_wait<kAhead>();
    __syncwarp();
  }
};

template <int kRows, int kPanels>
struct PageBox {
  static_assert(kRows / kMinPageRows * kPanels <= kPageLoaders * 32, "a lane has one box");
  static constexpr uint32_t kBytes = kPanels * kRows * 128;
  int32_t to, panel, place, head, block;  // to < 0: this lane has none

  // `ids`: the slot of its tile. A block behind the last key is -1, outside of the cache: the TMA
  // writes zeros.
  __device__ __forceinline__ PageBox(const AttentionParams& p, const Sm90Keys& keys,
                                     const Sm90Schedule& s, uint32_t ids, int32_t first, int loader)
      : to(-1), panel(0), place(0), head(keys.head), block(-1) {
    int32_t box = threadIdx.x % 32 * kPageLoaders + loader, run = box / kPanels;
    int32_t row = run * s.page_rows, token = first + row;
    panel = box % kPanels;
    if (row < kRows) to = (panel * kRows + row) * 128;
    if (row < kRows && token < keys.used) {
      place = token - s.block_size.quotient(token) * p.pages.block_size;
      block = p.pages.existing(device::load_shared4(ids + 4 * run));
    }
    // opaque: else the compiler computes them after the wait for a stage, in the branch that needs
    // them.
    place = device::opaque(static_cast<uint32_t>(place));
    block = device::opaque(static_cast<uint32_t>(block));
  }

  __device__ __forceinline__ void load(const device::TensorMap& map, uint32_t smem,
                                       uint32_t full) const {
    if (to < 0) return;
    device::tma_load(smem + to, &map, full, panel * 64, place, head, block, 0, device::kEvictLast);
  }
};

}  // namespace cuattn
