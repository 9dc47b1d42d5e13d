// SPDX-License-Identifier: Apache-2.0
// Chunked prefill on Hopper: tiles of K and V out of the blocks of a paged cache, nhd or hnd, with
// a multiple of 16 tokens a block. Used by prefill_sm90.cuh; the other kernels of attention_varlen
// take gathered keys (src/attention.cpp).
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

// Rows [first, first + kRows) of K or V in boxes: one for each run that lies together and each
// panel of 64 columns. This lane's, of a warp.
template <int kRows, int kPanels>
struct PageBox {
  static_assert(kRows / kMinPageRows * kPanels <= 32, "a lane has one box");
  int32_t block, place;  // where it begins; block -1 is outside, and the TMA writes zeros

  static __device__ __forceinline__ int32_t row(const Sm90Schedule& s) {
    return threadIdx.x % 32 / kPanels * s.page_rows;
  }

  __device__ __forceinline__ PageBox(const PrefillParams& p, const Sm90Schedule& s,
                                     const Sm90Keys& keys, int32_t first) {
    int32_t token = first + row(s), size = p.pages.block_size;
    bool seen = row(s) < kRows && token < keys.used;
    block = seen ? p.pages.block(keys.batch, token / size) : -1;
    place = token % size;
  }

  __device__ __forceinline__ void load(const Sm90Schedule& s, const Sm90Keys& keys,
                                       const device::TensorMap& map, uint32_t smem,
                                       uint32_t full) const {
    if (row(s) >= kRows) return;
    int32_t panel = threadIdx.x % 32 % kPanels;
    device::tma_load(smem + (panel * kRows + row(s)) * 128, &map, full, panel * 64, place,
                     keys.head, block, 0, device::kEvictLast);
  }
};

}  // namespace cuattn
