// SPDX-License-Identifier: Apache-2.0
// Paged attention on Hopper: the shared storage of a thread block, which keys it has, and the warps
// that copy them through the TMA. Next: decode.cuh (who multiplies).
//
//   K warp   | K0 | K1 | K2 | wait until S0 is done | K3 | ...      3 stages; in a cluster one
//   V warp   | V0 | V1 | V2 | wait until O0 is done | V3 | ...      warp has both
#pragma once

#include "cuattn/device/paged/tasks.cuh"
#include "cuattn/device/wgmma_sm90.cuh"
#include "cuattn/tiles.h"
#include "cuda/host/tensor_maps.h"

namespace cuattn {

// K and V caches as (head_dim, tokens of a block, kv heads, blocks, 1): a box is 64 columns of
// `piece` tokens, the most that both a block and a tile are made of. Of packed rows there is one
// block, in which a sequence has a first row.
struct PagedSm90Maps {
  device::TensorMap k, v;
  int32_t piece;
};

// What a thread block makes of the keys of a split: one softmax, or one of each part of them,
// merged in order (batch invariant), or it has a part only, and its cluster merges all.
enum class SplitUse { whole, in_parts, by_cluster };

template <DType kType, int kHeadDim, int kRows, SplitUse kUse>
struct PagedSm90Tiles {
  // 1. Types and sizes
  static constexpr bool kCluster = kUse == SplitUse::by_cluster;
  static constexpr int kDim = kHeadDim;
  static constexpr Tile kTile = paged_sm90_tile(kHeadDim, kRows).tile;
  // Two warps copy K and V, where one would take as long to ask for 16 boxes of a tile as L2 to
  // bring them. Few tiles are asked for sooner by one.
  static constexpr int kCopyWarps = kCluster ? 1 : 2;
  static constexpr int kMathThreads = 128, kThreads = kMathThreads + 32 * kCopyWarps;
  static constexpr int kPanels = kHeadDim / 64;
  static constexpr int kPanelBytes = kTile.n * 128;          // 64 columns of K or V
  static constexpr int kStageBytes = kPanels * kPanelBytes;  // of K; V has as many
  static constexpr int kRowPanelBytes = kRows * 128;         // 64 columns of Q or P
  static constexpr int kLoadLanes = kTile.n / 8 * kPanels;   // boxes of a stage at most
  // The next kernel is let in when a block has 192 KB left to copy, by its V warp. A block that has
  // no more than 256 KB asks L2 for its first tiles before its turn comes; more would push out what
  // it asked for.
  static constexpr int kReleaseKeys = (192 << 10) / (2 * kStageBytes) * kTile.n;
  static constexpr int kPrefetchKeys = (256 << 10) / (2 * kStageBytes) * kTile.n;
  static constexpr int kCtasPerSm =
      kRows > 32 || kHeadDim > 128 ? 1 : 2;  // registers, shared memory
  static_assert(kTile.n == 64 && kTile.m == kRows, "a tile of keys is one wgmma");
  static_assert(kLoadLanes <= 32, "one lane a box");

  // 2. Shared storage, in address order: K and V (stage, panel, key, 64), Q (panel, row, 64), P
  // (row, key), the maxima and the sums of four warps (row, warp), RowFacts (row), barriers.
  struct Shared {
    uint32_t k, v, q, p, maxima, sums, facts, barriers;
    __device__ Shared(const void* base, int stages) {
      k = (device::smem_address(base) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
      v = k + stages * kStageBytes;
      q = v + stages * kStageBytes;
      p = q + kPanels * kRowPanelBytes;
      maxima = p + kRowPanelBytes;
      sums = maxima + kRows * 16;
      facts = sums + kRows * 16;
      barriers = facts + kRows * 16;
    }
    __device__ uint32_t k_full(int stage) const { return barriers + 32 * stage; }
    __device__ uint32_t k_empty(int stage) const { return barriers + 32 * stage + 8; }
    __device__ uint32_t v_full(int stage) const { return barriers + 32 * stage + 16; }
    __device__ uint32_t v_empty(int stage) const { return barriers + 32 * stage + 24; }
  };
  static constexpr int smem_bytes(int stages) {
    return 1024 + stages * (2 * kStageBytes + 32) + (kPanels + 1) * kRowPanelBytes + 3 * kRows * 16;
  }

  // Which split a block has, in the order of paged_item; with a deal, which worker it is. Along y
  // of the grid the blocks of a cluster are neighbours.
  static __device__ __forceinline__ uint32_t task_index(const PagedWork& w) {
    if (!kCluster) return blockIdx.x;
    uint32_t splits = w.num_splits;
    return blockIdx.x + gridDim.x * (blockIdx.y / w.cluster + splits * blockIdx.z);
  }
  static __device__ __forceinline__ int32_t rank(const PagedWork& w) {
    return static_cast<int32_t>(blockIdx.y % w.cluster);
  }
  static __device__ __forceinline__ bool next_task(const PagedWork& w, device::KeyTasks& tasks,
                                                   device::KeyTask& task) {
    if (!tasks.next(w, task)) return false;
    if constexpr (kCluster) {
      KeyRange part = paged_part(w, rank(w), task.begin, task.end);
      task.begin = part.begin;
      task.end = part.end;
    }
    return true;
  }

  // What a copy warp copies.
  struct Copies {
    bool k, v;
    __device__ explicit Copies(int copy_warp)
        : k(copy_warp == 0), v(kCopyWarps == 1 || copy_warp == 1) {}
  };

  // 3. The copy warps. While the kernel before this one ends, those of a split ask L2 for the first
  // tiles: of the keys that lie in the cache all but the newest do so already. Note: where all
  // warps may come to code in which lanes part, the loops after it lose their uniform registers: 3
  // to 12 % slower.
  static __device__ __forceinline__ void prefetch(const PagedParams& p, const PagedSm90Maps& maps,
                                                  Copies copies) {
    const int32_t pieces = kTile.n / maps.piece;  // of a tile
    int32_t lane = threadIdx.x % 32, panel = lane % kPanels, my_piece = lane / kPanels;
    if (p.work.num_splits == 0) return;
    device::KeyGuess guess = device::guess_keys(p.work, task_index(p.work));
    KeyRange keys{guess.begin, guess.end};
    if constexpr (kCluster) keys = paged_part(p.work, rank(p.work), keys.begin, keys.end);
    const uint32_t begin = keys.begin, end = keys.end;
    if (keys.end - keys.begin > kPrefetchKeys) return;
    uint32_t token = begin + lane * maps.piece;
    int32_t entry = guess.b;  // of one of the first 32 pieces
    if (token < end && p.pages.block_tables != nullptr) {
      entry = device::peek(p.pages.entry(guess.b, token / p.pages.block_size));
    }
#pragma unroll 1
    for (int32_t first = 0; first < p.stages * pieces && first + pieces <= 32; first += pieces) {
      int32_t piece = first + my_piece;
      int32_t first_entry = __shfl_sync(0xffffffffu, entry, piece);
      int32_t block = p.pages.existing(first_entry);
      token = begin + piece * maps.piece;
      if (my_piece < pieces && token < end) {
        int32_t row = static_cast<int32_t>(token % p.pages.block_size);
        if (p.pages.packed_rows > 0) row += first_entry;
        auto ask = [&](const device::TensorMap& map) {
          device::tma_prefetch_box(&map, panel * 64, row, guess.kv_head, block, 0);
        };
        if (copies.k) ask(maps.k);
        if (copies.v) ask(maps.v);
      }
    }
  }

  // A copy warp: each lane has one box of every tile. Together the lanes hold the block table
  // entries of the next 32 pieces, and load those of the 32 after them. Keys that nobody sees are
  // never read: block -1 is outside the tensor, and the TMA writes zeros.
  static __device__ __forceinline__ void copy(const PagedParams& p, const PagedSm90Maps& maps,
                                              const Shared& shared, Copies copies) {
    const int32_t pieces = kTile.n / maps.piece;  // of a tile
    int32_t lane = threadIdx.x % 32, panel = lane % kPanels, my_piece = lane / kPanels;
    bool has_box = my_piece < pieces;
    const uint32_t to = panel * kPanelBytes + my_piece * maps.piece * 128;
    // Note: a division in the loop over tiles costs 3 % of long contexts.
    const int32_t block_size = p.pages.block_size, row_step = kTile.n % block_size;
    device::Ring ring(1, p.stages);
    auto load = [&](bool of_v, int32_t row, int32_t head, int32_t block) {
      uint32_t full = of_v ? shared.v_full(ring.stage()) : shared.k_full(ring.stage());
      uint32_t empty = of_v ? shared.v_empty(ring.stage()) : shared.k_empty(ring.stage());
      uint32_t smem = (of_v ? shared.v : shared.k) + ring.stage() * kStageBytes;
      device::barrier_wait(empty, ring.parity());
      if (lane == 0) device::barrier_arrive_expect(full, kStageBytes);
      __syncwarp();
      if (has_box) {
        device::tma_load(smem + to, of_v ? &maps.v : &maps.k, full, panel * 64, row, head, block, 0,
                         device::kEvictNormal);
      }
    };
    device::KeyTasks tasks(p.work, task_index(p.work));
    device::KeyTask task;
    while (next_task(p.work, tasks, task)) {
      auto seen = [&](uint32_t token) {
        return token + maps.piece > static_cast<uint32_t>(task.low) &&
               token < static_cast<uint32_t>(task.end);
      };
      // Note: entries stay as they were loaded until their tile comes. One instruction on them
      // here, such as the clamp of their range, and the warp waits for the table: 5 to 8 % slower.
      uint32_t to_load = task.begin + lane * maps.piece;
      auto load_entries = [&] {
        uint32_t token = to_load;
        to_load += 32 * maps.piece;
        if (!seen(token)) return 0;
        return p.pages.id(task.b, static_cast<int32_t>(token / block_size));
      };
      int32_t entries = load_entries(), left = task.end - task.begin;
      uint32_t token = task.begin + my_piece * maps.piece;
      int32_t row = static_cast<int32_t>(token % block_size);
      if (p.pages.packed_rows > 0) row += *p.pages.entry(task.b, 0);
      bool releases = copies.v && tasks.is_last(p.work);
#pragma unroll 1
      while (left > 0) {
        int32_t next_entries = load_entries();
#pragma unroll 1
        for (int32_t piece = my_piece; piece < 32 + my_piece && left > 0; piece += pieces) {
          if (releases && left <= kReleaseKeys) {
            device::release_next_kernel();
            releases = false;
          }
          int32_t entry = __shfl_sync(0xffffffffu, entries, piece);
          int32_t block = seen(token) ? p.pages.existing(entry) : -1;
          if constexpr (kCopyWarps == 1) {
            load(false, row, task.kv_head, block);
            load(true, row, task.kv_head, block);
          } else {
            load(copies.v, row, task.kv_head, block);
          }
          token += kTile.n;
          row += row_step;
          if (row >= block_size) row -= block_size;
          left -= kTile.n;
          ring.next();
        }
        entries = next_entries;
      }
    }
    if (kCluster) device::release_next_kernel();  // without keys it waits for the others
  }
};

}  // namespace cuattn
