// SPDX-License-Identifier: Apache-2.0
// The host side of forward.cuh without its launch: how a problem is cut into work, and the tensor
// maps. Next: launch.cuh (kernels of the library), functor.cu (those of NVRTC).
#pragma once

#include "cuattn/schedule.h"
#include "cuda/attention/sm90/schedule.cuh"
#include "cuda/attention/sm90/store.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/parts.h"
#include "cuda/host/tensor_maps.h"

namespace cuattn {

inline Sm90Schedule make_sm90_schedule(const AttentionParams& p, const AttentionSchedule& schedule,
                                       Tile tile) {
  constexpr int64_t kSectionBytes = 16 << 20;  // of K and V: they share 50 MB of L2 with Q and O
  int32_t group = p.num_heads_q / p.num_heads_kv;
  Sm90Schedule s{};
  s.packed = schedule.packed_heads;
  s.heads = p.num_heads_q / s.packed;
  int64_t rows = int64_t{p.seqlen_q} * s.packed;
  s.tiles = static_cast<int32_t>(device::ceil_div<int64_t>(rows, tile.m));
  s.splits = schedule.num_splits;
  s.split_tiles = schedule.split_keys / tile.n;
  s.most_splits = schedule.most_splits;
  int64_t pairs = int64_t{p.batch} * s.heads;
  int64_t head_bytes = (p.seqlen_kv + int64_t{1}) * (p.head_dim + p.head_dim_v) * 2;
  int64_t section = schedule.draws_tiles ? device::ceil_div(kSectionBytes, head_bytes) : 1;
  section *= group / s.packed;  // they share keys
  bool ragged = p.cu_seqlens_q != nullptr;
  int64_t widest = ragged ? s.heads : pairs;
  s.section_heads = static_cast<int32_t>(section < widest ? section : widest);
  int64_t items = pairs * s.tiles * s.splits;
  if (ragged) {  // a sequence leaves its last tile unfilled
    int64_t most = (p.total_q * int64_t{s.packed} / tile.m + p.batch) * s.heads * s.splits;
    if (most < items) items = most;
  }
  s.total = static_cast<int32_t>(grid_blocks(items, "sm90"));
  s.stores_wide = s.splits > 1 || p.out_dtype == DType::f32;
  s.stores_boxes = s.packed == 1 && !s.stores_wide;
  s.clears = p.cu_seqlens_kv != nullptr || p.seqused_kv != nullptr || p.pages.block_size > 0;
  s.bias_heads = p.scores.bias_stride_head != 0;
  s.bias_batches = p.scores.bias_stride_batch != 0;
  s.page_rows = sm90_page_rows(p.pages.block_size, tile);
  if (p.pages.block_size > 0) s.block_size = device::Divisor::of(p.pages.block_size);
  if (s.splits > 1) {
    s.part_out = static_cast<float*>(schedule.workspace);
    s.part_lse = as_parts(p, schedule).lse;
  }
  if (schedule.draws_tiles) s.counter = static_cast<int32_t*>(schedule.workspace);
  return s;
}

// A cache of K or V as (columns, places, heads, blocks, 1).
inline device::TensorMap page_map(const AttentionParams& p, const void* base, const Strides& s,
                                  int32_t columns, int32_t rows) {
  return tensor_map(p.dtype, base,
                    {columns, p.pages.block_size, p.num_heads_kv, p.pages.num_blocks, 1},
                    {s.seq, s.head, s.batch, 0}, {64, rows, 1, 1, 1});
}

// O has a map only where it leaves through the TMA; the launcher adds that of a bias.
inline Sm90Maps make_sm90_maps(const AttentionParams& p, const Sm90Schedule& s, Tile tile,
                               int32_t q_stages) {
  auto keys = [&](const void* base, const Strides& strides, int32_t columns) {
    return p.pages.block_tables != nullptr ? page_map(p, base, strides, columns, s.page_rows)
                                           : key_map(p, base, strides, columns, tile.n);
  };
  Sm90Maps maps{query_map(p, s.packed, tile.m / s.packed),
                keys(p.k, p.k_strides, p.head_dim),
                keys(p.v, p.v_strides, p.head_dim_v),
                {},
                {}};
  if (q_stages > 1 && s.stores_boxes) maps.o = output_map(p);
  return maps;
}

inline int32_t sm90_grid(const Sm90Schedule& s, const AttentionSchedule& schedule) {
  return schedule.num_ctas > 0 && schedule.num_ctas < s.total ? schedule.num_ctas : s.total;
}

}  // namespace cuattn
