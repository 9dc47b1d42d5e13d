// SPDX-License-Identifier: Apache-2.0
// How tiles of K and V come to prefill_sm90.cuh: rows of a tensor, or blocks of a paged cache, nhd
// or hnd, with a multiple of 16 tokens a block (chunked prefill). The other kernels of
// attention_varlen take gathered keys (src/attention.cpp).
#pragma once

#include "schedule_sm90.cuh"
#include "tensor_maps.h"

namespace cuattn {

// A cache of K or V as (columns, places, heads, blocks, 1).
inline const device::TensorMap& page_map(const PrefillParams& p, const void* base, const Strides& s,
                                         int32_t columns, int32_t rows) {
  return tensor_map(p.dtype, base,
                    {columns, p.pages.block_size, p.num_heads_kv, p.pages.num_blocks, 1},
                    {s.seq, s.head, s.batch, 0}, {64, rows, 1, 1, 1});
}

// Rows [first, first + kRows) of K or V, on their way to shared memory. Rows past the tensor become
// zeros. Here keys are rows: one thread, a box of the TMA for each panel of 64 columns.
template <int kRows, int kPanels>
struct RowBox {
  static constexpr uint32_t kBytes = kPanels * kRows * 128;
  int32_t first;

  __device__ __forceinline__ RowBox(const PrefillParams&, const Sm90Keys&, const Sm90Schedule&,
                                    int32_t first, int)
      : first(first) {}

  // What remains to be done when the stage is free.
  __device__ __forceinline__ auto ready(const PrefillParams& p, const Sm90Keys& keys, int) const {
    int32_t row = keys.start + first, batch = p.cu_seqlens_kv ? 0 : keys.batch, head = keys.head;
    return [=](const device::TensorMap& map, uint32_t smem, uint32_t full) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        device::tma_load(smem + panel * kRows * 128, &map, full, panel * 64, row, head, batch, 0,
                         device::kEvictLast);
      }
    };
  }
};

// Here they lie in blocks. A box is a panel of a run that lies together; the lanes of kPageLoaders
// warps have one each.
constexpr int kPageLoaders = 3;

template <int kRows, int kPanels>
struct PageBox {
  static_assert(kRows / kMinPageRows * kPanels <= kPageLoaders * 32, "a lane has one box");
  static constexpr uint32_t kBytes = kPanels * kRows * 128;
  int32_t row, token, entry;  // its first row and key, and what the block table says of the key

  static __device__ __forceinline__ int32_t box(int loader) {
    return threadIdx.x % 32 * kPageLoaders + loader;
  }

  // Note: the entry stays as it was loaded until its tile comes. One instruction on it here, and
  // the warp would wait for the table.
  __device__ __forceinline__ PageBox(const PrefillParams& p, const Sm90Keys& keys,
                                     const Sm90Schedule& s, int32_t first, int loader)
      : row(box(loader) / kPanels * s.page_rows), token(first + row), entry(0) {
    if (first >= 0 && row < kRows && token < keys.used)
      entry = p.pages.entry(keys.batch, token / p.pages.block_size);
  }

  // A block behind the last key is -1, outside of the cache: the TMA writes zeros.
  __device__ __forceinline__ auto ready(const PrefillParams& p, const Sm90Keys& keys,
                                        int loader) const {
    // opaque: else the compiler divides after the wait, in the branch that needs it.
    int32_t place = device::opaque(static_cast<uint32_t>(token % p.pages.block_size));
    int32_t block = device::opaque(token < keys.used ? p.pages.existing(entry) : -1u);
    int32_t panel = box(loader) % kPanels, head = keys.head;
    int32_t to = row < kRows ? (panel * kRows + row) * 128 : -1;
    return [=](const device::TensorMap& map, uint32_t smem, uint32_t full) {
      if (to >= 0)
        device::tma_load(smem + to, &map, full, panel * 64, place, head, block, 0,
                         device::kEvictLast);
    };
  }
};

}  // namespace cuattn
