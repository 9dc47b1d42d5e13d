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
  return tensor_map(p, static_cast<const char*>(base) - window * s.seq * 2,
                    {columns, window, window + 1, p.num_heads_kv, p.pages.num_blocks},
                    {s.seq, s.seq, s.head, s.batch}, {64, rows, 1, 1, 1});
}

// Rows [first, first + kRows) of K or V in boxes: one for each run that lies together and each
// panel of 64 columns. This lane's, of a warp.
template <int kRows>
struct PageBox {
  uint32_t to;  // in the tile; kNowhere: the lane has none
  int32_t panel, token, block;
  static constexpr uint32_t kNowhere = ~0u;

  __device__ __forceinline__ PageBox(const PrefillParams& p, const Sm90Schedule& s, int panels,
                                     const Sm90Keys& keys, int32_t first) {
    int32_t lane = threadIdx.x % 32, row = lane / panels * s.page_rows;
    panel = lane % panels;
    token = first + row;
    to = row < kRows ? (panel * kRows + row) * 128 : kNowhere;
    bool seen = to != kNowhere && token < keys.used;
    block = seen ? p.pages.block(keys.batch, token / p.pages.block_size) : 0;
  }

  // Rows past the sequence become zeros, whatever their blocks hold.
  __device__ __forceinline__ void load(const PrefillParams& p, const Sm90Keys& keys,
                                       const device::TensorMap& map, uint32_t smem,
                                       uint32_t full) const {
    int32_t size = p.pages.block_size, place = token % size;
    int32_t used = token < keys.used ? min(place + keys.used - token, size) : 0;
    if (to == kNowhere) return;
    device::tma_load(smem + to, &map, full, panel * 64, size - used + place, used, keys.head, block,
                     device::kEvictLast);
  }
};

}  // namespace cuattn
