// SPDX-License-Identifier: Apache-2.0
// Paged attention on Hopper: what the math warps know of their rows, and the softmax of a tile of
// keys. Source of the idea that spares the warps meetings: FlashAttention-4. Next: decode.cuh.
#pragma once

#include "cuda/paged/sm90/copy.cuh"

namespace cuattn {

template <DType kType, int kHeadDim, int kRows, ScoreKind kScore, SplitUse kUse>
struct PagedSm90Softmax : PagedSm90Tiles<kType, kHeadDim, kRows, kUse> {
  using Tiles = PagedSm90Tiles<kType, kHeadDim, kRows, kUse>;
  using Tiles::kMathThreads, Tiles::kPanels;
  using typename Tiles::Shared;
  static constexpr int kCount = kRows / 2;    // accumulators of 64 keys (S) or 64 columns (O)
  static constexpr int kColumns = kRows / 4;  // unit rows that a thread holds, in columns of S^T
  // Parts have two tiles or so: every tile raises their references, whoever weighs them.
  static constexpr bool kExactMaxima = kUse != SplitUse::whole;

  // What is known of a unit row, kept in shared memory: read for tiles with an edge, or per score.
  struct alignas(16) RowFacts {
    float slope;       // ALiBi
    int32_t position;  // of the query among the keys
    KeyRange visible;
  };

  // A thread of the math warps holds keys `key` and `key` + 8 of a tile (rows of S^T), or as many
  // columns of 64 of the output (rows of O^T), for kColumns unit rows.
  struct Lane {
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int key = warp * 16 + lane / 4;
    __device__ int row(int c) const { return c / 2 * 8 + lane % 4 * 2 + c % 2; }
  };
  static constexpr CUATTN_HOST_DEVICE int at(int c, int half) {  // in an accumulator
    return c / 2 * 4 + c % 2 + half * 2;
  }
  static __device__ __forceinline__ void sync_math() {
    device::named_barrier_sync(1, kMathThreads);
  }

  static __device__ __forceinline__ RowFacts facts_of(const Shared& shared, int row) {
    return __builtin_bit_cast(RowFacts, device::load_shared16(shared.facts + row * 16));
  }

  // Over the 16 keys or columns of a warp: the eight lanes that share unit rows.
  template <class Reduce>
  static __device__ __forceinline__ float over_warp(float x, Reduce reduce) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      x = reduce(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
  }
  // What four warps found for `row`, after sync_math.
  static __device__ __forceinline__ float4 of_warps(uint32_t table, int row) {
    return __builtin_bit_cast(float4, device::load_shared16(table + row * 16));
  }

  // The exponentials of a row are relative to `reference`, which is not its maximum but near it: as
  // long as no score is above it by more than `slack`, nothing has to be exchanged or rescaled. So
  // warps meet once a tile. Source of the idea: FlashAttention-4.
  // What follows from a reference is kept. Found for each tile, it cost the loops of the copy warps
  // their uniform registers, and decode from L2 8 % (docs/notes/20261129-float8-queries-and-shared-blocks.md).
  struct Softmax {
    static constexpr float kSlackLog2 = 8.0f;  // exponentials up to 256

    float reference[kColumns], sum[kColumns];  // sum: of this thread's keys
    float limit[kColumns];                     // scores above it raise the reference
    float center[kColumns], base[kColumns];    // the reference, or 0, and the rest in base 2
    float to_log2;                             // a score times this is an exponent in base 2
    float slack;
    __device__ explicit Softmax(const PagedParams& p)
        : to_log2(kScore == ScoreKind::scored ? device::kLog2e : p.scores.scale * device::kLog2e) {
      // V2 keeps the maxima themselves.
      slack = p.exp_sums != nullptr ? 0.0f : fminf(kSlackLog2 / to_log2, 1e30f);
      clear();
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        refer(c, device::negative_infinity());
        sum[c] = 0.0f;
      }
    }
    // Scores of column `c` are relative to `to`. A row that has seen nothing has -inf; 0 in its
    // place keeps -inf - (-inf) out of the exponent.
    __device__ __forceinline__ void refer(int c, float to) {
      float log2 = to == device::negative_infinity() ? 0.0f : device::finite_product(to, to_log2);
      bool large = device::is_large_reference(log2);
      reference[c] = to;
      limit[c] = large ? to : to + slack;
      center[c] = large ? to : 0.0f;
      base[c] = large ? 0.0f : log2;
    }
    __device__ __forceinline__ float exponent(int c, float score) const {
      return fmaf(score - center[c], to_log2, -base[c]);
    }
  };

  // Scores of a tile become what the softmax sees. The keys are key + 64 j for tile j.
  static __device__ __forceinline__ void score_tile(const PagedParams& p, const Shared& shared,
                                                    const Lane& me, int32_t first_key, bool edge,
                                                    float (&scores)[kCount]) {
    if (kScore == ScoreKind::identity && !edge) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      RowFacts row = facts_of(shared, me.row(c));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[at(c, half)];
        int32_t key = first_key + me.key + half * 8;
        if constexpr (kScore == ScoreKind::scored) {
          score *= p.scores.scale;
          if (p.scores.softcap > 0.0f)
            score = p.scores.softcap *
                    device::capped<kType>(score, p.scores.softcap, p.scores.inv_softcap);
          score = fmaf(-row.slope, fabsf(static_cast<float>(row.position - key)), score);
        }
        bool seen = key >= row.visible.begin && key < row.visible.end;
        if (edge && !seen) score = device::negative_infinity();
      }
    }
  }

  // Exponentials of a tile relative to the references go to shared memory. `sums`: theirs. Whether
  // some score of this thread is too large for that.
  static __device__ __forceinline__ bool weigh_tile(const Shared& shared, const Lane& me,
                                                    const Softmax& state,
                                                    const float (&scores)[kCount],
                                                    float (&sums)[kColumns]) {
    using namespace device;
    float weights[kCount];
    bool exceeds = false;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      sums[c] = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float score = scores[at(c, half)];
        exceeds |= score > state.limit[c];
        weights[at(c, half)] = exp2_approx(state.exponent(c, score));
        sums[c] += weights[at(c, half)];
      }
    }
    // P^T of 16 keys and 8 rows at a time, transposed on the way: rows of P, keys contiguous.
#pragma unroll
    for (int block = 0; block < kRows / 8; ++block) {
      int row = block * 8 + me.lane % 8, chunk = me.warp * 2 + me.lane / 8 % 2;
      const float* w = weights + block * 4;
      stmatrix_x2_trans(shared.p + swizzled<128>(row, chunk), pack2<kType>(w[0], w[1]),
                        pack2<kType>(w[2], w[3]));
    }
    return exceeds;
  }

  // The references become the maxima of all four warps; O and the sums are brought to them.
  static __device__ __forceinline__ void raise_references(const Shared& shared, const Lane& me,
                                                          Softmax& state,
                                                          const float (&scores)[kCount],
                                                          float (&out)[kPanels][kCount]) {
    using namespace device;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float max = over_warp(fmaxf(scores[at(c, 0)], scores[at(c, 1)]), fmaxf);
      if (me.lane < 4)
        store_shared(shared.maxima + me.row(c) * 16 + me.warp * 4, __float_as_uint(max));
    }
    sync_math();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float4 of = of_warps(shared.maxima, me.row(c));
      float max = fmaxf(fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w)), state.reference[c]);
      float safe = max == negative_infinity() ? 0.0f : max;
      float rescale = exp2_approx((state.reference[c] - safe) * state.to_log2);
      state.refer(c, max);
      state.sum[c] = __fmul_rn(state.sum[c], rescale);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) out[panel][at(c, half)] *= rescale;
      }
    }
  }

  // The sums of the four warps meet; one thread a row asks for the references, too.
  template <bool kReferences = true>
  static __device__ __forceinline__ void share_sums(const Shared& shared, const Lane& me,
                                                    const Softmax& state) {
    using namespace device;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float sum = over_warp(state.sum[c], [](float a, float b) { return a + b; });
      uint32_t slot = me.row(c) * 16 + me.warp * 4;
      if (me.lane < 4) store_shared(shared.sums + slot, __float_as_uint(sum));
      if (kReferences && me.lane < 4)
        store_shared(shared.maxima + slot, __float_as_uint(state.reference[c]));
    }
    sync_math();
  }
  // The reference (base 2) of a row, and its sum.
  static __device__ __forceinline__ float2 row_sum(const Shared& shared, float reference,
                                                   float to_log2, int row) {
    float4 sums = of_warps(shared.sums, row);
    return {device::finite_product(reference, to_log2), (sums.x + sums.y) + (sums.z + sums.w)};
  }
  static __device__ __forceinline__ float2 row_sum(const Shared& shared, const Softmax& state,
                                                   int row) {
    return row_sum(shared, of_warps(shared.maxima, row).x, state.to_log2, row);
  }
};

}  // namespace cuattn
