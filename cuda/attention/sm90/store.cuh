// SPDX-License-Identifier: Apache-2.0
// How O leaves forward.cuh and float8.cuh: rows of a warp, from the accumulators of wgmma.
#pragma once

#include "cuattn/device/math.cuh"
#include "cuattn/device/mma_sm90.cuh"
#include "cuda/attention/sm90/schedule.cuh"
#include "cuda/attention/sm90/softmax.cuh"

namespace cuattn {

struct Sm90Maps {
  device::TensorMap q, k, v, o, bias;
};

// `kRows`: of what carries O to the TMA (`kThroughSmem`): the Q tile, or in float8.cuh a place of its own.
// `kFunctor`: of a kernel that NVRTC compiles for a functor, whose rows are not packed; what does not
// leave so, the end of a sequence, is stored by less code.
template <DType kType, ScoreKind kScore, int kHeadDimV, int kRows, bool kThroughSmem,
          bool kFunctor = false>
struct StoreSm90 {
  static constexpr int kOutCount = kHeadDimV / 2;  // of a thread
  static constexpr int kPanelsV = (kHeadDimV + 63) / 64;

  // The factor of O of a row, and its lse. A dead row saw no key.
  struct RowEnd {
    float factor, lse;
    bool alive;
  };
  // Ends both rows side by side, step by step, because latency counts.
  template <class State>
  static __device__ __forceinline__ void finish_rows(RowEnd (&end)[2], const AttentionParams& p,
                                                     const Sm90Work& w, const Sm90Row (&rows)[2],
                                                     const State& state) {
    using namespace device;
    float sum[2], max[2], factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = quad_sum(state.sum[half]);
      max[half] = sum[half] == 0.0f ? negative_infinity() : state.exponent(half);
      factor[half] = 1.0f;
    }
    if (p.scores.sinks != nullptr &&
        w.split == 0) {  // one more logit in the denominator, without value
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sink = sink_in_base2(
            p.scores.sinks[min(rows[half].head, p.num_heads_q - 1) * p.scores.sinks_stride]);
        float larger = fmaxf(max[half], sink);
        float reference = larger == negative_infinity() ? 0.0f : larger;
        factor[half] = exp2_approx(max[half] - reference);
        sum[half] = fmaf(sum[half], factor[half], exp2_approx(sink - reference));
        max[half] = larger;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      end[half].alive = rows[half].token < w.queries.used && sum[half] != 0.0f;
      float lse = (max[half] + log2_approx(sum[half])) * kLn2;
      end[half].lse = end[half].alive ? lse : negative_infinity();
      end[half].factor = end[half].alive ? factor[half] * rcp_approx(sum[half]) : 0.0f;
      if constexpr (kScore == ScoreKind::dropped) end[half].factor *= p.dropout.factor();
    }
  }
  // Their O holds anything, even NaN.
  static __device__ __forceinline__ void clear_dead(float (&out)[kOutCount],
                                                    const RowEnd (&end)[2]) {
    if (__all_sync(0xffffffffu, end[0].alive && end[1].alive)) return;
#pragma unroll
    for (int i = 0; i < kOutCount; ++i) {
      if (!end[i >> 1 & 1].alive) out[i] = 0.0f;
    }
  }
  static __device__ __forceinline__ uint32_t packed(const float* o, float factor) {
    return device::pack2<kType>(o[0] * factor, o[1] * factor);
  }
  static constexpr int kBlocks = kOutCount / 4;  // of 8 columns

  // O of a warp's 16 rows through its rows of shared memory (`smem`), which nobody reads any more: the
  // TMA takes it from there. A row's 16-byte chunks are permuted by its number.
  template <class Maps>
  static __device__ __forceinline__ void store_boxes(const AttentionParams& p, const Maps& maps,
                                                     const Sm90Work& w, int32_t first_row,
                                                     const float (&out)[kOutCount],
                                                     const RowEnd (&end)[2], uint32_t smem) {
    int lane = threadIdx.x % 32, row = lane % 16, right = lane / 16;
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      const float* o = &out[4 * block];
      device::stmatrix_x4(
          smem + block / 8 * kRows * 128 + row * 128 + ((block % 8 + right) ^ row % 8) * 16,
          packed(o, end[0].factor), packed(o + 2, end[1].factor), packed(o + 4, end[0].factor),
          packed(o + 6, end[1].factor));
    }
    device::async_proxy_fence();
    __syncwarp();
    if (lane != 0) return;
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel) {
      device::tma_store(&maps.o, smem + panel * kRows * 128, panel * 64,
                        w.queries.start + first_row, w.head, p.cu_seqlens_q ? 0 : w.batch, 0);
    }
    device::tma_store_commit();
  }

  // O of a row straight from the accumulators, in float32 where it is a part or wanted so. Four blocks of 8 columns
  // at a time: a quad turns its 4 x 4 words, so that each lane holds all columns of one block.
  static __device__ __forceinline__ void store_row(const AttentionParams& p, const Sm90Schedule& s,
                                                   const Sm90Work& w, const Sm90Row& row, int half,
                                                   const float (&out)[kOutCount], float factor) {
    using namespace device;
    int lane = threadIdx.x % 32;
    if (s.stores_wide) {
      float* to = opaque(row.wide(p, s, w) + 2 * (lane % 4));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float* o = &out[4 * block + 2 * half];
        if (row.stored && block * 8 < p.head_dim_v)
          *reinterpret_cast<float2*>(to + 8 * block) = {o[0] * factor, o[1] * factor};
      }
      return;
    }
    if constexpr (kFunctor) {
      char* to = opaque(static_cast<char*>(p.out) + 2 * row.out(p, w) + 4 * (lane % 4));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (row.stored && block * 8 < p.head_dim_v)
          *reinterpret_cast<uint32_t*>(to + 16 * block) =
              packed(&out[4 * block + 2 * half], factor);
      }
      return;
    }
    char* to = opaque(static_cast<char*>(p.out) + 2 * row.out(p, w) + 16 * (lane % 4));
    int left = row.stored ? p.head_dim_v - 8 * (lane % 4) : 0;
#pragma unroll
    for (int block = 0; block < kBlocks; block += 4) {
      const float* o = &out[4 * block + 2 * half];
      uint32_t words[4] = {packed(o, factor), packed(o + 4, factor), packed(o + 8, factor),
                           packed(o + 12, factor)};
      quad_transpose(words);
      if (block * 8 < left)
        *reinterpret_cast<uint4*>(to + 16 * block) = {words[0], words[1], words[2], words[3]};
    }
  }

  // A warp's 16 rows from `first_row` on. `smem`: its part of what carries O.
  template <class Maps, class State>
  static __device__ __forceinline__ void store(const AttentionParams& p, const Sm90Schedule& s,
                                               const Maps& maps, const Sm90Work& w,
                                               int32_t first_row, float (&out)[kOutCount],
                                               const State& state, uint32_t smem) {
    int lane = threadIdx.x % 32;
    const Sm90Row rows[2] = {Sm90Row(p, s, w, first_row + lane / 4, !kFunctor),
                             Sm90Row(p, s, w, first_row + 8 + lane / 4, !kFunctor)};
    RowEnd end[2];
    finish_rows(end, p, w, rows, state);
    clear_dead(out, end);
    bool in_boxes = kThroughSmem && s.stores_boxes && first_row + 16 <= w.queries.stored;
    if constexpr (kThroughSmem) {
      if (in_boxes) store_boxes(p, maps, w, first_row, out, end, smem);
    }
    if (!in_boxes) {
      store_row(p, s, w, rows[0], 0, out, end[0].factor);
      store_row(p, s, w, rows[1], 1, out, end[1].factor);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 != 0 || !rows[half].stored) continue;
      if (s.splits > 1) {
        s.part_lse[rows[half].part(p, w)] = end[half].lse;
      } else if (p.lse != nullptr) {
        *rows[half].lse(p, w) = end[half].lse;
      }
    }
  }

  // Rows that see no key: zeros, and an lse of -inf (of the sink, if there is one).
  static __device__ __forceinline__ void store_empty(const AttentionParams& p,
                                                     const Sm90Schedule& s, const Sm90Work& w,
                                                     int group) {
    int first = w.row0 + group * 64;
    for (int i = threadIdx.x % 128; i < 64; i += 128) {
      Sm90Row row(p, s, w, first + i, !kFunctor);
      if (!row.stored) continue;
      float lse = device::negative_infinity();
      if (p.scores.sinks != nullptr && w.split == 0 && row.token < w.queries.used)
        lse = finite_sink(p.scores.sinks[row.head * p.scores.sinks_stride]);
      if (s.splits > 1) {
        s.part_lse[row.part(p, w)] = lse;
      } else if (p.lse != nullptr) {
        *row.lse(p, w) = lse;
      }
    }
    if (s.splits > 1 && (p.scores.sinks == nullptr || w.split > 0))
      return;  // without weight: not read
    int chunks = p.head_dim_v / 8;
    auto clear = [&](int i) {
      Sm90Row row(p, s, w, first + i / chunks, !kFunctor);
      if (!row.stored) return;
      if (s.stores_wide) {
        float4* to = reinterpret_cast<float4*>(row.wide(p, s, w) + i % chunks * 8);
        to[0] = to[1] = float4{0.0f, 0.0f, 0.0f, 0.0f};
      } else {
        uint16_t* to = static_cast<uint16_t*>(p.out) + row.out(p, w);
        reinterpret_cast<uint4*>(to)[i % chunks] = uint4{0, 0, 0, 0};
      }
    };
    if constexpr (kFunctor) {
#pragma unroll 1
      for (int i = threadIdx.x % 128; i < 64 * chunks; i += 128) clear(i);
    } else {
      for (int i = threadIdx.x % 128; i < 64 * chunks; i += 128) clear(i);
    }
  }

  // Is there more work? Rows without keys are answered at once; other work stays in its slot, to be
  // taken when the registers of the last one are free.
  template <class Shared>
  static __device__ __forceinline__ bool find_more(const AttentionParams& p, const Sm90Schedule& s,
                                                   const Shared& shared, int group,
                                                   device::Ring<2>& slot) {
    using namespace device;
    while (true) {
      barrier_wait(shared.work_full(slot.stage()), slot.parity());
      Sm90Work w;
      load_shared(w, shared.work(slot.stage()));
      if (w.kind == Sm90Work::kFull) return true;
      if (w.kind == Sm90Work::kNone) return false;
      store_empty(p, s, w, group);
      __syncwarp();  // every lane has read it
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.work_empty(slot.stage()));
      slot.next();
    }
  }
};

}  // namespace cuattn
