// SPDX-License-Identifier: Apache-2.0
// mla_decode on Hopper (sm_90a): 64 rows (queries x heads) of one sequence, latents of 512 columns
// and 64 of rope, 16 bits. Keys come in blocks of 64. Two warpgroups copy the blocks, make their
// scores and weights P, in turns; two have half of the columns of O each. Who issues a row of
// products waits for nearly all of them: the softmax of a block has products of another beside it
// because another warpgroup has them. Sources: FlashMLA (O in halves), FlashAttention-3 (turns),
// FlashAttention-4 (references that hardly move); PTX ISA, wgmma. Storage and copies: copy.cuh; masks:
// masks.cuh.
// Tasks, rows and results: device/paged/tasks.cuh. Next: paged/combine.cu.
//
//   even    | S0 | softmax, P0 |             S2          | softmax, P2 | ...
//   odd     |    |     S1      | softmax, P1 |           | S3          | ...
//   left    |                  | O_L += P0 V0            | O_L += P1 V1 | ...
//   right   |                  | O_R += P0 V0            | O_R += P1 V1 | ...
#pragma once

#include "cuda/host/launch.h"
#include "cuda/mla/sm90/masks.cuh"

namespace cuattn {

template <DType kType, MlaSm90Keys kKeysBy>
struct MlaSm90 : MlaSm90Masks {
  // 1. Types and sizes
  using T = device::Element<kType>;
  using ScoreMma = device::Wgmma<kType, kKeys>;
  using OutMma = device::Wgmma<kType, kOutColumns>;
  static constexpr int kKeySteps = kKeys / 16;  // k16 of O
  static constexpr int kOutBlocks = kOutColumns / 8;
  static constexpr float kSlackLog2 = 8.0f;                        // exponentials up to 256
  static constexpr bool kTokens = kKeysBy != MlaSm90Keys::blocks;  // one by one

  // Of a warpgroup that makes scores.
  struct Scores {
    float products[kKeyBlocks * 4];
    float reference[2], sum[2];  // base 2; sum: this thread's share, of its blocks
    Cursor at;
    int32_t first, piece;  // of its next block: the first key, and where this lane's piece lies
    Tokens tokens;
  };

  // 2. Rows of Q
  static __device__ __forceinline__ const uint16_t* query(const PagedParams& p,
                                                          const device::KeyTask& task,
                                                          const device::UnitRow& row, bool rope) {
    const Strides& s = rope ? p.latent.q_strides : p.q_strides;
    return static_cast<const uint16_t*>(rope ? p.latent.q_rope : p.q) +
           row_offset(p, s, task.b, row.place, row.head);
  }

  static __device__ __forceinline__ void sync_scores() { device::named_barrier_sync(1, 256); }

  // Panels of Q on their way to shared memory; padding rows are zeros.
  static __device__ __forceinline__ void fetch_rows(const PagedParams& p,
                                                    const device::KeyTask& task,
                                                    const Shared& shared) {
    sync_scores();  // those of the task before are read
    const int row = threadIdx.x / 4, first = threadIdx.x % 4 * 2;  // a quarter of a panel's row
    device::UnitRow unit = device::unit_row(p, task.b, 0, task.row0, row);
    const uint16_t* latent = query(p, task, unit, false);
    const uint16_t* rope = query(p, task, unit, true);
#pragma unroll
    for (int panel = 0; panel <= kPanels; ++panel) {
      const uint16_t* from = panel == kPanels ? rope : latent + panel * 64;
#pragma unroll
      for (int i = first; i < first + 2; ++i) {
        device::cp_async16(shared.q + panel * kRowPanelBytes + device::swizzled<128>(row, i),
                           from + i * 8, unit.valid);
      }
    }
    device::cp_async_commit();
  }
  static __device__ __forceinline__ void await_rows() {
    device::cp_async_wait<0>();
    device::async_proxy_fence();
    sync_scores();
  }

  // 3. Scores
  // `part`: a constant.
  static __device__ __forceinline__ void await_keys(const Shared& shared, const Cursor& at,
                                                    int part) {
    if constexpr (kTokens) {
      if (part == 0) {
        device::cp_async_wait<1>();  // of packed ones all are there but rope
      } else {
        device::cp_async_wait<0>();
      }
      device::async_proxy_fence();
      device::named_barrier_sync(9 + at.stage, 128);
    } else {
      device::barrier_wait(shared.full(at.stage, part), at.parity);
    }
  }
  static __device__ __forceinline__ void multiply_keys(const Shared& shared, Scores& state) {
    using namespace device;
    int32_t stage = state.at.stage;
    uint64_t k = wgmma_descriptor(opaque(shared.stage(stage)), 0);
    uint64_t q = wgmma_descriptor(opaque(shared.q), 0);
    pin(state.products);
#pragma unroll
    for (int step = 0; step < (kPanels + 1) * 4; ++step) {
      if (step % (kPartPanels * 4) == 0 && step < kPanels * 4) {
        await_keys(shared, state.at, step / (kPartPanels * 4));
        wgmma_fence();
      }
      ScoreMma::template ss<0>(state.products,
                               advance(q, step / 4 * kRowPanelBytes + step % 4 * 32),
                               advance(k, step / 4 * kPanelBytes + step % 4 * 32), step != 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(state.products);
  }

  // Dot products become scores in base 2. `to_log2`: of a plain scale.
  static __device__ __forceinline__ void score_keys(const PagedParams& p, float to_log2,
                                                    Block& scores) {
    const ScoreParams& s = p.scores;
    if (s.scored()) {
#pragma unroll
      for (int i = 0; i < kKeyBlocks * 4; ++i) {
        float score = scores[i] * s.scale;
        if (s.softcap > 0.0f)
          score = s.softcap * device::capped<kType>(score, s.softcap, s.inv_softcap);
        scores[i] = device::finite_product(score, device::kLog2e);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kKeyBlocks * 4; ++i)
        scores[i] = device::finite_product(scores[i], to_log2);
    }
  }

  // References move only where a score is far above them; by `factor` O shrinks then. The two
  // warpgroups move them in turns, each on from where the other left them.
  static __device__ __forceinline__ void refer(const Shared& shared, const Lane& me, int group,
                                               bool is_first, Scores& state, float (&factor)[2]) {
    using namespace device;
    float largest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = negative_infinity();
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        const float* scores = state.products + 4 * n + 2 * half;
        largest[half] = fmaxf(largest[half], fmaxf(scores[0], scores[1]));
      }
      largest[half] = quad_max(largest[half]);
    }
    named_barrier_sync(4 + group, 256);
    float before[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      before[half] = __uint_as_float(load_shared4(shared.reference(me.row + 8 * half)));
    __syncwarp();  // four lanes have read what one of them writes
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float old = is_first ? negative_infinity() : before[half], now = old;
      if (largest[half] > old + kSlackLog2) now = largest[half];
      if (me.lane % 4 == 0) store_shared(shared.reference(me.row + 8 * half), __float_as_uint(now));
      // A row that has seen nothing has -inf; 0 in its place keeps -inf - (-inf) out.
      float base = now == negative_infinity() ? 0.0f : now;
      factor[half] = exp2_approx(old - base);
      state.sum[half] *= exp2_approx(state.reference[half] - base);
      state.reference[half] = now;
    }
    named_barrier_arrive(5 - group, 256);
  }

  // Weights of the scores, relative to the references.
  static __device__ __forceinline__ void weigh(Scores& state, uint32_t (&weights)[kKeySteps][4]) {
    using namespace device;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float base = state.reference[half] == negative_infinity() ? 0.0f : state.reference[half];
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        float low = exp2_approx(state.products[4 * n + 2 * half] - base);
        float high = exp2_approx(state.products[4 * n + 2 * half + 1] - base);
        state.sum[half] += low + high;
        weights[n / 2][n % 2 * 2 + half] = pack2<kType>(low, high);
      }
    }
  }

  // P as blocks of 8 rows x 16 bytes, and the factors, for those who have O.
  static __device__ __forceinline__ void publish(const Shared& shared, const Lane& me,
                                                 int32_t stage, const float (&factor)[2],
                                                 const uint32_t (&weights)[kKeySteps][4]) {
    using namespace device;
    uint32_t to =
        shared.weights(stage) + me.lane / 16 * kChunkBytes + (16 * me.warp + me.lane % 16) * 16;
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      const uint32_t (&w)[4] = weights[step];
      stmatrix_x4(to + step * 2 * kChunkBytes, w[0], w[1], w[2], w[3]);
    }
    if (me.lane % 4 < 2) {
      store_shared(shared.factors(stage, me.row + 8 * (me.lane % 2)),
                   __float_as_uint(me.lane % 2 ? factor[1] : factor[0]));
    }
    async_proxy_fence();
    __syncwarp();
    if (me.lane == 0) barrier_arrive(shared.weighed(stage));
  }

  // One block, from its products to the call for the next.
  static __device__ __forceinline__ void add_scores(const PagedParams& p,
                                                    const device::KeyTask& task,
                                                    const Shared& shared, const Lane& me, int group,
                                                    const MlaSm90Maps& maps, float to_log2,
                                                    int32_t key0, Scores& state) {
    multiply_keys(shared, state);
    score_keys(p, to_log2, state.products);
    bool listed = kTokens && has_lists(p), edge = !listed && has_edge(p, task, key0);
    if (edge) mask_scores(p, task, me, key0, state.products);
    if (listed && (state.tokens.there[0] & state.tokens.there[1]) != 0xffffffffu)
      mask_holes(me, state.tokens.there, state.products);
    float factor[2];
    uint32_t weights[kKeySteps][4];
    refer(shared, me, group, key0 == task.begin, state, factor);
    weigh(state, weights);
    // All four warps have their products: the block may be written to.
    device::named_barrier_sync(6 + group, 128);
    int32_t stage = state.at.stage;
    if (edge && !kTokens) clear_keys(task, me, shared.stage(stage), key0);
    publish(shared, me, stage, factor, weights);
    state.at.advance(2);
    ask_next(p, task, shared, maps, state);
  }

  // Brings the next block of this warpgroup, as soon as O has the one before, if the task has one.
  static __device__ __forceinline__ void ask_next(const PagedParams& p, const device::KeyTask& task,
                                                  const Shared& shared, const MlaSm90Maps& maps,
                                                  Scores& state) {
    if (state.first >= task.end) return;
    if constexpr (kTokens) {
      find_tokens(p, task, state.first, state.tokens);
      if constexpr (kKeysBy == MlaSm90Keys::packed) {
        copy_packed(p, shared, state.at, state.tokens);
      } else {
        copy_tokens(p, shared, state.at, state.tokens);
      }
    } else {
      const int32_t row = threadIdx.x % 32 * maps.piece;
      copy_boxes(maps, shared, state.at, row, (state.first + row) % p.pages.block_size,
                 state.piece);
    }
    find_next(p, task, maps, state, state.first + 2 * kKeys);
  }
  static __device__ __forceinline__ void find_next(const PagedParams& p,
                                                   const device::KeyTask& task,
                                                   const MlaSm90Maps& maps, Scores& state,
                                                   int32_t first) {
    state.first = first;
    if constexpr (kTokens) {
      ask_tables(p, task, first, state.tokens);
    } else {
      state.piece = find_piece(p, task, maps.piece, first);
    }
  }

  // 4. The warpgroups that make scores, of every other block
  static __device__ __forceinline__ void make_scores(const PagedParams& p, const MlaSm90Maps& maps,
                                                     const Shared& shared, int group) {
    using namespace device;
    const Lane me;
    Scores state;
    KeyTasks tasks(p.work);
    KeyTask task;
    const float to_log2 = p.scores.scale * kLog2e;
    bool is_first = true;
    int turn = 0;  // whose block is the next
    state.at.stage = group;
    if (group == 1) named_barrier_arrive(4, 256);
#pragma unroll 1
    while (tasks.next(p.work, task)) {
      find_next(p, task, maps, state, task.begin + (turn == group ? 0 : kKeys));
      ask_next(p, task, shared, maps, state);
      fetch_rows(p, task, shared);
      await_rows();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state.reference[half] = negative_infinity();
        state.sum[half] = 0.0f;
      }
      int32_t key0 = task.begin;
#pragma unroll 1
      for (int32_t blocks = num_blocks(task); blocks > 0; --blocks, key0 += kKeys) {
        if (turn == group) add_scores(p, task, shared, me, group, maps, to_log2, key0, state);
        turn ^= 1;
      }
      // Whose turn it would be tells its sums to the other, who moved the references last.
      if (turn == group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum = row_sum(state.sum[half]);
          if (me.lane % 4 == 0)
            store_shared(shared.sum(me.row + 8 * half), float2{state.reference[half], sum});
        }
        named_barrier_arrive(8, 256);
      } else {
        named_barrier_sync(8, 256);
        if (!is_first) named_barrier_sync(3, 384);  // the end of the task before is read
        end_scores(p, task, shared, me, state);
        __syncwarp();  // half of the lanes came back sooner
        named_barrier_arrive(2, 384);
      }
      is_first = false;
    }
  }

  static __device__ __forceinline__ float row_sum(float sum) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }

  // Where the row of each thread goes, and by what it is multiplied; nullptr: a padding row.
  static __device__ __forceinline__ void end_scores(const PagedParams& p,
                                                    const device::KeyTask& task,
                                                    const Shared& shared, const Lane& me,
                                                    const Scores& state) {
    using namespace device;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum(state.sum[half]);
      float2 other;
      load_shared(other, shared.sum(me.row + 8 * half));
      if (other.y != 0.0f) sum += other.y * exp2_approx(other.x - state.reference[half]);
      if (me.lane % 4 == 0)
        store_shared(shared.end(me.row + 8 * half), float2{state.reference[half], sum});
    }
    __syncwarp();
    int row = 16 * me.warp + me.lane;
    if (me.lane >= 16) return;
    float2 found;
    load_shared(found, shared.end(row));
    UnitRow unit = unit_row(p, task.b, 0, task.row0, row);
    RowOutput to = {};
    if (unit.valid) to = task_output(p, task, unit, row, found.x, found.y, true);
    store_shared16(shared.end(row), __builtin_bit_cast(uint4, to));
  }

  // 5. The warpgroups that have O, two panels of each part
  static __device__ __forceinline__ int first_panel(int group, int part) {
    return part * kPartPanels + group * kOutColumns / 64;
  }
  using Out = float[kParts][kOutBlocks * 4];
  static __device__ __forceinline__ void scale_out(Out& out, float low, float high) {
    if (!__any_sync(0xffffffffu, low != 1.0f || high != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kOutBlocks * 4; ++i) {
      out[0][i] *= i / 2 % 2 ? high : low;
      out[1][i] *= i / 2 % 2 ? high : low;
    }
  }

  static __device__ __forceinline__ void add_values(const Shared& shared, const Lane& me, int group,
                                                    const Cursor& at, Out& out) {
    using namespace device;
    barrier_wait(shared.weighed(at.stage), at.parity);
    float low = __uint_as_float(load_shared4(shared.factors(at.stage, me.row)));
    float high = __uint_as_float(load_shared4(shared.factors(at.stage, me.row + 8)));
    scale_out(out, low, high);
    uint64_t v = wgmma_descriptor(shared.stage(at.stage), kPanelBytes);
    uint64_t weights = plain_descriptor(shared.weights(at.stage));
    pin(out[0]);
    pin(out[1]);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        OutMma::template ss<1>(out[part], advance(weights, step * 2 * kChunkBytes),
                               advance(v, first_panel(group, part) * kPanelBytes + step * 16 * 128),
                               1);
      }
      wgmma_commit();
    }
    wgmma_wait<1>();
    if (me.lane == 0) barrier_arrive(shared.empty(at.stage, 0));
    wgmma_wait<0>();
    pin(out[0]);
    pin(out[1]);
    if (me.lane == 0) barrier_arrive(shared.empty(at.stage, 1));
  }

  // Straight from the fragments.
  static __device__ __forceinline__ void store_row(const device::RowOutput& to, const Out& out,
                                                   int half, int column) {
#pragma unroll
    for (int n = 0; n < kParts * kOutBlocks; ++n) {
      int part = n / kOutBlocks, in_part = n % kOutBlocks;
      float low = out[part][4 * in_part + 2 * half], high = out[part][4 * in_part + 2 * half + 1];
      low = to.factor == 0.0f ? 0.0f : low * to.factor;  // whatever was accumulated
      high = to.factor == 0.0f ? 0.0f : high * to.factor;
      int at = column + part * kPartPanels * 64 + 8 * in_part;
      if (to.type == DType::f32) {
        *reinterpret_cast<float2*>(static_cast<float*>(to.to) + at) = {low, high};
      } else {
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(to.to) + at) =
            device::pack2<kType>(low, high);
      }
    }
  }

  static __device__ __forceinline__ void make_values(const PagedParams& p, const Shared& shared,
                                                     int group) {
    using namespace device;
    const Lane me;
    Out out;
    Cursor at;
    KeyTasks tasks(p.work);
    KeyTask task;
#pragma unroll 1
    while (tasks.next(p.work, task)) {
#pragma unroll
      for (int i = 0; i < kOutBlocks * 4; ++i) out[0][i] = out[1][i] = 0.0f;
#pragma unroll 1
      for (int32_t blocks = num_blocks(task); blocks > 0; --blocks) {
        add_values(shared, me, group, at, out);
        at.advance(1);
      }
      named_barrier_sync(2, 384);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowOutput to = __builtin_bit_cast(RowOutput, load_shared16(shared.end(me.row + 8 * half)));
        if (to.to != nullptr)
          store_row(to, out, half, first_panel(group, 0) * 64 + 2 * (me.lane % 4));
      }
      named_barrier_arrive(3, 384);
    }
  }
};

// 6. Kernel
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    mla_sm90_kernel(const __grid_constant__ PagedParams p,
                    const __grid_constant__ MlaSm90Maps maps) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const typename Kernel::Shared shared(smem);
  int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Kernel::kStages; ++stage) {
      for (int part = 0; part < Kernel::kParts; ++part) {
        device::barrier_init(shared.full(stage, part), 4);
        device::barrier_init(shared.empty(stage, part), 8);  // a lane of each warp that has O
      }
      device::barrier_init(shared.weighed(stage), 4);  // of those that make scores
    }
    device::barrier_init_fence();
  }
  __syncthreads();
  device::wait_for_previous_kernel();
  device::release_next_kernel();
  if (group < 2) {
    device::registers_shrink<Kernel::kScoreRegisters>();
    Kernel::make_scores(p, maps, shared, group);
  } else {
    device::registers_grow<Kernel::kValueRegisters>();
    Kernel::make_values(p, shared, group - 2);
  }
}

// 7. Launcher
template <class Kernel>
void launch_mla_sm90_kernel(const PagedParams& p, const MlaSm90Maps& maps, cudaStream_t stream) {
  static uint64_t allowed = 0;
  allow_shared_memory(mla_sm90_kernel<Kernel>, Kernel::kSmemBytes, allowed);
  launch_overlapping(mla_sm90_kernel<Kernel>, grid_blocks(num_key_tasks(p.work), "sm90"),
                     Kernel::kThreads, Kernel::kSmemBytes, 9, stream, p, maps);
}

template <DType kType, int kHeadDim, int kHeadDimV>
void launch_mla_sm90(const PagedParams& p, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV && kHeadDim == MlaSm90Tiles::kPanels * 64);
  using Keys = MlaSm90Keys;
  if constexpr (kType == DType::bf16) {
    if (p.kv_dtype != p.dtype)
      return launch_mla_sm90_kernel<MlaSm90<kType, Keys::packed>>(p, {}, stream);
  }
  const bool is_paged = p.pages.block_tables != nullptr;
  if (is_paged && (has_lists(p) || p.pages.block_size % 16 != 0))
    return launch_mla_sm90_kernel<MlaSm90<kType, Keys::tokens>>(p, {}, stream);
  launch_mla_sm90_kernel<MlaSm90<kType, Keys::blocks>>(p, mla_sm90_maps(p), stream);
}

}  // namespace cuattn
