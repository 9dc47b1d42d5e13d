// SPDX-License-Identifier: Apache-2.0
// Online softmax of a wgmma accumulator: one step of prefill_sm90.cuh. Source: FlashAttention-2,
// arXiv:2307.08691, algorithm 1.
#pragma once

#include "cuattn/device/math.cuh"
#include "cuattn/device/mma_sm90.cuh"

namespace cuattn {

// The state of a thread's two rows (lane / 4 and lane / 4 + 8 of a warp's 16): maximum of the
// scores in the functor's units, this lane's share of the sum.
struct Sm90Softmax {
  float max[2] = {device::negative_infinity(), device::negative_infinity()};
  float sum[2] = {0.0f, 0.0f};
};

// Scores become P, relative to the running maximum, and O follows the maximum once `pv_done` has
// waited for the product that still reads the old P. `begun` is called behind the first maximum.
// The exponentials are what takes time (16 a clock and SM): the order lets everything else run in
// their shadow.
//
//   row 0: max | exp . . . . . . . . | pack, rescale O
//   row 1:     |         max         | exp . . . . . . . . . pack |
//
// Left alone, the compiler multiplies all of a row's exponents before its first exponential and
// rescales O behind the last: the unit that computes exponentials stands idle. So some values are
// made to wait for others: x = fmaf(awaited, zero, x), with a zero that only we know.
template <DType kType, int kScoreCount, int kOutCount, class Begun, class Wait>
__device__ __forceinline__ void softmax_step(Sm90Softmax& state, float (&scores)[kScoreCount],
                                             uint32_t (&probs)[kScoreCount / 2],
                                             float (&out)[kOutCount], float to_log2, float zero,
                                             Begun begun, Wait pv_done) {
  using namespace device;
  constexpr int kBlocks = kScoreCount / 4;  // of 8 keys
  constexpr int kLinked = 4;                // blocks
  float chain[2][2], reference[2], rescale[2], sum[2][2];
  auto await = [&](float x, float awaited) { return fmaf(awaited, zero, x); };
  auto max_of = [&](int half, int block) {  // two chains a row: half the latency
#pragma unroll
    for (int i = 0; i < 2; ++i)
      chain[half][i] = fmaxf(chain[half][i], scores[4 * block + 2 * half + i]);
  };
  auto settle_max = [&](int half) {
    float max = fmaxf(state.max[half], quad_max(fmaxf(chain[half][0], chain[half][1])));
    // A row that has seen nothing keeps -inf; 0 in its place keeps -inf - (-inf) out of the
    // exponent.
    float safe = max == negative_infinity() ? 0.0f : max;
    rescale[half] = exp2_approx((state.max[half] - safe) * to_log2);
    state.max[half] = max;
    reference[half] = safe * to_log2;
  };
  auto exponential = [&](int half, int block) {
    float* s = &scores[4 * block + 2 * half];
    if (block > 0 && block % kLinked == 0)
      reference[half] = await(reference[half], s[-4 * kLinked]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[i] = exp2_approx(fmaf(s[i], to_log2, -reference[half]));
      sum[half][i] = block == 0 ? s[i] : sum[half][i] + s[i];
    }
  };
  auto pack = [&](int half, int block) {
    const float* s = &scores[4 * block + 2 * half];
    probs[2 * block + half] = pack2<kType>(s[0], s[1]);
  };
  chain[0][0] = chain[0][1] = negative_infinity();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) max_of(0, block);
  settle_max(0);
  begun();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    exponential(0, block);
    if (block == 0) chain[1][0] = chain[1][1] = await(negative_infinity(), scores[0]);
    max_of(1, block);
  }
  // Note: a NaN of row 0 must not reach row 1: fmaxf drops it.
  chain[1][0] = fmaxf(chain[1][0], await(negative_infinity(), rescale[0]));
  settle_max(1);
  if (kOutCount <= 64)  // else the wait comes before all exponentials; wider: no register is left
    order_after(scores[4 * (kBlocks - 1)]);
  const bool rescales = pv_done();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if (block == kLinked) reference[1] = await(reference[1], rescale[1]);
    exponential(1, block);
    pack(0, block);
    if (block > 0) pack(1, block - 1);
    if (!rescales) continue;
    constexpr int kSlice = (kOutCount + kBlocks - 1) / kBlocks;
#pragma unroll
    for (int i = 0; i < kSlice; ++i) {
      int at = block * kSlice + i;
      if (at < kOutCount) out[at] *= rescale[at >> 1 & 1];
    }
  }
  pack(1, kBlocks - 1);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    state.sum[half] = fmaf(state.sum[half], rescale[half], sum[half][0] + sum[half][1]);
}

}  // namespace cuattn
