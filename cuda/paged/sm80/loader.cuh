// SPDX-License-Identifier: Apache-2.0
// The copies of a warp of decode.cuh. The loader runs up to kStages slices ahead, into the next
// tasks where need be; the block of a slice is looked up one slice earlier still, so that nobody
// waits for the table. Next: decode.cuh.
#pragma once

#include "cuattn/device/mma_sm80.cuh"
#include "cuattn/device/paged/slice.cuh"
#include "cuattn/device/paged/tasks.cuh"

namespace cuattn {

// Kernel: a PagedSm80, for its sizes and its stages.
template <class Kernel>
struct PagedSm80Loader {
  using Slice = typename Kernel::Slice;
  static constexpr bool kFp8 = Kernel::kFp8;
  static constexpr int kHeadDim = Kernel::kDim, kItem = Kernel::kItem;
  static constexpr int kRowBytes = Kernel::kRowBytes, kKBytes = Kernel::kKBytes;
  static constexpr int kSlice = Kernel::kSlice;

  const Kernel& me;
  device::KeyTasks tasks;
  device::KeyTask task;
  int32_t key;     // first key of the next slice
  int32_t block;   // of key `lane % 16` of the slice, as the table has it
  int32_t within;  // and the place of the key in that block
  bool live;       // there is a next slice
  int stage;       // to fill next
  int free;        // stages to fill

  // `first`: what `walk` found last.
  __device__ PagedSm80Loader(const Kernel& self, const device::KeyTasks& walk,
                             const device::KeyTask& first)
      : me(self),
        tasks(walk),
        task(first),
        key(first.begin + self.warp * kSlice),
        live(true),
        stage(0),
        free(self.num_stages) {}

  // Finds the next slice and its blocks.
  __device__ __forceinline__ void find(const PagedParams& p) {
    while (live && key >= task.end) {
      live = tasks.next(p.work, task);
      key = task.begin + me.warp * kSlice;
    }
    if (!live) return;
    // Entries past the context are not read. A block that holds 16 keys is one for absent keys,
    // too: their places follow on.
    bool one_block = in_one_block(p);
    int32_t mine = key + me.lane % kSlice, first = mine / 16 * 16;
    if (first >= task.end) first = key;
    uint32_t token = one_block ? first : max(min(mine, task.end - 1), task.low);
    uint32_t index = token / static_cast<uint32_t>(p.pages.block_size);
    block = p.pages.id(task.b, index);
    within = token - index * p.pages.block_size + (one_block ? me.lane % 16 : 0);
  }
  static __device__ bool in_one_block(const PagedParams& p) { return p.pages.block_size % 16 == 0; }
  __device__ __forceinline__ bool holds(int32_t row) const {  // key `row` of the slice counts
    return static_cast<uint32_t>(key + row - task.low) < static_cast<uint32_t>(task.end - task.low);
  }

  // Where a token of this kv head begins.
  __device__ __forceinline__ const char* token_in(const PagedParams& p, const void* cache,
                                                  const CacheStrides& strides, int32_t id,
                                                  int32_t place) const {
    int64_t at =
        p.pages.existing(id) * strides.block + task.kv_head * strides.head + place * strides.token;
    return static_cast<const char*>(cache) + at * kItem;
  }

  // Keys as rows: kLanes lanes copy one, so that a warp reads whole lines.
  template <bool kOneBlock>
  __device__ __forceinline__ void copy_rows(const PagedParams& p, uint32_t to) const {
    constexpr int kLanes = kRowBytes / 16 < 32 ? kRowBytes / 16 : 32;
    constexpr int kPassRows = 32 / kLanes;
    int32_t row = me.lane / kLanes, chunk = me.lane % kLanes;
    bool column_valid = chunk * 16 < p.head_dim * kItem;
    const char *gK = nullptr, *gV = nullptr;
    auto find_row = [&](int32_t id, int32_t place) {
      gK = token_in(p, p.k_cache, p.k_strides, id, place) + chunk * 16;
      gV = token_in(p, p.v_cache, p.v_strides, id, place) + chunk * 16;
    };
    to += device::swizzled<kRowBytes>(row, chunk);
#pragma unroll
    for (int pass = 0; pass < kSlice / kPassRows; ++pass) {
      int32_t at = row + pass * kPassRows;
      if (!kOneBlock || pass * kPassRows % 16 == 0) {
        find_row(__shfl_sync(0xffffffffu, block, at), __shfl_sync(0xffffffffu, within, at));
      }
      bool valid = column_valid && holds(at);
      // kPassRows is a power of 2: the rows of a pass change the swizzle by a constant.
      uint32_t smem =
          (to ^ (kPassRows < 8 ? pass * kPassRows % 8 * 16 : 0)) + pass * kPassRows * kRowBytes;
      device::cp_async16(smem, gK, valid);
      device::cp_async16(smem + kKBytes, gV, valid);
      gK += kPassRows * kItem * p.k_strides.token;
      gV += kPassRows * kItem * p.v_strides.token;
    }
  }

  // K: a lane takes one key, 16 bytes at a time. V: 8 keys of one d at a time, kept as rows of d.
  __device__ __forceinline__ void copy_xsplit(const PagedParams& p, uint32_t to) const {
    constexpr int kAside = 32 / kSlice, kPieces = kSlice / 8, kPassRows = 32 / kPieces;
    int32_t row = me.lane % kSlice, piece = me.lane % kPieces;
    bool row_valid = holds(row);
    const char* gK = token_in(p, p.k_cache, p.k_strides, block, within) +
                     me.lane / kSlice * p.pages.block_size * 16;
#pragma unroll
    for (int i = 0; i < kRowBytes / 16 / kAside; ++i) {
      int32_t chunk = me.lane / kSlice + kAside * i;
      device::cp_async16(to + Slice::k_chunk(row, chunk), gK,
                         row_valid && chunk * 16 < p.head_dim * kItem);
      gK += kAside * p.pages.block_size * 16;
    }
    // The 8 keys: blocks are multiples of 8.
    int32_t first_d = me.lane / kPieces, id = __shfl_sync(0xffffffffu, block, 8 * piece);
    int32_t place = __shfl_sync(0xffffffffu, within, 8 * piece) / 8 * 8;
    const char* gV =
        token_in(p, p.v_cache, p.v_strides, id, place) + first_d * p.pages.block_size * kItem;
    bool piece_valid = key + 8 * piece < task.end && key + 8 * piece + 8 > task.low;
#pragma unroll
    for (int i = 0; i < kHeadDim / kPassRows; ++i) {
      int32_t d = first_d + kPassRows * i;
      bool valid = piece_valid && d < p.head_dim;
      if constexpr (kFp8) {
        device::cp_async8(to + kKBytes + Slice::v_row(d, piece), gV, valid);
      } else {
        device::cp_async16(to + kKBytes + Slice::v_row(d, piece), gV, valid);
      }
      gV += kPassRows * p.pages.block_size * kItem;
    }
  }

  // Starts the copies of the next slice, if there is one, as one group.
  __device__ __forceinline__ void copy(const PagedParams& p) {
    uint32_t to = me.stage_address(stage);
    if (live) {
      if constexpr (Kernel::kXsplit) {
        copy_xsplit(p, to);
      } else if (in_one_block(p)) {
        copy_rows<true>(p, to);
      } else {
        copy_rows<false>(p, to);
      }
      key += me.num_warps * kSlice;
    }
    device::cp_async_commit();
    stage = stage + 1 < me.num_stages ? stage + 1 : 0;
    --free;
  }

  // Note: one place for copy and one for find. Instructions that run once cost a fetch each;
  // every further copy of them is felt in short calls.
  __device__ __forceinline__ void fill(const PagedParams& p) {
    bool found = free < me.num_stages;  // not in the first call
#pragma unroll 1
    while (true) {
      if (found) copy(p);
      find(p);
      if (found && free == 0) break;
      found = true;
    }
  }
};

}  // namespace cuattn
