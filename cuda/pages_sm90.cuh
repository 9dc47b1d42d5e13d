// SPDX-License-Identifier: Apache-2.0
// Chunked prefill on Hopper: tiles of K and V out of the blocks of a paged cache, nhd or hnd, with
// a multiple of 8 tokens a block. Used by prefill_sm90.cuh; the other kernels of attention_varlen
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

// Rows [token, token + kRows) of K or V, 64 columns a panel: one box for each run that lies
// together and each panel. Rows past the sequence become zeros, whatever their blocks hold.
template <int kRows>
__device__ __forceinline__ void load_pages(const PrefillParams& p, const Sm90Schedule& s,
                                           const device::TensorMap& map, uint32_t smem,
                                           uint32_t full, int panels, const Sm90Work& w,
                                           int32_t kv_head, int32_t token) {
  int32_t size = p.pages.block_size, column = token / size, place = token % size;
  int32_t left = w.keys.used - token;
#pragma unroll 1
  for (uint32_t to = smem; to < smem + kRows * 128; to += s.page_rows * 128) {
    int32_t block = left > 0 ? p.pages.block(w.batch, column) : 0;
    int32_t used = left > 0 ? min(place + left, size) : 0;
#pragma unroll
    for (int panel = 0; panel < panels; ++panel) {
      device::tma_load(to + panel * kRows * 128, &map, full, panel * 64, size - used + place, used,
                       kv_head, block, device::kEvictLast);
    }
    left -= s.page_rows;
    place += s.page_rows;
    if (place == size) {
      place = 0;
      ++column;
    }
  }
}

}  // namespace cuattn
