// SPDX-License-Identifier: Apache-2.0
// Online softmax of a wgmma accumulator whose P becomes e4m3: one step of float8.cuh. Next:
// softmax.cuh, the same in 16 bits.
#pragma once

#include "cuda/attention/sm90/softmax.cuh"

namespace cuattn {

// P is up to 2^(kFloat8Shift + slack) = 2^8 of the 448 that e4m3 holds; what is 2^-13 of a row's
// reference or less vanishes.
constexpr int kFloat8Shift = 4;
// Sums of int8 begin at 2^23 + 2^22 as a float, whose last bit is 1: as bits they are that many more.
constexpr int kInt8Offset = 3 << 22;
// With parts limits are made of references, by three roundings: these stay smaller.
template <bool kInt8, bool kHasParts>
using Float8Softmax =
    Sm90Softmax<ScoreKind::identity, 4, kInt8 ? kInt8Offset : 0, kHasParts ? 21 : 24>;

// A factor that changes from tile to tile: the limits of rows follow. Those of large references are none.
template <class State>
__device__ __forceinline__ void follow_factor(State& state, float to_log2) {
  const float inverse = device::rcp_approx(to_log2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!state.is_large(half))
      state.limit[half] = fmaxf(  // above -inf, which is no score
          fmaf(state.reference[half] + State::kSlack, inverse, State::kOffset), State::kUnseen);
  }
}

// 2^x of two numbers by FMA pipes in float16: within 2^-7.5 for x from -12 to 8, and 2^-12 below, which no
// e4m3 holds. NaN stays NaN. The MUFU takes 8 clocks for a warp's exponentials; at head_dim 64 it is what
// is busiest.
__device__ __forceinline__ void exp2_pair(float& low, float& high) {
  uint32_t x, power, whole, y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(0xca00ca00u));     // -12
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(power) : "r"(x), "r"(0x660f660fu));  // 1536 + 15
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(whole) : "r"(power), "r"(0x660f660fu));
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(whole));
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x33a133a1u), "r"(0x39a139a1u));
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(y), "r"(x), "r"(0x3c003c00u));
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(y), "r"(power << 10 & 0xfc00fc00u));
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "r"(y));
}

// One step: scores become P. `join(rescale, moves)`: the product with the last P joins O, if it has
// not yet, which then follows a reference that moves. kCounts: products count the sums of rows, too.
// kByPairs: every fourth pair of exponentials is one of exp2_pair. See softmax_step of softmax.cuh.
template <class Order, bool kCounts, bool kByPairs, class State, int kScoreCount, class Join>
__device__ __forceinline__ void float8_softmax_step(State& state, float (&scores)[kScoreCount],
                                                    uint32_t (&probs)[kScoreCount / 4],
                                                    float to_log2, float zero, Join join) {
  using namespace device;
  constexpr int kBlocks = kScoreCount / 4, kGroups = kBlocks / 2;  // of 8 and 16 keys
  constexpr int kLinked = 4;                                       // blocks
  float rescale[2] = {1.0f, 1.0f}, sum[2][2], highest[2];
  bool moves = any_outgrown<true>(state, highest, scores);
  if (moves) moves = any_outgrown<false>(state, highest, scores);
  if (moves) {
    moves = move_references(state, rescale, highest, to_log2);
    if (__any_sync(0xffffffffu, state.is_large(0) || state.is_large(1)))
      center_large(state, scores, to_log2);
  }
  float reference[2] = {state.subtrahend(0) - kFloat8Shift, state.subtrahend(1) - kFloat8Shift};
  if constexpr (State::kOffset != 0.0f) {
    // A reference that has the offset is off by up to 0.75 to_log2: of coarse scores it is taken off these.
    constexpr float kCoarse = 1.0f / 128;
    const bool is_coarse = to_log2 > kCoarse;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (state.is_large(half)) continue;
      if (!is_coarse) reference[half] = fmaf(State::kOffset, to_log2, reference[half]);
      if (is_coarse) {
#pragma unroll
        for (int i = 2 * half; i < kScoreCount; i += 4) {
          scores[i] -= State::kOffset;
          scores[i + 1] -= State::kOffset;
        }
      }
    }
  }
  auto block_at = [](int at) {  // both of a group, one after the other
    return at % 2 == 0 ? Order::low_block(at / 2) : Order::high_block(at / 2);
  };
  auto exponential = [&](int half, int at) {
    float* s = &scores[4 * block_at(at) + 2 * half];
    if (at > 0 && at % kLinked == 0)
      reference[half] = fmaf(scores[4 * block_at(at - kLinked) + 2 * half], zero, reference[half]);
#pragma unroll
    for (int i = 0; i < 2; ++i) s[i] = fmaf(s[i], to_log2, -reference[half]);
    const bool by_pair = kByPairs && at % 4 == 3;
    if (by_pair) exp2_pair(s[0], s[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!by_pair) s[i] = exp2_approx(s[i]);
      if constexpr (!kCounts) sum[half][i] = at == 0 ? s[i] : sum[half][i] + s[i];
    }
  };
  auto pack = [&](int half, int group) {
    const float* low = &scores[4 * Order::low_block(group) + 2 * half];
    const float* high = &scores[4 * Order::high_block(group) + 2 * half];
    uint32_t word = pack2_e4m3(low[0], low[1]) | uint32_t{pack2_e4m3(high[0], high[1])} << 16;
    probs[group / 2 * 4 + group % 2 * 2 + half] = Order::arrange(word);
  };
#pragma unroll
  for (int at = 0; at < kBlocks; ++at) exponential(0, at);
  order_after(scores[4 * block_at(kBlocks - 1)]);
  join(rescale, moves);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    exponential(1, 2 * group);
    exponential(1, 2 * group + 1);
    pack(0, group);
    if (group > 0) pack(1, group - 1);
  }
  pack(1, kGroups - 1);
  if constexpr (!kCounts) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      state.sum[half] = fmaf(state.sum[half], rescale[half], sum[half][0] + sum[half][1]);
  }
}

}  // namespace cuattn
