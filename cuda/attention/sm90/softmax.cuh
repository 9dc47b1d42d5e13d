// SPDX-License-Identifier: Apache-2.0
// Online softmax of a wgmma accumulator: one step of forward.cuh. Source: FlashAttention-2,
// arXiv:2307.08691, algorithm 1; that O need not follow each new maximum: FlashAttention-4,
// arXiv:2603.05451.
#pragma once

#include "cuattn/device/math.cuh"
#include "cuattn/device/mma_sm90.cuh"

namespace cuattn {

// The state of a thread's two rows (lane / 4 and lane / 4 + 8 of a warp's 16). Exponents are
// relative to a maximum that may lag behind: it stays until one reaches kSlack, for P up to 2^8 is
// as exact as P up to 1.
//
// An exponent is score * to_log2 - reference, one FFMA. The reference is rounded, so that the
// exponent of the maximum itself is off by half a unit in its last place: 2 below 2^26, and beyond
// it soon more than a float16 holds. A row with such a reference is marked, looked at in every
// step, and its scores become differences first. How it is marked costs the loop least:
//   identity   a negative limit of the size of the reference; the reference is 0, with its sign
//   scored     a limit that is NaN; in the loop 0 takes the place of the reference
// Rows whose scores are bounded have a limit of infinity: their reference is known, and stays.
//
// kSlackBits: a P that becomes e4m3 has less room above 1 (float8.cuh). kScoresAt: what scores have more
// than they are, the reference not: their exponent is (score - kScoresAt) * to_log2 - reference. Of a
// large reference the differences have not.
template <ScoreKind kScore, int kSlackBits = 8, int kScoresAt = 0,
          int kLargeBits = kSlackBits < 8 ? 24 : 26>
struct Sm90Softmax {
  static constexpr float kOffset = kScoresAt;
  static constexpr bool kScored = kScore == ScoreKind::scored;
  static constexpr float kSlack = kSlackBits;
  static constexpr float kLarge = 1 << kLargeBits;     // see is_large_reference
  static constexpr float kUnseen = -3.4028234664e38f;  // finite: -inf - -inf is NaN
  float reference[2] = {kUnseen, kUnseen};             // in base 2
  float limit[2] = {kUnseen,
                    kUnseen};   // of the scores: from there on, an exponent is kSlack or more
  float sum[2] = {0.0f, 0.0f};  // this lane's share

  __device__ bool is_large(int half) const {
    return kScored ? isnan(limit[half]) : reference[half] == 0.0f && limit[half] < 0.0f;
  }
  // The reference of a row in base 2.
  __device__ float exponent(int half) const {
    return !kScored && is_large(half) ? copysignf(limit[half], reference[half]) : reference[half];
  }
  // Exponents relative to `known` need never be looked at.
  __device__ void settle(float known) {
    reference[0] = reference[1] = known;
    limit[0] = limit[1] = __int_as_float(0x7f800000);
  }
  __device__ bool is_settled() const {
    return __all_sync(0xffffffffu, limit[0] == __int_as_float(0x7f800000));
  }
  // What the FFMA subtracts.
  __device__ float subtrahend(int half) const {
    return kScored && is_large(half) ? 0.0f : reference[half];
  }
};

// Whether a row of the warp may have a score that is not below its limit, and the highest of a
// thread's scores. With kIntegers their bits are compared as integers, whose maximum takes three
// operands where a float's takes two. It is right for floats that are not negative: whoever needs
// the highest itself asks for a second look.
template <bool kIntegers, class State, int kScoreCount>
__device__ __forceinline__ bool any_outgrown(const State& state, float (&highest)[2],
                                             const float (&scores)[kScoreCount]) {
  auto larger = [](float x, float y) {
    return kIntegers ? __int_as_float(max(__float_as_int(x), __float_as_int(y))) : fmaxf(x, y);
  };
  bool outgrown = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float chain[2];  // half the latency of one
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* x = &scores[2 * half + i];
      chain[i] = larger(x[0], x[4]);
#pragma unroll
      for (int at = 8; at < kScoreCount; at += 8)
        chain[i] = larger(larger(chain[i], x[at]), x[at + 4]);
    }
    highest[half] = larger(chain[0], chain[1]);
    float limit = state.limit[half];
    bool looks = kIntegers ? limit < 0.0f : !state.kScored && state.is_large(half);
    outgrown |= !(highest[half] < limit) | looks;  // without a branch
  }
  return __any_sync(0xffffffffu, outgrown);
}

// Moves the references that rows have outgrown; whether any row of the warp has. What was summed up
// before is to be multiplied by `rescale`. Each row is decided for itself: its bits do not depend
// on its neighbours.
template <class State>
__device__ __forceinline__ bool move_references(State& state, float (&rescale)[2],
                                                const float (&highest)[2], float to_log2) {
  using namespace device;
  bool moves = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = quad_max(highest[half]), limit = state.limit[half];
    float reference = finite_product(max - State::kOffset, to_log2),
          rise = reference - state.exponent(half);
    if (state.is_large(half) ? !(rise > state.kSlack) : !(max >= limit)) continue;
    rescale[half] = exp2_approx(-rise);
    bool large = fabsf(reference) > State::kLarge;
    limit = fmaf(state.kSlack, rcp_approx(to_log2), max);
    if constexpr (State::kScored) {
      state.reference[half] = reference;
      state.limit[half] = large ? nanf("") : limit;
    } else {
      state.reference[half] = large ? copysignf(0.0f, reference) : reference;
      state.limit[half] = large ? -fabsf(reference) : limit;
    }
    moves = true;
  }
  return __any_sync(0xffffffffu, moves);
}

// Scores of rows with a large reference become differences.
template <class State, int kScoreCount>
__device__ __forceinline__ void center_large(const State& state, float (&scores)[kScoreCount],
                                             float to_log2) {
  using namespace device;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool large = state.is_large(half);
    const float reference = state.exponent(half);
    auto center = [&](float& score) {
      score = (finite_product(score - State::kOffset, to_log2) - reference) * rcp_approx(to_log2);
    };
#pragma unroll
    for (int i = 2 * half; i < kScoreCount; i += 4) {
      // Note: a branch a pair, for all of them at once take registers that are not there. With
      // score options the compiler makes one of them all the same, unless the warp is asked.
      if (state.kScored && !__any_sync(0xffffffffu, large)) break;
      if (!large) continue;
      center(scores[i]);
      center(scores[i + 1]);
    }
  }
}

// Scores become P, relative to the rows' references, and O follows a reference that moves once
// `pv_done` has waited for the product that still reads the old P. `begun` is called when it is
// known whether one does. Exponentials take time (16 a clock and SM), every instruction takes
// power, which limits the chip: what is rarely needed is branched around.
//
//   both rows: outgrown? | row 0: exp . . . . . . | row 1: exp . . . . . . . . | pack
//                        |                        | O moves? pack row 0 . . .  |
//
// Left alone, the compiler multiplies all of a row's exponents before its first exponential: the
// unit that computes them stands idle. So some values are made to wait for others:
// x = fmaf(awaited, zero, x), with a zero that only we know.
//
// kLooksOnce: of a first tile, whose rows have no reference yet, so that the first look always asks for
// the second.
template <DType kType, bool kLooksOnce = false, ScoreKind kScore, int kScoreCount, int kOutCount,
          class Begun, class Wait>
__device__ __forceinline__ void softmax_step(Sm90Softmax<kScore>& state,
                                             float (&scores)[kScoreCount],
                                             uint32_t (&probs)[kScoreCount / 2],
                                             float (&out)[kOutCount], float to_log2, float zero,
                                             Begun begun, Wait pv_done) {
  using namespace device;
  constexpr int kBlocks = kScoreCount / 4;     // of 8 keys
  constexpr int kLinked = 4;                   // blocks
  constexpr bool kIntegers = kOutCount <= 64;  // wider: no register is left for a second look
  float rescale[2] = {1.0f, 1.0f}, sum[2][2], highest[2];
  constexpr bool kLooksTwice = kIntegers && !kLooksOnce;
  bool moves = any_outgrown<kLooksTwice>(state, highest, scores);
  if (kLooksTwice && moves) moves = any_outgrown<false>(state, highest, scores);
  if (moves) {
    moves = move_references(state, rescale, highest, to_log2);
    if (state.kScored || __any_sync(0xffffffffu, state.is_large(0) || state.is_large(1)))
      center_large(state, scores, to_log2);
  }
  begun();
  float reference[2] = {state.subtrahend(0), state.subtrahend(1)};
  auto exponential = [&](int half, int block) {
    float* s = &scores[4 * block + 2 * half];
    if (block > 0 && block % kLinked == 0)
      reference[half] = fmaf(s[-4 * kLinked], zero, reference[half]);
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
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) exponential(0, block);
  if (kOutCount <= 64)  // else the wait comes before all exponentials; wider: no register is left
    order_after(scores[4 * (kBlocks - 1)]);
  if (pv_done() && moves) {
#pragma unroll
    for (int i = 0; i < kOutCount; ++i) out[i] *= rescale[i >> 1 & 1];
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    exponential(1, block);
    pack(0, block);
    if (block > 0) pack(1, block - 1);
  }
  pack(1, kBlocks - 1);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    state.sum[half] = fmaf(state.sum[half], rescale[half], sum[half][0] + sum[half][1]);
}

// Scores under a softcap and no other option: they are bounded, and a bfloat16 P holds what such bounds
// leave. So rows have a reference before their first score, and no maximum is looked for.
struct SoftcapAlone {
  float in;       // tanh is taken of a dot product times this
  float to_log2;  // a tanh times this is an exponent in base 2

  template <class Mod>
  __device__ explicit SoftcapAlone(const Mod& mod)
      : in(mod.scale * mod.inv_softcap), to_log2(mod.softcap * device::kLog2e) {}
  template <class Mod>
  __device__ bool bounds(const Mod& mod) const {
    constexpr float kMost = 73.0f;  // P from 2^-82 to 2^64
    return to_log2 > 0.0f && to_log2 <= kMost && mod.slope == 0.0f && mod.bias == nullptr;
  }
  __device__ float reference() const { return fmaxf(0.0f, to_log2 - 64.0f); }
};

// softmax_step of a tile that no mask cuts, of rows that are settled. The tanh of some blocks stand before
// the exponentials of others, so that the MUFU, which computes both, has work.
template <DType kType, ScoreKind kScore, int kScoreCount, class Wait>
__device__ __forceinline__ void capped_step(Sm90Softmax<kScore>& state,
                                            float (&scores)[kScoreCount],
                                            uint32_t (&probs)[kScoreCount / 2],
                                            const SoftcapAlone& cap, float zero, Wait pv_done) {
  using namespace device;
  constexpr int kBlocks = kScoreCount / 4;  // of 8 keys
  constexpr int kAhead = 2, kLinked = 4;    // blocks
  float sum[2][2], in[2] = {cap.in, cap.in};
  auto capped = [&](int half, int block) {
    float* s = &scores[4 * block + 2 * half];
    if (block >= kLinked) in[half] = fmaf(s[-4 * kLinked], zero, in[half]);
#pragma unroll
    for (int i = 0; i < 2; ++i) s[i] = tanh_approx(s[i] * in[half]);
  };
  auto exponential = [&](int half, int block) {
    float* s = &scores[4 * block + 2 * half];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[i] = exp2_approx(fmaf(s[i], cap.to_log2, -state.reference[half]));
      sum[half][i] = block == 0 ? s[i] : sum[half][i] + s[i];
    }
  };
  auto pack = [&](int half, int block) {
    const float* s = &scores[4 * block + 2 * half];
    probs[2 * block + half] = pack2<kType>(s[0], s[1]);
  };
#pragma unroll
  for (int block = 0; block < kBlocks + kAhead; ++block) {
    if (block < kBlocks) capped(0, block);
    if (block >= kAhead) exponential(0, block - kAhead);
  }
  order_after(scores[4 * (kBlocks - 1)]);
  pv_done();
#pragma unroll
  for (int block = 0; block < kBlocks + kAhead; ++block) {
    if (block < kBlocks) capped(1, block);
    if (block < kAhead) continue;
    exponential(1, block - kAhead);
    pack(0, block - kAhead);
    pack(1, block - kAhead);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) state.sum[half] += sum[half][0] + sum[half][1];
}

}  // namespace cuattn
