// SPDX-License-Identifier: Apache-2.0
// mla_decode on Hopper: the shared storage of a thread block, and the warp that copies latents
// through the TMA. Next: decode.cuh (who multiplies).
//
//   a block of 32 keys    panels 0 to 3 | panels 4 to 7, rope      64 columns each: 16 + 20 KB
//   the copy warp         | part 0 of block 0 | part 1 | part 0 of block 1 | part 1 | wait until
//                         part 0 of block 0 is done | part 0 of block 2 | ...
#pragma once

#include <numeric>

#include "cuattn/device/paged/tasks.cuh"
#include "cuattn/device/wgmma_sm90.cuh"
#include "cuattn/tiles.h"
#include "cuda/host/tensor_maps.h"

namespace cuattn {

// Latents and rope columns as (columns, tokens of a block, 1, blocks, 1): a box is 64 columns of
// `piece` tokens, the most that both a block of the cache and one of the kernel are made of.
struct MlaSm90Maps {
  device::TensorMap latent, rope;
  int32_t piece;
};

struct MlaSm90Tiles {
  // 1. Types and sizes
  static constexpr int kKeys = kMlaSm90Tile.tile.n, kRows = kMlaSm90Tile.tile.m;
  static constexpr int kStages = kMlaSm90Tile.tile.stages;
  static constexpr int kPanels = 8;      // of 64 columns, and one of rope
  static constexpr int kHeldPanels = 5;  // of Q, in registers
  static constexpr int kSharedPanels = kPanels + 1 - kHeldPanels;
  static constexpr int kOutColumns = 128;  // of a warpgroup, in each part
  static constexpr int kThreads = kMlaSm90Tile.tile.warps * 32;
  static constexpr int kScoreRegisters = 144, kValueRegisters = 160, kCopyRegisters = 48;
  static constexpr int kPanelBytes = kKeys * 128, kRowPanelBytes = kRows * 128;
  static constexpr int kStageBytes = (kPanels + 1) * kPanelBytes;
  static constexpr int kChunkBytes = kRows * 16;  // 8 keys of P
  static constexpr int kMinPiece = 16;            // keys that lie together in the cache
  static constexpr int kParts = 2, kPartPanels = kPanels / kParts;  // the last has rope, too
  static_assert(kKeys / 8 * kChunkBytes <= kPanelBytes, "P lies where rope was");

  // 2. Shared storage, in address order: keys (stage, panel, key, 64), Q (panel, row, 64),
  // factors (stage, row), RowOutput (row), barriers. P of a block (8 keys, row) lies on
  // its rope columns, which nobody reads once its scores are there.
  static constexpr int kBarriers = 8 + 16 * kParts;  // bytes of a stage
  struct Shared {
    uint32_t keys, q, small, barriers;
    __device__ explicit Shared(const void* base)
        : keys(device::smem_address(base)),
          q(keys + kStages * kStageBytes),
          small(q + kSharedPanels * kRowPanelBytes),
          barriers(small + kStages * kRows * 4 + kRows * 16) {}
    __device__ uint32_t stage(int s) const { return keys + s * kStageBytes; }
    __device__ uint32_t weights(int s) const { return stage(s) + kPanels * kPanelBytes; }
    __device__ uint32_t factors(int s, int row) const { return small + (s * kRows + row) * 4; }
    __device__ uint32_t end(int row) const { return small + kStages * kRows * 4 + row * 16; }
    __device__ uint32_t weighed(int s) const { return barriers + kBarriers * s; }
    __device__ uint32_t full(int s, int part) const { return weighed(s) + 8 + 16 * part; }
    __device__ uint32_t empty(int s, int part) const { return weighed(s) + 16 + 16 * part; }
  };
  static constexpr int kSmemBytes = kStages * kStageBytes + kSharedPanels * kRowPanelBytes +
                                    kStages * kRows * 4 + kRows * 16 + kStages * kBarriers;
  static_assert(kSmemBytes <= 227 * 1024);

  // A place in the ring of stages.
  struct Cursor {
    int32_t stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  static __device__ __forceinline__ int32_t num_blocks(const device::KeyTask& task) {
    int32_t keys = task.end - task.begin;
    return keys <= 0 ? 0 : (keys - 1) / kKeys + 1;
  }

  // A operand without a swizzle: blocks of 8 rows x 16 bytes lie together, those of the next 8 rows
  // 128 bytes further, those of the next 8 keys kChunkBytes.
  static __device__ __forceinline__ uint64_t plain_descriptor(uint32_t smem) {
    return uint64_t{128 >> 4} << 32 | uint64_t{kChunkBytes >> 4} << 16 | ((smem & 0x3ffff) >> 4);
  }

  // 3. The copy warp. Its lanes hold the entries of the next 32 pieces. Keys past the end are zeros:
  // block -1 is outside of the tensor.
  static __device__ __forceinline__ void copy(const PagedParams& p, const MlaSm90Maps& maps,
                                              const Shared& shared) {
    using namespace device;
    const int32_t lane = threadIdx.x % 32, piece_keys = maps.piece, pieces = kKeys / piece_keys;
    const int32_t block_size = p.pages.block_size;
    if (lane < 2) tma_prefetch(lane == 0 ? &maps.latent : &maps.rope);
    Cursor at;
    KeyTasks tasks(p.work);
    KeyTask task;
#pragma unroll 1
    while (tasks.next(p.work, task)) {
      auto seen = [&](int32_t key) { return key < task.end && key + piece_keys > task.low; };
      int32_t found = 0, next = 32, first = task.begin;
      // A lane has one panel of one piece.
      auto copy_part = [&]<int kPart>() {
        constexpr int kCount = kPart == kParts - 1 ? kPartPanels + 1 : kPartPanels;
        static_assert(kCount * kKeys / kMinPiece <= 32);
        const int32_t panel = kPart * kPartPanels + lane % kCount, piece = lane / kCount;
        const uint32_t full = shared.full(at.stage, kPart);
        int32_t key = first + piece * piece_keys, block = __shfl_sync(~0u, found, next + piece);
        block = seen(key) ? p.pages.existing(block) : -1;
        barrier_wait(shared.empty(at.stage, kPart), at.parity ^ 1);
        if (lane == 0) barrier_arrive_expect(full, kCount * kPanelBytes);
        __syncwarp();
        if (piece < pieces) {
          tma_load(shared.stage(at.stage) + panel * kPanelBytes + piece * piece_keys * 128,
                   panel < kPanels ? &maps.latent : &maps.rope, full,
                   panel < kPanels ? panel * 64 : 0, key % block_size, 0, block, 0, kEvictNormal);
        }
      };
#pragma unroll 1
      for (int32_t blocks = num_blocks(task); blocks > 0; --blocks, first += kKeys) {
        if (next == 32) {
          int32_t key = first + lane * piece_keys;
          found = task.b;  // without pages
          if (p.pages.block_tables != nullptr && seen(key))
            found = *p.pages.entry(task.b, key / block_size);
          next = 0;
        }
        copy_part.template operator()<0>();
        copy_part.template operator()<1>();
        at.next();
        next += pieces;
      }
    }
  }
};

// Without pages a sequence is one block, and what lies past its end is outside of the tensor.
inline MlaSm90Maps mla_sm90_maps(const PagedParams& p) {
  MlaSm90Maps maps;
  bool is_paged = p.pages.block_tables != nullptr;
  maps.piece = is_paged ? std::gcd(p.pages.block_size, MlaSm90Tiles::kKeys) : MlaSm90Tiles::kKeys;
  bool has_keys = p.work.capacity > 0;  // else nothing is read
  maps.latent = paged_cache_map(p, has_keys ? p.k_cache : p.q, p.k_strides, maps.piece);
  const CacheStrides& s = p.latent.strides;
  maps.rope = tensor_map(p.kv_dtype, has_keys ? p.latent.rope_cache : p.q,
                         {p.latent.rope_dim, p.pages.block_size, 1, p.pages.num_blocks, 1},
                         {s.token, 0, s.block, 0}, {64, maps.piece, 1, 1, 1});
  return maps;
}

}  // namespace cuattn
