// SPDX-License-Identifier: Apache-2.0
// mla_decode on Hopper: the scores of a block of 64 keys that a row does not see, and latents that
// nobody sees. Next: decode.cuh.
#pragma once

#include "cuda/mla/sm90/copy.cuh"

namespace cuattn {

struct MlaSm90Masks : MlaSm90Tiles {
  static constexpr int kKeyBlocks = kKeys / 8;  // n8 of S
  using Block = float[kKeyBlocks * 4];
  // A thread has rows `row` and `row` + 8 of the tile.
  struct Lane {
    int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    int row = 16 * warp + lane / 4;
  };

  // Whether a row of the tile may not see all keys of the block.
  static __device__ __forceinline__ bool has_edge(const PagedParams& p, const device::KeyTask& task,
                                                  int32_t key0) {
    const PagedWork& w = p.work;
    return key0 < w.mask.visible(w.q_len - 1, w.q_len, task.context).begin ||
           key0 + kKeys > w.mask.visible(0, w.q_len, task.context).end;
  }

  static __device__ __forceinline__ void mask_scores(const PagedParams& p,
                                                     const device::KeyTask& task, const Lane& me,
                                                     int32_t key0, Block& scores) {
    const PagedWork& w = p.work;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t query = (task.row0 + me.row + 8 * half) / w.group;
      KeyRange visible = w.mask.visible(min(query, w.q_len - 1), w.q_len, task.context);
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int32_t key = key0 + 8 * n + 2 * (me.lane % 4) + i;
          float& score = scores[4 * n + 2 * half + i];
          if (key < visible.begin || key >= visible.end) score = device::negative_infinity();
        }
      }
    }
  }

  // The same for a list: tokens that are not there came as zeros.
  static __device__ __forceinline__ void mask_holes(const Lane& me, const uint32_t (&there)[2],
                                                    Block& scores) {
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if ((there[n / 4] >> (8 * (n % 4) + 2 * (me.lane % 4) + i) & 1) != 0) continue;
        scores[4 * n + i] = scores[4 * n + 2 + i] = device::negative_infinity();
      }
    }
  }

  // 0 x NaN is NaN: latents that nobody sees become zeros, before they are read as values.
  static __device__ __forceinline__ void clear_keys(const device::KeyTask& task, const Lane& me,
                                                    uint32_t stage, int32_t key0) {
#pragma unroll 1
    for (int i = me.thread; i < kKeys * kPanels * 8; i += 128) {
      int row = i / 8 % kKeys, panel = i / (8 * kKeys), key = key0 + row;
      if (key < task.low || key >= task.end)
        device::store_shared16(stage + panel * kPanelBytes + row * 128 + i % 8 * 16, {});
    }
  }
};

}  // namespace cuattn
