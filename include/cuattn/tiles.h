// SPDX-License-Identifier: Apache-2.0
// The tiles of the kernels, one row per head size, with their shared-memory arithmetic.
// Read by the kernels (their shapes), by src/attention/plan.cpp (what explain() prints) and by
// nobody else.
#pragma once

#include "cuattn/params/pages.h"

namespace cuattn {

// What a CTA computes: m query rows against n keys at a time, `stages` K and V tiles in flight, by
// `warps` warps.
struct Tile {
  int32_t m, n, stages, warps;
};

// Head sizes of a compiled kernel, which cuda/instances.cmake lists; a smaller head runs padded
// with zeros in shared memory.
struct HeadDims {
  int32_t qk, v;
};

// Bytes of shared memory: Q, then `stages` tiles of K and of V, 2 bytes an element.
constexpr int32_t sm80_smem_bytes(HeadDims d, Tile tile) {
  return 2 * (tile.m * d.qk + tile.stages * tile.n * (d.qk + d.v));
}

// One tile per head size serves every device from 8.0 on: all of them stay within the 99 KB
// that 8.6, 8.9 and 12.0 grant a block. Measured on an H200 against twice the size and more stages:
// docs/notes/20261121-prefill-sm80.md.
constexpr Tile sm80_tile(HeadDims d, ScoreKind score) {
  if (d.qk > 256) return {32, 32, 1, 4};  // 512: 32 + 64 = 96 KB; two warps share 16 rows
  if (score == ScoreKind::scored) {       // the functor's registers leave room for 16 rows a warp
    if (d.qk <= 64) return {64, 128, 1, 4};  // 64: 8 + 32 = 40 KB
    if (d.qk <= 128) return {64, 64, 2, 4};  // 96: 12 + 2 * 24 = 60 KB; 128: 16 + 2 * 32 = 80 KB
  }
  if (d.qk <= 32) return {128, 96, 1, 4};   // 8 + 12 = 20 KB; 128 keys spill on sm_80
  if (d.qk <= 64) return {128, 112, 1, 4};  // 16 + 28 = 44 KB; 128 keys spill on sm_80
  if (d.qk <= 128) return {128, 64, 2, 4};  // 96: 24 + 2 * 24 = 72 KB; 128: 32 + 2 * 32 = 96 KB
  return {64, 64, 1, 4};                    // 192: 24 + 48 = 72 KB; 256: 32 + 64 = 96 KB
}

// The backward passes, 64 rows of a CTA in both. Queries: m rows of Q and dO stay, n keys come. Keys:
// n keys stay, m rows of Q and dO come, each with 8 bytes of lse and Delta.
constexpr int32_t sm80_queries_smem_bytes(HeadDims d, Tile tile) {
  return 2 * (tile.m + tile.stages * tile.n) * (d.qk + d.v);
}
constexpr int32_t sm80_keys_smem_bytes(HeadDims d, Tile tile) {
  return 2 * (tile.n + tile.stages * tile.m) * (d.qk + d.v) + tile.stages * tile.m * 8;
}

constexpr Tile sm80_queries_tile(HeadDims d, ScoreKind score) {
  if (score == ScoreKind::scored && d.qk > 64) return {64, 32, d.qk <= 192 ? 2 : 1, 4};
  if (d.qk <= 128) return {64, 64, 2, 4};  // 64: 16 + 2 * 16 = 48 KB; 128: 32 + 2 * 32 = 96 KB
  if (d.qk <= 192) return {64, 32, 2, 4};  // 48 + 2 * 24 = 96 KB
  return {64, 32, 1, 4};                   // 64 + 32 = 96 KB
}

// Whether the registers hold dK or dV alone, so that a tile takes two CTAs.
constexpr bool sm80_keys_makes_one(HeadDims d) { return d.qk > 128; }

constexpr Tile sm80_keys_tile(HeadDims d, ScoreKind score) {
  if (score == ScoreKind::scored && d.qk > 64) return {32, 64, d.qk <= 192 ? 2 : 1, 4};
  if (d.qk <= 64) return {64, 64, 2, 4};   // 16 + 2 * 16 = 48 KB
  if (d.qk <= 192) return {32, 64, 2, 4};  // 128: 32 + 2 * 16 = 64 KB; 192: 48 + 2 * 24 = 96 KB
  return {32, 64, 1, 4};                   // 64 + 32 = 96 KB
}

// The pass for dbias: m rows of Q and dO, n of K and V; the sums of the tile stay.
constexpr Tile sm80_bias_tile(HeadDims d) {
  return {64, d.qk <= 128 ? 64 : 32, 1, 4};  // 128: 32 + 32 = 64 KB; 256: 64 + 32 = 96 KB
}

// Whether a bias of 16-bit elements has room there, and its code among the registers.
constexpr bool sm90_stages_bias(HeadDims d, ScoreKind score) {
  return score == ScoreKind::scored && d.qk <= 128;
}

// What dropout keeps of a tile, a bit an element in words of 64 columns (device/dropout_sm90.cuh).
constexpr int32_t sm90_kept_bytes(int32_t rows, int32_t columns) {
  return 8 * rows * ((columns + 63) / 64);
}

constexpr int32_t kSm90SmallBytes = 1664;  // barriers, work items, block ids

// Bytes of shared memory: Q, `stages` tiles of K and of V, a tile of a bias, all in panels of 64
// columns (128 bytes); with dropout, what it keeps of each stage; what is small, and up to 1023 bytes
// in front that align the panels.
constexpr int32_t sm90_smem_bytes(HeadDims d, Tile tile, ScoreKind score, int32_t q_stages) {
  int32_t qk = (d.qk + 63) / 64 * 128, v = (d.v + 63) / 64 * 128;
  int32_t bias = sm90_stages_bias(d, score) ? (tile.n + 63) / 64 * 128 : 0;
  int32_t kept = score == ScoreKind::dropped ? sm90_kept_bytes(tile.m, tile.n) : 0;
  return tile.m * (q_stages * qk + bias) + tile.stages * (tile.n * (qk + v) + kept) +
         kSm90SmallBytes + 1024;
}

// CTAs that share a multiprocessor. One group of consumers leaves it idle at the end of each item, when
// O leaves and the next keys are awaited.
constexpr int32_t sm90_ctas_per_sm(Tile tile) { return tile.m > 64 ? 1 : 3; }

// Up to three Q tiles, where they fit: the next one arrives while this one is at work, and O of the
// last one leaves through its own.
constexpr int32_t sm90_q_stages(HeadDims d, Tile tile, ScoreKind score) {
  int32_t stages = 3;
  const int32_t most = (228 / sm90_ctas_per_sm(tile) - 1) * 1024;  // 1 KB of a CTA is the system's
  while (stages > 1 && sm90_smem_bytes(d, tile, score, stages) > most) --stages;
  return stages;
}

// A warpgroup of producers and m / 64 of consumers, which keep S (n / 2), O (head_dim_v / 2) and P
// (n / 4) in 232 registers each, 160 if they are three, 128 of one beside two other CTAs.
constexpr Tile sm90_tile(HeadDims d, MaskKind mask, ScoreKind score) {
  if (score == ScoreKind::scored) {  // the functor wants registers, and so do a window's edges
    bool window = mask == MaskKind::window;
    if (d.qk <= 64) return {128, 128, 4, 12};
    if (d.qk <= 128) return {128, window ? 96 : 128, 2, 12};
    if (d.v <= 128) return {128, window ? 80 : 96, 2, 12};
    if (d.v <= 192) return {128, window ? 64 : 96, 2, 12};
    return {128, window ? 32 : 64, 2, 12};
  }
  if (score == ScoreKind::dropped)  // those who draw want registers, and keys by 64
    return {128, d.v <= 128 ? 128 : 64, d.qk <= 64 ? 4 : 2, 12};
  // 3 * 24 + 4 * 32 = 200 KB. Row ranges would spill.
  if (d.qk <= 64 && mask != MaskKind::rows) return {192, 128, 4, 16};
  if (d.qk <= 64) return {128, 128, 4, 12};   // 3 * 16 + 4 * 32 = 176 KB
  if (d.qk <= 128) return {128, 128, 2, 12};  // 3 * 32 + 2 * 64 = 224 KB
  if (d.qk == 192) return d.v <= 128 ? Tile{128, 128, 2, 12} : Tile{128, 96, 2, 12};
  return {128, 80, 2, 12};  // 64 + 2 * 80 = 224 KB
}

// With masks and scores of a user, whose blocks of 128 queries and keys it divides.
constexpr Tile sm90_functor_tile(HeadDims d) {
  if (d.v <= 128) return {128, 128, d.qk <= 64 ? 4 : 2, 12};
  return {128, 64, 2, 12};  // 64 + 2 * 64 = 192 KB
}

// e4m3: S, O and P, and for sums of two levels at head_dim 64 the product of a tile, too. Above, that
// product takes the registers of S, which so may have 128 keys where one level has 96.
constexpr int32_t kSm90Float8QStages = 2;
constexpr Tile sm90_float8_tile(HeadDims d, ScoreKind score) {
  const bool is_fast = score == ScoreKind::fast;
  if (d.v <= 64) return {192, 128, 4, 16};  // 2 * 24 + 4 * 24 + 24 + 10 = 178 KB
  if (d.v <= 128)  // 2 * 24 + 3 * 28 + 48 + 10 = 190 KB, 2 * 24 + 4 * 32 + 10 = 186 KB
    return is_fast ? Tile{192, 96, 3, 16} : Tile{192, 128, 4, 16};
  // 2 * 32 + 2 * 56 + 8 = 184 KB, 2 * 32 + 2 * 64 + 8 = 200 KB
  return is_fast ? Tile{128, 96, 2, 12} : Tile{128, 128, 2, 12};
}
// Whether O leaves by the TMA. Three groups with sums of two levels have no registers for it.
constexpr bool sm90_float8_sends_out(HeadDims d, ScoreKind score) {
  return d.v <= 128 && score == ScoreKind::fast;
}
// Q and K in panels of 128 columns, V in panels of 128 keys, O where it leaves by the TMA; ones; what
// each thread sees.
constexpr int32_t sm90_float8_smem_bytes(HeadDims d, ScoreKind score) {
  const Tile tile = sm90_float8_tile(d, score);
  int32_t qk = (d.qk + 127) / 128 * 128, keys = (tile.n + 127) / 128 * 128;
  int32_t out = sm90_float8_sends_out(d, score) ? 2 * d.v : 0;
  return qk * (kSm90Float8QStages * tile.m + tile.stages * tile.n) + tile.stages * keys * d.v +
         tile.m * (out + 32) + kSm90SmallBytes + 2 * 1024;
}

// A second tile, which src/attention/sm90_tile.cpp chooses by the lengths of a call: m == 0 is none.
//   128, causal: longer tiles pay where keys come in blocks, by many boxes.
//   64: small ones, where large ones would stay empty or mostly masked. 3 * 8 + 2 * 16 = 56 KB, and
//       with a tile of a bias 64 KB
constexpr Tile sm90_other_tile(HeadDims d, MaskKind mask, ScoreKind score) {
  const bool plain = score == ScoreKind::identity;
  if (d.qk == 128 && mask == MaskKind::causal && plain)
    return {128, 160, 2, 12};  // 2 * 32 + 2 * 80 = 224 KB
  if (d.qk == 64 && mask != MaskKind::rows && (plain || score == ScoreKind::scored))
    return {64, 64, 2, 8};
  return {};
}

// Keys in blocks: rows that lie together wherever a tile begins, one box of the TMA. Shorter ones
// than kMinPageRows are gathered.
constexpr int32_t kMinPageRows = 16;
constexpr int32_t sm90_page_rows(int32_t block_size, Tile tile) {
  int32_t rows = tile.n, rest = block_size;  // the greatest common divisor
  while (rest != 0) {
    int32_t next = rows % rest;
    rows = rest;
    rest = next;
  }
  return rows;
}

// Warps that share rows, each with its own columns of O, which 256 columns and more need: O of 16
// rows x 256 columns is 128 registers. Each computes the whole of S, a third of their products.
constexpr int32_t sm80_column_groups(HeadDims d) { return d.v > 256 ? 2 : 1; }

// simt keeps float32 tiles: 64 output registers a thread at most.
constexpr Tile simt_tile(int32_t head_dim) {
  if (head_dim > 256) return {16, 128, 2, 4};
  return head_dim <= 128 ? Tile{64, 64, 2, 4} : Tile{32, 128, 2, 4};
}

// Its backward passes: m rows of a block, queries or keys, and n of the others. A block that owns
// keys has twice the sums, or, where these do not fit the registers, makes dK or dV.
constexpr Tile simt_backward_tile(int32_t head_dim, bool owns_keys) {
  return owns_keys && head_dim > 64 ? Tile{32, 128, 2, 4} : simt_tile(head_dim);
}
constexpr bool simt_keys_makes_one(int32_t head_dim) { return head_dim > 128; }

constexpr Tile kTiledTile = {64, 32, 1, 8};

// Paged kernels: m rows (queries x heads of a group) of one kv head against n keys at a time. The
// grid of a plan is `ctas_per_sm` blocks on each multiprocessor.
struct PagedTile {
  Tile tile;
  int32_t ctas_per_sm;
};

constexpr PagedTile kPagedCpuTile = {{64, 64, 1, 1}, 1};

// Keys that a warp of paged_sm80 takes at a time. 32 of e4m3 are as many bytes as 16 of the others,
// and cost less than twice 16.
constexpr int32_t paged_slice_keys(int32_t head_dim, int32_t itemsize) {
  return itemsize == 1 && head_dim <= 128 ? 32 : 16;
}

// `head_dim`: a compiled one. `itemsize`: of the caches. `rows`: q_len * group of the call; more
// than m make several row groups. A stage holds a slice of K and V for one warp.
constexpr PagedTile paged_sm80_tile(int32_t head_dim, int32_t itemsize, KvLayout layout,
                                    int32_t rows) {
  // 16 rows of 256 are too many registers; the x-split layout is not worth more instances.
  int32_t m = rows <= 8 || head_dim > 128 || layout == KvLayout::vllm ? 8 : 16;
  int32_t stage_kb = paged_slice_keys(head_dim, itemsize) * 2 * head_dim * itemsize / 1024;
  if (stage_kb <= 4) return {{m, 64, 4, 4}, m == 8 ? 3 : 2};  // 4 warps * 4 stages * 4 KB = 64 KB
  if (stage_kb <= 8) return {{m, 64, 3, 4}, 2};               // 4 * 3 * 8 = 96 KB
  return {{m, 64, 3, 2}, 2};                                  // 2 * 3 * 16 = 96 KB
}

constexpr PagedTile kPagedSimtTile = {{4, 64, 1, 4}, 2};

// mla_decode. sm80: the columns of the latent are spread over the warps, and the scores of a tile
// are summed by way of shared memory. `rows`: q_len * num_heads of the call.
constexpr int32_t kMlaSm80Rope = 64;  // columns beside 512 of the latent
constexpr PagedTile mla_sm80_tile(int32_t rows) {
  if (rows <= 16) return {{16, 32, 2, 4}, 2};  // 2 * 36 KB of keys, 2 * 8 of scores: 88 KB
  return {{32, 16, 2, 8}, 1};                  // 2 * 18 KB, 2 * 16: 68 KB
}
// sm90: two blocks of keys, 2 * 72 KB, and Q, 72 KB.
constexpr int32_t kMlaSm90Latent = 512, kMlaSm90Rope = 64;
constexpr PagedTile kMlaSm90Tile = {{64, 64, 2, 16}, 1};
// simt: a warp for each row, keys in shared memory as float32: 40 KB.
constexpr PagedTile mla_simt_tile(int32_t latent) { return {{8, latent <= 512 ? 16 : 8, 1, 8}, 2}; }

// `head_dim`: a compiled one. m is the columns of a wgmma. A stage is 64 keys of K and V: 96 KB on
// their way keep a multiprocessor's share of the memory busy.
constexpr PagedTile paged_sm90_tile(int32_t head_dim, int32_t rows) {
  int32_t m = rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 || head_dim > 128 ? 32 : 64;
  int32_t stages = head_dim <= 64 ? 6 : 3;  // 64, 128: 96 KB; 256: 192 KB
  return {{m, 64, stages, 5}, m == 32 && head_dim <= 128 ? 2 : 1};
}

// `alone`: the grid has a block for each multiprocessor. Then a block takes more than half of the
// shared memory, so that no two of them meet on one multiprocessor while another stands idle (30 us
// for 21 where the blocks of the second kernel are many).
constexpr int32_t paged_sm90_stages(int32_t head_dim, Tile tile, bool alone) {
  bool fits = tile.m <= 16 && head_dim <= 128;
  return fits && alone ? tile.stages * 4 / 3 : tile.stages;
}

// Clusters are compiled for as many rows as merge quickly, and where two blocks fit a
// multiprocessor.
constexpr bool paged_sm90_clusters(int32_t head_dim, int32_t rows) {
  return head_dim <= 128 && rows <= 16;
}
// Blocks of a cluster, and others with few tiles, take less, 64 KB on their way: three of them
// share a multiprocessor, and one begins while others read. Clusters of a call all find room, and
// those of the next beside them: with a multiprocessor for each block 30 clusters of 4 fit where 32
// are wanted, 18 us for 9.5.
constexpr int32_t paged_sm90_short_stages(int32_t head_dim, Tile tile) {
  return paged_sm90_clusters(head_dim, tile.m) ? tile.stages * 2 / 3 : tile.stages;
}

}  // namespace cuattn
