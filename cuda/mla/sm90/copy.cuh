// SPDX-License-Identifier: Apache-2.0
// mla_decode on Hopper: the shared storage of a thread block, and its copies of latents: of blocks of
// the cache through the TMA; token by token, of lists and of blocks that are no multiple of 16, by
// cp.async; packed ones by way of registers. Next: decode.cuh (who copies, who multiplies).
//
//   a block of 64 keys    panels 0 to 3 | panels 4 to 7, rope      64 columns each: 32 + 40 KB
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

// How the keys of a block come.
enum class MlaSm90Keys { blocks, tokens, packed };

struct MlaSm90Tiles {
  // 1. Types and sizes
  static constexpr int kKeys = kMlaSm90Tile.tile.n, kRows = kMlaSm90Tile.tile.m;
  static constexpr int kStages = kMlaSm90Tile.tile.stages;
  static constexpr int kPanels = 8;        // of 64 columns, and one of rope
  static constexpr int kOutColumns = 128;  // of a warpgroup, in each part
  static constexpr int kThreads = kMlaSm90Tile.tile.warps * 32;
  static constexpr int kScoreRegisters = 96, kValueRegisters = 160;
  static constexpr int kPanelBytes = kKeys * 128, kRowPanelBytes = kRows * 128;
  static constexpr int kRowsBytes = (kPanels + 1) * kRowPanelBytes;
  static constexpr int kStageBytes = (kPanels + 1) * kPanelBytes;
  static constexpr int kChunkBytes = kRows * 16;                    // 8 keys of P
  static constexpr int kParts = 2, kPartPanels = kPanels / kParts;  // the last has rope, too
  static_assert(kKeys / 8 * kChunkBytes <= kPanelBytes, "P lies where rope was");

  // 2. Shared storage, in address order: keys (stage, panel, key, 64), Q (panel, row, 64),
  // factors (stage, row), RowOutput (row), references (row), sums (row), barriers. P of a block
  // (8 keys, row) lies on its rope columns, which nobody reads once its scores are there.
  static constexpr int kBarriers = 8 + 16 * kParts;  // bytes of a stage
  struct Shared {
    uint32_t keys, q, small, barriers;
    __device__ explicit Shared(const void* base)
        : keys(device::smem_address(base)),
          q(keys + kStages * kStageBytes),
          small(q + kRowsBytes),
          barriers(small + kStages * kRows * 4 + kRows * 28) {}
    __device__ uint32_t stage(int s) const { return keys + s * kStageBytes; }
    __device__ uint32_t weights(int s) const { return stage(s) + kPanels * kPanelBytes; }
    __device__ uint32_t factors(int s, int row) const { return small + (s * kRows + row) * 4; }
    __device__ uint32_t rows() const { return small + kStages * kRows * 4; }
    __device__ uint32_t end(int row) const { return rows() + row * 16; }
    // What the warpgroups that make scores tell each other; sums with the references of theirs.
    __device__ uint32_t reference(int row) const { return rows() + kRows * 16 + row * 4; }
    __device__ uint32_t sum(int row) const { return rows() + kRows * 20 + row * 8; }
    __device__ uint32_t weighed(int s) const { return barriers + kBarriers * s; }
    __device__ uint32_t full(int s, int part) const { return weighed(s) + 8 + 16 * part; }
    __device__ uint32_t empty(int s, int part) const { return weighed(s) + 16 + 16 * part; }
  };
  static constexpr int kSmemBytes =
      kStages * kStageBytes + kRowsBytes + kStages * kRows * 4 + kRows * 28 + kStages * kBarriers;
  static_assert(kSmemBytes <= 227 * 1024);

  // A place in the ring of stages.
  struct Cursor {
    int32_t stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance(int32_t by) {
      if ((stage += by) >= kStages) {
        stage -= kStages;
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

  // 3. Copies. The keys of the cache that lie together are a piece, and a lane has one.
  // Where the piece of this lane lies, of the block of keys that begins with `first`. -1, a block
  // outside of the tensor, makes keys that nobody sees zeros.
  static __device__ __forceinline__ int32_t find_piece(const PagedParams& p,
                                                       const device::KeyTask& task, int32_t piece,
                                                       int32_t first) {
    int32_t key = first + threadIdx.x % 32 * piece;
    if (key >= task.end || key + piece <= task.low) return -1;
    if (p.pages.block_tables == nullptr) return task.b;
    return p.pages.block(task.b, key / p.pages.block_size);
  }

  // Token by token: a lane finds keys `lane` and `lane` + 32 of the block of keys that begins with
  // `first`. What the tables say of them is asked for a block ahead.
  struct Tokens {
    int32_t entries[2];
    int64_t latent[2], rope[2];  // where they lie, in elements, of packed ones in bytes
    uint32_t there[2];           // a bit for each key of the block that there is
  };
  static __device__ __forceinline__ bool has_token(const device::KeyTask& task, int32_t key) {
    return key >= task.low && key < task.end;
  }
  static __device__ __forceinline__ void ask_tables(const PagedParams& p,
                                                    const device::KeyTask& task, int32_t first,
                                                    Tokens& tokens) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int32_t key = first + threadIdx.x % 32 + 32 * i;
      if (!has_token(task, key)) continue;
      tokens.entries[i] = *p.pages.entry(task.b, has_lists(p) ? key : key / p.pages.block_size);
    }
  }
  static __device__ __forceinline__ void find_tokens(const PagedParams& p,
                                                     const device::KeyTask& task, int32_t first,
                                                     Tokens& tokens) {
    const Pages& pages = p.pages;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int32_t key = first + threadIdx.x % 32 + 32 * i, entry = tokens.entries[i];
      bool there = has_token(task, key);
      LatentPlace place;
      if (has_lists(p)) {
        there = there && entry >= 0 && entry < pages.num_blocks * pages.block_size;
        place = {entry / pages.block_size, entry % pages.block_size, there};
      } else {
        place = {pages.existing(entry), key % pages.block_size, there};
      }
      tokens.latent[i] = there ? place.at(p.k_strides) : 0;
      tokens.rope[i] = there ? place.at(p.latent.strides) : 0;
      tokens.there[i] = __ballot_sync(0xffffffffu, there);
    }
  }

  // By a warpgroup: a warp has 16 keys, and of one of them 512 bytes at a time. Each part is a group
  // of copies of each thread; keys that are not there become zeros.
  static __device__ __forceinline__ void copy_tokens(const PagedParams& p, const Shared& shared,
                                                     const Cursor& at, const Tokens& tokens) {
    using namespace device;
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, owner = warp % 2 * 16;
    const int32_t panel = lane / 8, piece = lane % 8;
    const int64_t latent = warp < 2 ? tokens.latent[0] : tokens.latent[1];
    const int64_t rope = warp < 2 ? tokens.rope[0] : tokens.rope[1];
    const uint32_t there = (warp < 2 ? tokens.there[0] : tokens.there[1]) >> owner;
    const uint32_t to = shared.stage(at.stage) + warp * 16 * 128;
    const auto* latents = static_cast<const uint16_t*>(p.k_cache) + lane * 8;
    const auto* ropes = static_cast<const uint16_t*>(p.latent.rope_cache) + piece * 8;
    const uint16_t* from[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) from[i] = latents + __shfl_sync(0xffffffffu, latent, owner + i);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      barrier_wait(shared.empty(at.stage, part), at.parity ^ 1);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        cp_async16(to + (part * kPartPanels + panel) * kPanelBytes + swizzled<128>(i, piece),
                   from[i] + part * kPartPanels * 64, (there >> i & 1) != 0);
      }
      if (part == kParts - 1) {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
          cp_async16(to + kPanels * kPanelBytes + swizzled<128>(i + panel, piece),
                     ropes + __shfl_sync(0xffffffffu, rope, owner + i + panel),
                     (there >> (i + panel) & 1) != 0);
        }
      }
      cp_async_commit();
    }
  }

  // The same of packed latents (params/pages.h), of which registers make bfloat16 on the way, so that
  // the products are those of a bfloat16 cache. A lane has 8 codes of each half of a key.
  static __device__ __forceinline__ void copy_packed(const PagedParams& p, const Shared& shared,
                                                     const Cursor& at, const Tokens& tokens) {
    using namespace device;
    static_assert(kParts == 2 && PackedLatent::kScaled * 2 * kParts == PackedLatent::kLatent);
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, owner = warp % 2 * 16;
    const int64_t place = warp < 2 ? tokens.latent[0] : tokens.latent[1];
    const uint32_t there = (warp < 2 ? tokens.there[0] : tokens.there[1]) >> owner;
    const uint32_t to = shared.stage(at.stage) + warp * 16 * 128;
    const char* cache = static_cast<const char*>(p.k_cache);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      // The scale that this lane brings: of key `lane` % 16, half of those of a part.
      const int64_t scaled = __shfl_sync(0xffffffffu, place, owner + lane % 16);
      float scale = 0.0f;
      if ((there >> lane % 16 & 1) != 0)
        scale = reinterpret_cast<const float*>(cache + scaled +
                                               PackedLatent::kScalesAt)[2 * part + lane / 16];
      const char* from = cache + part * PackedLatent::kLatent / kParts + lane * 8;
      uint2 codes[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int64_t key = __shfl_sync(0xffffffffu, place, owner + i);
        codes[i] = uint2{0, 0};
        if ((there >> i & 1) != 0) codes[i] = *reinterpret_cast<const uint2*>(from + key);
      }
      barrier_wait(shared.empty(at.stage, part), at.parity ^ 1);
      const uint32_t panel = to + (part * kPartPanels + lane / 8) * kPanelBytes;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float of_key = __shfl_sync(0xffffffffu, scale, i | (lane & 16));
        store_shared16(panel + swizzled<128>(i, lane % 8),
                       unpack_latents(codes[i].x, codes[i].y, of_key));
      }
    }
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int32_t row = i + lane / 8;
      cp_async16(to + kPanels * kPanelBytes + swizzled<128>(row, lane % 8),
                 cache + __shfl_sync(0xffffffffu, place, owner + row) + PackedLatent::kRopeAt +
                     lane % 8 * 16,
                 (there >> row & 1) != 0);
    }
    cp_async_commit();
  }

  // By a warpgroup: a warp has one panel of each part, the first the rope columns, too.
  // Of the block of the cache that this lane's piece lies in, from `token` on; `row`: of keys.
  static __device__ __forceinline__ void copy_boxes(const MlaSm90Maps& maps, const Shared& shared,
                                                    const Cursor& at, int32_t row, int32_t token,
                                                    int32_t block) {
    using namespace device;
    static_assert(kPartPanels == 4);
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const uint32_t to = shared.stage(at.stage);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t full = shared.full(at.stage, part);
      const int32_t panel = part * kPartPanels + warp;
      const bool has_rope = part == kParts - 1 && warp == 0;
      barrier_wait(shared.empty(at.stage, part), at.parity ^ 1);
      if (lane == 0) barrier_arrive_expect(full, (has_rope ? 2 : 1) * kPanelBytes);
      __syncwarp();
      if (row < kKeys) {
        tma_load(to + panel * kPanelBytes + row * 128, &maps.latent, full, panel * 64, token, 0,
                 block, 0, kEvictNormal);
        if (has_rope) {
          tma_load(to + kPanels * kPanelBytes + row * 128, &maps.rope, full, 0, token, 0, block, 0,
                   kEvictNormal);
        }
      }
      __syncwarp();
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
