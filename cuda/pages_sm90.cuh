// SPDX-License-Identifier: Apache-2.0
// Chunked prefill on Hopper: tiles of K and V out of the blocks of a paged cache, nhd or hnd, with
// a multiple of 16 tokens a block. Used by prefill_sm90.cuh; the other kernels of attention_varlen
// take gathered keys (src/attention.cpp).
#pragma once

#include "schedule_sm90.cuh"
#include "tensor_maps.h"

namespace cuattn {

// A cache of K or V as (columns, window, places, heads, blocks), with a window as in key_map: place
// r of a block of which n are in use is at window W - n + r, place n, with W = block_size.
inline const device::TensorMap& page_map(const PrefillParams& p, const void* base, const Strides& s,
                                         int32_t columns, int32_t rows) {
  int64_t window = p.pages.block_size;
  return tensor_map(p.dtype, static_cast<const char*>(base) - window * s.seq * 2,
                    {columns, window, window + 1, p.num_heads_kv, p.pages.num_blocks},
                    {s.seq, s.seq, s.head, s.batch}, {64, rows, 1, 1, 1});
}

// Rows [first, first + kRows) of K or V in boxes: one for each run that lies together and each
// panel of 64 columns. This lane's, of a warp.
template <int kRows, int kPanels>
struct PageBox {
  static_assert(kRows / kMinPageRows * kPanels <= 32, "a lane has one box");
  int32_t block, window, used;  // where it begins, see page_map

  static __device__ __forceinline__ int32_t row(const Sm90Schedule& s) {
    return threadIdx.x % 32 / kPanels * s.page_rows;
  }

  __device__ __forceinline__ PageBox(const PrefillParams& p, const Sm90Schedule& s,
                                     const Sm90Keys& keys, int32_t first) {
    int32_t token = first + row(s), size = p.pages.block_size, place = token % size;
    bool seen = row(s) < kRows && token < keys.used;
    block = seen ? p.pages.block(keys.batch, token / size) : 0;
    used = seen ? min(place + keys.used - token, size) : 0;  // rows past these become zeros
    window = size - used + place;
  }

  __device__ __forceinline__ void load(const Sm90Schedule& s, const Sm90Keys& keys,
                                       const device::TensorMap& map, uint32_t smem,
                                       uint32_t full) const {
    if (row(s) >= kRows) return;
    int32_t panel = threadIdx.x % 32 % kPanels;
    device::tma_load(smem + (panel * kRows + row(s)) * 128, &map, full, panel * 64, window, used,
                     keys.head, block, device::kEvictLast);
  }
};

}  // namespace cuattn
