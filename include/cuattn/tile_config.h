// SPDX-License-Identifier: Apache-2.0
// The tiles of the kernels, one row per head size, with their shared-memory arithmetic.
// Read by the kernels (their shapes), by src/plan.cpp (what explain() prints) and by nobody else.
#pragma once

#include "cuattn/params.h"

namespace cuattn {

// What a CTA computes: m query rows against n keys at a time, `stages` K and V tiles in flight, by
// `warps` warps.
struct Tile {
  int32_t m, n, stages, warps;
};

// Head sizes for which sm80 kernels are compiled; a smaller head runs padded with zeros in shared
// memory.
struct HeadDims {
  int32_t qk, v;
};
constexpr HeadDims kSm80HeadDims[] = {{32, 32},   {64, 64},   {96, 96},  {128, 128},
                                      {192, 128}, {192, 192}, {256, 256}};

// Bytes of shared memory: Q, then `stages` tiles of K and of V, 2 bytes an element.
constexpr int32_t sm80_smem_bytes(HeadDims d, Tile tile) {
  return 2 * (tile.m * d.qk + tile.stages * tile.n * (d.qk + d.v));
}

// One tile per head size serves every device from 8.0 on: all of them stay within the 99 KB
// that 8.6, 8.9 and 12.0 grant a block. Measured on an H200 against twice the size and more stages:
// docs/notes/20261121-prefill-sm80.md.
constexpr Tile sm80_tile(HeadDims d, ScoreKind score) {
  if (score == ScoreKind::scored) {  // the functor's registers leave room for 16 rows a warp
    if (d.qk <= 64) return {64, 128, 1, 4};  // 64: 8 + 32 = 40 KB
    if (d.qk <= 128) return {64, 64, 2, 4};  // 96: 12 + 2 * 24 = 60 KB; 128: 16 + 2 * 32 = 80 KB
  }
  if (d.qk <= 32) return {128, 128, 1, 4};  // 8 + 16 = 24 KB
  if (d.qk <= 64) return {128, 112, 1, 4};  // 16 + 28 = 44 KB; 128 keys spill on sm_80
  if (d.qk <= 128) return {128, 64, 2, 4};  // 96: 24 + 2 * 24 = 72 KB; 128: 32 + 2 * 32 = 96 KB
  return {64, 64, 1, 4};                    // 192: 24 + 48 = 72 KB; 256: 32 + 64 = 96 KB
}

// simt keeps float32 tiles: 64 output registers a thread at most.
constexpr Tile simt_tile(int32_t head_dim) {
  return head_dim <= 128 ? Tile{64, 64, 2, 4} : Tile{32, 128, 2, 4};
}

constexpr Tile kTiledTile = {64, 32, 1, 8};

// Paged kernels: m rows (queries x heads of a group) of one kv head against n keys at a time. The
// grid of a plan is `ctas_per_sm` blocks on each multiprocessor.
struct PagedTile {
  Tile tile;
  int32_t ctas_per_sm;
};

constexpr PagedTile kPagedCpuTile = {{64, 64, 1, 1}, 1};

// `rows`: q_len * group of the call.
constexpr PagedTile paged_sm80_tile(int32_t head_dim, int32_t rows) {
  int32_t m = rows <= 16 ? 16 : 32;
  return head_dim <= 128 ? PagedTile{{m, 64, 2, 4}, 2} : PagedTile{{m, 64, 2, 4}, 1};
}

constexpr PagedTile paged_sm90_tile(int32_t rows) {
  int32_t m = rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
  return m == 8 ? PagedTile{{m, 64, 2, 5}, 3} : PagedTile{{m, 64, 2, 5}, 2};
}

// One warp takes whole blocks of the cache, at most 32 tokens, in turn.
constexpr PagedTile paged_xsplit_tile(int32_t head_dim) {
  return head_dim <= 128 ? PagedTile{{16, 128, 2, 4}, 2} : PagedTile{{16, 128, 2, 4}, 1};
}

}  // namespace cuattn
