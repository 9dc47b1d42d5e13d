// SPDX-License-Identifier: Apache-2.0
// Which probabilities of a tile dropout keeps, in the accumulators of mma.sync and wgmma: a lane of
// a quad has columns 8 n + 2 q and the next of rows g and g + 8 (mma_sm80.cuh). Every call of
// Philox is made by one lane, and its 16 bytes go to those that hold its keys. The rule:
// params/dropout.h.
#pragma once

#include "cuattn/device/math.cuh"
#include "cuattn/params/attention.h"

namespace cuattn::device {

// Dropout of one query head of one sequence.
struct HeadDropout {
  DropoutParams params;
  uint32_t head;  // a word of Philox's counter

  __device__ HeadDropout(const AttentionParams& p, int32_t b, int32_t h)
      : params(p.dropout.resolved()), head(p.dropout.head(b, h)) {}

  // The 16 bytes of keys [16 * group, 16 * group + 16) of a row, in order.
  __device__ __forceinline__ PhiloxWords draw(int32_t row, int32_t group) const {
    const uint32_t first_group = params.first_key >> 4;
    return philox({first_group + static_cast<uint32_t>(group),
                   params.first_row + static_cast<uint32_t>(row), head, params.offset},
                  params.seed);
  }

  // The same for four lanes: word k has those of keys 2k, 2k + 1, 2k + 8 and 2k + 9.
  __device__ __forceinline__ void draw(uint32_t (&words)[4], int32_t row, int32_t group) const {
    PhiloxWords w = draw(row, group);
    words[0] = (w.x & 0xffffu) | w.z << 16;
    words[1] = w.x >> 16 | (w.z & 0xffff0000u);
    words[2] = (w.y & 0xffffu) | w.w << 16;
    words[3] = w.y >> 16 | (w.w & 0xffff0000u);
  }

  // Bit 8 tells whether byte 0 of `bytes` is dropped, bit 24 of byte 2: the sum leaves the byte.
  __device__ __forceinline__ uint32_t carries(uint32_t bytes) const {
    return ((bytes & 0x00ff00ffu) + static_cast<uint32_t>(params.dropped) * 0x00010001u) &
           0x01000100u;
  }

  // What is kept of four blocks of 8 keys from key0 on (a multiple of 16), rows `row` and row + 8 of
  // this lane: bit 4 n + 2 half + i.
  __device__ __forceinline__ uint32_t kept_of_rows(int32_t row, int32_t key0) const {
    uint32_t lane = threadIdx.x % 4, dropped = 0, words[4];
    draw(words, row + static_cast<int32_t>(lane % 2 * 8),
         key0 / 16 + static_cast<int32_t>(lane / 2));
    lanes_transpose<1>(words);
#pragma unroll
    for (int call = 0; call < 4; ++call) {
      uint32_t bits = carries(words[call]) | carries(words[call] >> 8) << 1;
      dropped |= ((bits >> 8 & 3u) | (bits >> 20 & 0x30u)) << (call / 2 * 8 + call % 2 * 2);
    }
    return ~dropped;
  }

  // The same of the transposed scores: keys g and g + 8 from key0 on (a multiple of 16), and four
  // blocks of 8 rows from row0 on.
  __device__ __forceinline__ uint32_t kept_of_keys(int32_t row0, int32_t key0) const {
    uint32_t lane = threadIdx.x % 32, dropped = 0, words[4];
    uint32_t g = lane / 4, odd = g % 2;
    draw(words, row0 + static_cast<int32_t>(g / 2 * 8 + lane % 4 * 2 + odd), key0 / 16);
    lanes_transpose<8>(words);  // now those of rows 8 n + 2 q + odd
    auto bits_of = [&](uint32_t word) {
      uint32_t bits = carries(word >> 8 * odd);
      return (bits >> 8 & 1u) | (bits >> 22 & 4u);
    };
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t theirs = __shfl_xor_sync(0xffffffffu, words[n], 4);
      dropped |= (bits_of(words[n]) << odd | bits_of(theirs) << (odd ^ 1u)) << 4 * n;
    }
    return ~dropped;
  }
};

// Four blocks of an accumulator times Z, from block `first` on.
template <int kBlocks>
__device__ __forceinline__ void apply_kept(float (&x)[kBlocks][4], int first, uint32_t kept,
                                           float factor) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& value = x[first + n][i];
      value = kept >> (4 * n + i) & 1u ? value * factor : 0.0f;
    }
  }
}

}  // namespace cuattn::device
