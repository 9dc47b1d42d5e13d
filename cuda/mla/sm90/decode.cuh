// SPDX-License-Identifier: Apache-2.0
// mla_decode on Hopper (sm_90a): 64 rows (queries x heads) of one sequence, latents of 512 columns
// and 64 of rope, 16 bits. Keys come in blocks of 32. One warpgroup makes the scores of all blocks
// and their weights P, two have half of the columns of O each: the tensor cores have products of
// the one while the other is at its softmax, or waits. Half of Q lies in the registers of the first,
// so that shared memory keeps up and has room for five blocks. Sources: FlashMLA (O in halves),
// FlashAttention-4 (references that hardly move); PTX ISA, wgmma. Storage and copies: copy.cuh.
// Tasks, rows and results: device/paged/tasks.cuh. Next: paged/combine.cu.
//
//   scores  | S0 | S1, softmax of S0, P0 | S2, softmax of S1, P1 | S3, ...
//   left    |                            | O_L += P0 V0          | O_L += P1 V1 | ...
//   right   |                            | O_R += P0 V0          | O_R += P1 V1 | ...
#pragma once

#include "cuda/host/launch.h"
#include "cuda/mla/sm90/copy.cuh"

namespace cuattn {

template <DType kType>
struct MlaSm90 : MlaSm90Tiles {
  // 1. Types and sizes
  using T = device::Element<kType>;
  using ScoreMma = device::Wgmma<kType, kKeys>;
  using OutMma = device::Wgmma<kType, kOutColumns>;
  static constexpr int kKeyBlocks = kKeys / 8;  // n8 of S
  static constexpr int kKeySteps = kKeys / 16;  // k16 of O
  static constexpr int kOutBlocks = kOutColumns / 8;
  static constexpr float kSlackLog2 = 8.0f;  // exponentials up to 256

  // A thread has rows `row` and `row` + 8 of the tile.
  struct Lane {
    int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    int row = 16 * warp + lane / 4;
  };
  // Of the warpgroup that makes scores.
  struct Scores {
    float products[kKeyBlocks * 4];     // under way
    uint32_t held[kHeldPanels * 4][4];  // panels of Q, k16 each
    float reference[2], sum[2];         // base 2; sum: this thread's share
    Cursor at;
  };

  // 2. Rows of Q
  static __device__ __forceinline__ const uint16_t* query(const PagedParams& p,
                                                          const device::KeyTask& task,
                                                          const device::UnitRow& row, bool rope) {
    const Strides& s = rope ? p.latent.q_strides : p.q_strides;
    return static_cast<const uint16_t*>(rope ? p.latent.q_rope : p.q) + task.b * s.batch +
           row.place * s.seq + row.head * s.head;
  }

  static __device__ __forceinline__ void sync_scores() { device::named_barrier_sync(1, 128); }

  // The last panels of Q on their way to shared memory; padding rows are zeros.
  static __device__ __forceinline__ void fetch_rows(const PagedParams& p,
                                                    const device::KeyTask& task,
                                                    const Shared& shared) {
    sync_scores();  // those of the task before are read
    const int row = threadIdx.x / 2, first = threadIdx.x % 2 * 4;  // half of a row of each panel
    device::UnitRow unit = device::unit_row(p, task.b, 0, task.row0, row);
    const uint16_t* latent = query(p, task, unit, false) + kHeldPanels * 64;
    const uint16_t* rope = query(p, task, unit, true);
#pragma unroll
    for (int panel = 0; panel < kSharedPanels; ++panel) {
      const uint16_t* from = panel == kSharedPanels - 1 ? rope : latent + panel * 64;
#pragma unroll
      for (int i = first; i < first + 4; ++i) {
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

  // The first panels straight to registers, as A operands.
  static __device__ __forceinline__ void hold_rows(const PagedParams& p,
                                                   const device::KeyTask& task, const Lane& me,
                                                   Scores& state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      device::UnitRow unit = device::unit_row(p, task.b, 0, task.row0, me.row + 8 * half);
      const uint16_t* from = query(p, task, unit, false) + 2 * (me.lane % 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 0; step < kHeldPanels * 4; ++step) {
          state.held[step][half + 2 * i] =
              unit.valid ? *reinterpret_cast<const uint32_t*>(from + 16 * step + 8 * i) : 0;
        }
      }
    }
  }

  // 3. Scores
  static __device__ __forceinline__ void start_scores(const Shared& shared, Scores& state) {
    using namespace device;
    int32_t stage = state.at.stage;
    uint64_t k = wgmma_descriptor(opaque(shared.stage(stage)), 0);
    uint64_t q = wgmma_descriptor(opaque(shared.q), 0);
    pin(state.products);
#pragma unroll
    for (int step = 0; step < (kPanels + 1) * 4; ++step) {
      if (step % (kPartPanels * 4) == 0 && step < kPanels * 4) {
        barrier_wait(shared.full(stage, step / (kPartPanels * 4)), state.at.parity);
        wgmma_fence();
      }
      uint64_t key = advance(k, step / 4 * kPanelBytes + step % 4 * 32);
      if (step < kHeldPanels * 4) {
        ScoreMma::template rs<0>(state.products, state.held[step], key, step != 0);
      } else {
        int at = step - kHeldPanels * 4;
        ScoreMma::template ss<0>(state.products, advance(q, at / 4 * kRowPanelBytes + at % 4 * 32),
                                 key, step != 0);
      }
    }
    wgmma_commit();
  }

  using Block = float[kKeyBlocks * 4];
  // Dot products become scores in base 2. `to_log2`: of a plain scale.
  static __device__ __forceinline__ void score_keys(const PagedParams& p, float to_log2,
                                                    const Scores& state, Block& scores) {
    const ScoreParams& s = p.scores;
    if (s.scored()) {
#pragma unroll
      for (int i = 0; i < kKeyBlocks * 4; ++i) {
        float score = state.products[i] * s.scale;
        if (s.softcap > 0.0f)
          score = s.softcap * device::capped<kType>(score, s.softcap, s.inv_softcap);
        scores[i] = device::finite_product(score, device::kLog2e);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kKeyBlocks * 4; ++i)
        scores[i] = device::finite_product(state.products[i], to_log2);
    }
  }

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

  // Weights of the scores, relative to references that move only where a score is far above them;
  // by `factor` O and the sums shrink then.
  static __device__ __forceinline__ void weigh(Scores& state, const Block& scores,
                                               float (&factor)[2],
                                               uint32_t (&weights)[kKeySteps][4]) {
    using namespace device;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = negative_infinity(), old = state.reference[half];
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n)
        largest = fmaxf(largest, fmaxf(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
      largest = quad_max(largest);
      float& reference = state.reference[half];
      if (largest > old + kSlackLog2) reference = largest;
      // A row that has seen nothing has -inf; 0 in its place keeps -inf - (-inf) out.
      float base = reference == negative_infinity() ? 0.0f : reference;
      factor[half] = exp2_approx(old - base);
      state.sum[half] *= factor[half];
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
        float low = exp2_approx(scores[4 * n + 2 * half] - base);
        float high = exp2_approx(scores[4 * n + 2 * half + 1] - base);
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

  // A block whose products are under way; with kMore those of the next begin.
  template <bool kMore>
  static __device__ __forceinline__ void add_scores(const PagedParams& p,
                                                    const device::KeyTask& task,
                                                    const Shared& shared, const Lane& me,
                                                    float to_log2, int32_t key0, Scores& state) {
    device::wgmma_wait<0>();
    device::pin(state.products);
    Block scores;
    score_keys(p, to_log2, state, scores);
    int32_t stage = state.at.stage;
    state.at.next();
    if constexpr (kMore) start_scores(shared, state);
    bool edge = has_edge(p, task, key0);
    if (edge) mask_scores(p, task, me, key0, scores);
    float factor[2];
    uint32_t weights[kKeySteps][4];
    weigh(state, scores, factor, weights);
    sync_scores();  // all four warps have their products: the block may be written to
    if (edge) clear_keys(task, me, shared.stage(stage), key0);
    publish(shared, me, stage, factor, weights);
  }

  // 4. The warpgroup that makes scores
  static __device__ __forceinline__ void make_scores(const PagedParams& p, const Shared& shared) {
    using namespace device;
    const Lane me;
    Scores state;
    KeyTasks tasks(p.work);
    KeyTask task;
    const float to_log2 = p.scores.scale * kLog2e;
    bool is_first = true;
#pragma unroll 1
    while (tasks.next(p.work, task)) {
      fetch_rows(p, task, shared);
      hold_rows(p, task, me, state);
      await_rows();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state.reference[half] = negative_infinity();
        state.sum[half] = 0.0f;
      }
      int32_t blocks = num_blocks(task), key0 = task.begin;
      if (blocks > 0) {
        start_scores(shared, state);
#pragma unroll 1
        for (; blocks > 1; --blocks, key0 += kKeys)
          add_scores<true>(p, task, shared, me, to_log2, key0, state);
        add_scores<false>(p, task, shared, me, to_log2, key0, state);
      }
      if (!is_first) named_barrier_sync(3, 384);  // the end of the task before is read
      is_first = false;
      end_scores(p, task, shared, me, state);
      __syncwarp();  // half of the lanes came back sooner
      named_barrier_arrive(2, 384);
    }
  }

  // Where the row of each thread goes, and by what it is multiplied; nullptr: a padding row.
  static __device__ __forceinline__ void end_scores(const PagedParams& p,
                                                    const device::KeyTask& task,
                                                    const Shared& shared, const Lane& me,
                                                    const Scores& state) {
    using namespace device;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
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
        at.next();
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
        device::barrier_init(shared.full(stage, part), 1);
        device::barrier_init(shared.empty(stage, part), 8);  // a lane of each warp that has O
      }
      device::barrier_init(shared.weighed(stage), 4);  // of those that make scores
    }
    device::barrier_init_fence();
  }
  __syncthreads();
  device::wait_for_previous_kernel();
  device::release_next_kernel();
  if (group == 3) {
    device::registers_shrink<Kernel::kCopyRegisters>();
    if (threadIdx.x < 3 * 128 + 32) Kernel::copy(p, maps, shared);
  } else if (group == 0) {
    device::registers_grow<Kernel::kScoreRegisters>();
    Kernel::make_scores(p, shared);
  } else {
    device::registers_grow<Kernel::kValueRegisters>();
    Kernel::make_values(p, shared, group - 1);
  }
}

// 7. Launcher
template <DType kType, int kHeadDim, int kHeadDimV>
void launch_mla_sm90(const PagedParams& p, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV && kHeadDim == MlaSm90Tiles::kPanels * 64);
  using Kernel = MlaSm90<kType>;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(mla_sm90_kernel<Kernel>, Kernel::kSmemBytes, allowed);
  MlaSm90Maps maps = mla_sm90_maps(p);
  launch_overlapping(mla_sm90_kernel<Kernel>, grid_blocks(num_key_tasks(p.work), "sm90"),
                     Kernel::kThreads, Kernel::kSmemBytes, 9, stream, p, maps);
}

}  // namespace cuattn
