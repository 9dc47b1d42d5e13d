// SPDX-License-Identifier: Apache-2.0
// Paged attention for few queries on mma.sync tensor cores (sm_80 and later), at the speed of
// memory: caches in float16, bfloat16 or e4m3, every layout and option. Keys are the rows of the
// products and queries the columns, so that a group of up to 8 heads pads nothing:
//
//   S^T [16 keys x 8 rows] = K Q^T        O^T [head_dim x 8 rows] += V^T P^T
//
// Each warp takes 16 or 32 keys at a time (a slice), in turn with the other warps, through stages
// of its own: no barrier in the main loop. The warps' softmax states are merged at the end of a
// task. Tasks: device/paged/tasks.cuh. Slices: device/paged/slice.cuh. Next: paged/combine.cu.
#pragma once

#include <algorithm>

#include "cuattn/device/mma_sm80.cuh"
#include "cuattn/device/paged/slice.cuh"
#include "cuattn/device/paged/tasks.cuh"
#include "cuattn/tiles.h"
#include "cuda/host/launch.h"
#include "cuda/paged/sm80/loader.cuh"

namespace cuattn {

// kXsplit: vLLM's layout, K [head_dim / x, block_size, x] and V [head_dim, block_size] in a block.
template <DType kCache, int kHeadDim, int kRows, bool kXsplitLayout>
struct PagedSm80 {
  // 1. Types and sizes
  static constexpr bool kXsplit = kXsplitLayout;
  static constexpr int kDim = kHeadDim;
  static constexpr bool kFp8 = kCache == DType::e4m3;
  static constexpr DType kMma = kFp8 ? DType::f16 : kCache;  // e4m3 is exact in float16
  static constexpr int kItem = kFp8 ? 1 : 2;                 // bytes
  static constexpr int kRowBytes = kHeadDim * kItem;         // of one key
  static constexpr PagedTile kShape =
      paged_sm80_tile(kHeadDim, kItem, kXsplit ? KvLayout::vllm : KvLayout::nhd, kRows);
  static constexpr Tile kTile = kShape.tile;
  static constexpr int kCtasPerSm = kShape.ctas_per_sm;
  static constexpr int kWarps = kTile.warps, kThreads = kWarps * 32, kStages = kTile.stages;
  static constexpr int kSlice = paged_slice_keys(kHeadDim, kItem);  // keys of a warp at a time
  using Slice = device::PagedSlice<kCache, kHeadDim, kSlice, kXsplit>;
  static constexpr int kKeyBlocks = kSlice / 16;  // m16 blocks of K Q^T, k16 steps of V^T P^T
  static constexpr int kSteps = kHeadDim / 16;    // k16 steps of K Q^T, m16 blocks of V^T P^T
  static constexpr int kRowBlocks = kRows / 8;    // n8 blocks
  static constexpr int kKBytes = Slice::kKBytes, kStageBytes = 2 * kKBytes;
  static constexpr int kMostWarps = 2 * kWarps;  // where V2 has one partition a multiprocessor
  static_assert(kStageBytes >= 8 * kHeadDim * 4, "a stage holds O^T of 8 rows in float");
  static_assert(kTile.n % kSlice == 0, "a tile is made of slices");

  // 2. Shared storage: stages [warp][stage][K | V], then what warps tell each other in the end.
  struct Table {
    float maximum[kMostWarps][kRows], sum[kMostWarps][kRows];
    uint32_t staging[kMostWarps];
  };
  static constexpr int smem_bytes(int warps, int stages) {
    return warps * stages * kStageBytes + static_cast<int>(sizeof(Table));
  }
  // Short tasks mostly wait, for their first keys and with their results. One stage less makes room
  // for one more block on a multiprocessor.
  static constexpr bool kHasSpareStage = kStages == 3 && kRows == 8 && kHeadDim <= 128;
  static constexpr int kShortTask = 1024;  // keys

  // Who this thread is. Through shuffles: what the compiler can find again, it reads from the
  // special registers each time, and those are slow.
  const int lane, warp;
  const uint32_t stages;  // of this warp
  const int num_warps;    // kWarps, or twice as many
  const int num_stages;   // kStages, or one less

  __device__ PagedSm80(const char* smem, int warps, int stages_of_warp)
      : lane(__shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32)),
        warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
        stages(__shfl_sync(
            0xffffffffu,
            device::smem_address(smem) + threadIdx.x / 32 * stages_of_warp * kStageBytes, 0)),
        num_warps(warps),
        num_stages(stages_of_warp) {}
  __device__ __forceinline__ uint32_t stage_address(int stage) const {
    return stages + stage * kStageBytes;
  }

  // 3. Roles: every warp loads (loader.cuh) and computes its own slices.
  using Loader = PagedSm80Loader<PagedSm80>;

  // The softmax state of a warp: lane 4g + q holds rows (columns of the products) 8n + 2q and
  // 8n + 2q + 1.
  struct State {
    uint32_t q[kRowBlocks][kSteps][2];  // Q^T: the B operand
    device::RowScore<kMma> score[kRowBlocks][2];
    float out[kRowBlocks][kSteps][4] = {};
    float maximum[kRowBlocks][2];   // base 2, the same in all lanes of a column
    float sum[kRowBlocks][2] = {};  // this lane's share
    int32_t full_begin, full_end;   // every query sees these keys
  };

  // Q of this lane: row 8n + g, d of each step 2q, 2q + 1, 2q + 8, 2q + 9; under e4m3 4q .. 4q + 3,
  // the order in which a register of K holds them. Returns what dot products are to be multiplied
  // by: bfloat16 under e4m3 becomes float16 after a division by a power of 2.
  __device__ __forceinline__ float load_q(const PagedParams& p, const device::KeyTask& task, int n,
                                          uint32_t (&q)[kSteps][2]) {
    device::UnitRow row = device::unit_row(p, task.b, task.kv_head, task.row0, 8 * n + lane / 4);
    const uint16_t* gQ = static_cast<const uint16_t*>(p.q) + task.b * p.q_strides.batch +
                         row.place * p.q_strides.seq + row.head * p.q_strides.head;
    int32_t quad = lane % 4;
    float largest = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int32_t d = 16 * step + (kFp8 ? 4 * quad + 2 * i : 2 * quad + 8 * i);
        q[step][i] = row.valid && d < p.head_dim ? *reinterpret_cast<const uint32_t*>(gQ + d) : 0;
        float2 pair = device::unpack_bf16(q[step][i]);
        if (kFp8) largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    }
    if (!kFp8 || p.dtype == DType::f16) return 1.0f;
    constexpr uint32_t kLeast = 15;  // biased exponent: both factors below are normal numbers
    uint32_t exponent = max(__float_as_uint(device::quad_max(largest)) >> 23, kLeast);
    float down = __uint_as_float((254 + 14 - exponent) << 23);  // the largest becomes 2^14
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 pair = device::unpack_bf16(q[step][i]);
        q[step][i] = device::pack2<DType::f16>(pair.x * down, pair.y * down);
      }
    }
    return __uint_as_float((exponent - 14) << 23);
  }

  __device__ __forceinline__ void begin_task(const PagedParams& p, const device::KeyTask& task,
                                             State& state) {
    int32_t quad = lane % 4;
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      float dot_scale = load_q(p, task, n, state.q[n]) * device::key_scale(p, task);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float scale_of_row = __shfl_sync(0xffffffffu, dot_scale, 4 * (2 * quad + i));
        device::UnitRow row =
            device::unit_row(p, task.b, task.kv_head, task.row0, 8 * n + 2 * quad + i);
        state.score[n][i].init(p, task, row, scale_of_row);
        state.maximum[n][i] = device::negative_infinity();
      }
    }
    const PagedWork& w = p.work;
    state.full_begin = w.mask.visible(w.q_len - 1, w.q_len, task.context).begin;
    state.full_end = w.mask.visible(0, w.q_len, task.context).end;
  }

  using Scores = float[kKeyBlocks][kRowBlocks][4];
  using Weights = uint32_t[kKeyBlocks][kRowBlocks][2];

  // S^T = K Q^T. Two accumulators, so that products wait for each other half as often.
  __device__ __forceinline__ void multiply_qk(const State& state, uint32_t k_tile,
                                              float (&scores)[kRowBlocks][4], int block) {
    float parts[2][kRowBlocks][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; step += Slice::kAtOnce) {
      typename Slice::Fragments a;
      Slice::load_keys(lane, k_tile, block, step, a);
#pragma unroll
      for (int odd = 0; odd < Slice::kAtOnce; ++odd) {
#pragma unroll
        for (int n = 0; n < kRowBlocks; ++n) {
          const uint32_t (&q)[2] = state.q[n][step + odd];
          device::mma_m16n8k16<kMma>(parts[(step + odd) % 2][n], a[odd], q[0], q[1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = parts[0][n][i] + parts[1][n][i];
    }
  }

  // Dot products become scores in base 2, -inf where a query does not see the key.
  __device__ __forceinline__ void score_keys(const PagedParams& p, const State& state, int32_t key0,
                                             bool masked, float (&scores)[kRowBlocks][4]) {
    bool scored = p.scores.scored();
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const device::RowScore<kMma>& row = state.score[n][i % 2];
        int32_t key = key0 + Slice::slot_key(lane / 4, i / 2);
        float score = scored ? row.scored(p, scores[n][i], key)
                             : device::finite_product(scores[n][i], row.scale);
        scores[n][i] = !masked || row.sees(key) ? score : device::negative_infinity();
      }
    }
  }

  // Scores become P^T as B operands; O and the sums follow the maximum.
  static __device__ __forceinline__ void softmax_step(State& state, Scores& scores,
                                                      Weights& weights) {
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      float rescale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float maximum = device::negative_infinity();
#pragma unroll
        for (int block = 0; block < kKeyBlocks; ++block) {
          maximum = fmaxf(maximum, fmaxf(scores[block][n][i], scores[block][n][2 + i]));
        }
#pragma unroll
        for (int other = 4; other < 32; other *= 2) {
          maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, other));
        }
        maximum = fmaxf(maximum, state.maximum[n][i]);
        float reference = maximum == device::negative_infinity() ? 0.0f : maximum;
        rescale[i] = device::exp2_approx(state.maximum[n][i] - reference);
        state.maximum[n][i] = maximum;
        state.sum[n][i] *= rescale[i];
#pragma unroll
        for (int block = 0; block < kKeyBlocks; ++block) {
          float& low = scores[block][n][i];
          float& high = scores[block][n][2 + i];
          low = device::exp2_approx(low - reference);
          high = device::exp2_approx(high - reference);
          state.sum[n][i] += low + high;
        }
      }
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block) {
        const float (&s)[4] = scores[block][n];
        weights[block][n][0] = device::movmatrix_trans(device::pack2<kMma>(s[0], s[1]));
        weights[block][n][1] = device::movmatrix_trans(device::pack2<kMma>(s[2], s[3]));
      }
      // The maximum settles after a few slices. Exact.
      if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int i = 0; i < 4; ++i) state.out[n][step][i] *= rescale[i % 2];
        }
      }
    }
  }

  // O^T += V^T P^T.
  __device__ __forceinline__ void multiply_pv(State& state, const Weights& weights,
                                              uint32_t v_tile) {
#pragma unroll
    for (int step = 0; step < kSteps; step += Slice::kAtOnce) {
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block) {
        typename Slice::Fragments a;
        Slice::load_values(lane, v_tile, block, step, a);
#pragma unroll
        for (int odd = 0; odd < Slice::kAtOnce; ++odd) {
#pragma unroll
          for (int n = 0; n < kRowBlocks; ++n) {
            const uint32_t (&w)[2] = weights[block][n];
            device::mma_m16n8k16<kMma>(state.out[n][step + odd], a[odd], w[0], w[1]);
          }
        }
      }
    }
  }

  // 4. Main loop: the slices of this warp in one task. Returns the stage of the last slice, which
  // is free and not filled again yet; -1 when there was none, and then `state` is not set.
  __device__ __forceinline__ int attend(const PagedParams& p, const device::KeyTask& task,
                                        Loader& loader, State& state) {
    int last = -1;
#pragma unroll 1
    for (int32_t key = task.begin + warp * kSlice; key < task.end; key += num_warps * kSlice) {
      loader.fill(p);
      if (last < 0) begin_task(p, task, state);  // while the first copies are on their way
      device::cp_async_wait<kStages - 1>();
      if (num_stages < kStages) device::cp_async_wait<kStages - 2>();
      __syncwarp();         // the copies of all lanes have landed
      last = loader.stage;  // all stages are full: the one to fill next is the oldest
      uint32_t k_tile = stage_address(last), v_tile = k_tile + kKBytes;
      if (kXsplit && (key < task.low || key + kSlice > task.end)) {
        Slice::clear_values(lane, v_tile, task.low - key, task.end - key);
      }
      bool masked = key < state.full_begin || key + kSlice > state.full_end;
      Scores scores;
      Weights weights;
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block) {
        multiply_qk(state, k_tile, scores[block], block);
        score_keys(p, state, key + 16 * block, masked, scores[block]);
      }
      softmax_step(state, scores, weights);
      multiply_pv(state, weights, v_tile);
      __syncwarp();  // every lane is done with the stage
      ++loader.free;
    }
    return last;
  }

  // 5. Epilogue: the states of the warps that had keys become one; 8 rows at a time, by way of the
  // stage that each of these warps has free.
  __device__ __forceinline__ void publish(const State& state, int n, uint32_t staging) {
    int32_t g = lane / 4, quad = lane % 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // XOR: the four rows that a warp writes at once fall into different banks.
        int32_t at = (2 * quad + i % 2) * kHeadDim + (Slice::out_column(step, g, i / 2) ^ 8 * quad);
        device::store_shared(staging + at * 4, __float_as_uint(state.out[n][step][i]));
      }
    }
  }

  __device__ __forceinline__ void merge_rows(const PagedParams& p, const device::KeyTask& task,
                                             const Table& table, int n, int32_t warps) {
    constexpr int kChunks = kHeadDim / 8;
    float v_scale = device::value_scale(p, task);
    for (int32_t item = threadIdx.x; item < 8 * kChunks; item += 32 * num_warps) {
      int32_t row = item / kChunks, chunk = item % kChunks, index = 8 * n + row;
      device::UnitRow at = device::unit_row(p, task.b, task.kv_head, task.row0, index);
      if (!at.valid || chunk * 8 >= p.head_dim) continue;
      float maximum = device::negative_infinity(), sum = 0.0f, merged[8] = {};
      for (int w = 0; w < warps; ++w) maximum = fmaxf(maximum, table.maximum[w][index]);
      float reference = maximum == device::negative_infinity() ? 0.0f : maximum;
      for (int w = 0; w < warps; ++w) {
        if (table.sum[w][index] == 0.0f) continue;  // no key there that this row sees
        float weight = device::exp2_approx(table.maximum[w][index] - reference);
        sum = fmaf(table.sum[w][index], weight, sum);
        uint32_t from = table.staging[w] + (row * kHeadDim + (8 * chunk ^ row / 2 * 8)) * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint4 v = device::load_shared16(from + 16 * half);
          merged[4 * half] = fmaf(weight, __uint_as_float(v.x), merged[4 * half]);
          merged[4 * half + 1] = fmaf(weight, __uint_as_float(v.y), merged[4 * half + 1]);
          merged[4 * half + 2] = fmaf(weight, __uint_as_float(v.z), merged[4 * half + 2]);
          merged[4 * half + 3] = fmaf(weight, __uint_as_float(v.w), merged[4 * half + 3]);
        }
      }
#pragma unroll 1
      for (bool keeps = device::keeps_partition(p, task);; keeps = false) {
        device::RowOutput out =
            keeps ? device::partition_output(p, task, at, maximum, sum, chunk == 0)
                  : device::task_output(p, task, at, index, maximum, sum, chunk == 0);
        float factor = out.factor * v_scale, result[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) result[i] = merged[i] * factor;
        device::store8(out, 8 * chunk, result);
        if (!keeps || task.slot >= 0) break;  // V2: a partition that is all writes the output, too
      }
    }
  }

  __device__ __forceinline__ void end_task(const PagedParams& p, const device::KeyTask& task,
                                           Table& table, const State& state, int last) {
    int32_t slices = task.end > task.begin ? device::ceil_div(task.end - task.begin, kSlice) : 0;
    int32_t warps = slices < num_warps ? slices : num_warps;
#pragma unroll
    for (int n = 0; n < kRowBlocks; ++n) {
      if (last >= 0) {
        uint32_t staging = stage_address(last);
        publish(state, n, staging);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float sum = state.sum[n][i];
#pragma unroll
          for (int other = 4; other < 32; other *= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, other);
          }
          if (lane < 4) {
            table.maximum[warp][8 * n + 2 * lane + i] = state.maximum[n][i];
            table.sum[warp][8 * n + 2 * lane + i] = sum;
          }
        }
        table.staging[warp] = staging;
      }
      __syncthreads();
      merge_rows(p, task, table, n, warps);
      __syncthreads();  // the stages and the table are free
    }
  }

  // 6. Kernel. The tasks of thread block `index`, see KeyTasks.
  static __device__ __forceinline__ void run(const PagedParams& p, char* smem, uint32_t index,
                                             uint32_t stride, int num_warps, int num_stages) {
    Table& table = *reinterpret_cast<Table*>(smem + num_warps * num_stages * kStageBytes);
    PagedSm80 me(smem, num_warps, num_stages);
    device::KeyTasks tasks(p.work, index, stride);
    device::KeyTask task;
    if (!tasks.next(p.work, task)) return;
    Loader loader(me, tasks, task);
#pragma unroll 1
    do {
      State state;
      int last = me.attend(p, task, loader, state);
      me.end_task(p, task, table, state, last);
    } while (tasks.next(p.work, task));
    device::cp_async_wait<0>();
  }
};

// As many threads a multiprocessor as it is to hold: one block may have the warps of two.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads*(Kernel::kCtasPerSm + Kernel::kHasSpareStage), 1)
    paged_sm80_kernel(const __grid_constant__ PagedParams params, int num_warps, int num_stages) {
  extern __shared__ __align__(1024) char smem[];
  device::wait_for_previous_kernel();
  device::release_next_kernel();
  Kernel::run(params, smem, blockIdx.x, gridDim.x, num_warps,
              Kernel::kHasSpareStage ? num_stages : Kernel::kStages);
}

// 7. Launcher
template <class Kernel>
void launch_paged_sm80_kernel(const PagedParams& p, cudaStream_t stream) {
  const PagedWork& w = p.work;
  unsigned tasks = grid_blocks(num_key_tasks(w), "sm80"), blocks = tasks, workers = w.num_workers;
  int warps = Kernel::kWarps, stages = Kernel::kStages;
  int32_t keys = w.split_keys > 0 ? w.split_keys : w.capacity / std::max(w.num_splits, 1);
  bool is_short = w.num_splits > 0 && std::min(keys, w.capacity) <= Kernel::kShortTask;
  if (Kernel::kHasSpareStage && is_short && tasks > workers) {
    // Splits of one sequence are alike. Where one more block on a multiprocessor saves no round of
    // them, a block takes several, and copies for the next while it ends the one before.
    unsigned more = workers / Kernel::kCtasPerSm * (Kernel::kCtasPerSm + 1);
    auto rounds = [&](unsigned blocks_at_once) { return device::ceil_div(tasks, blocks_at_once); };
    bool walks = w.num_seqs == 1 && rounds(more) == rounds(workers);
    if (walks) blocks = workers;
    if (!walks) --stages;
  }
  constexpr int kMostBytes = Kernel::smem_bytes(Kernel::kMostWarps, Kernel::kStages);
  int bytes = std::min(kMostBytes, granted_shared_memory());
  bool is_sparse = p.exp_sums != nullptr && tasks <= workers / Kernel::kCtasPerSm;
  if (is_sparse && bytes == kMostBytes) warps = Kernel::kMostWarps;
  static uint64_t allowed = 0;
  allow_shared_memory(paged_sm80_kernel<Kernel>, bytes, allowed);
  launch_overlapping(paged_sm80_kernel<Kernel>, blocks, 32 * warps,
                     Kernel::smem_bytes(warps, stages), device_major(), stream, p, warps, stages);
}

template <DType kCache, int kHeadDim, int kHeadDimV>
void launch_paged_sm80(const PagedParams& p, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  if (p.kv_layout == KvLayout::vllm) {
    return launch_paged_sm80_kernel<PagedSm80<kCache, kHeadDim, 8, true>>(p, stream);
  }
  if constexpr (kHeadDim <= 128) {
    if (p.work.rows > 8) {
      return launch_paged_sm80_kernel<PagedSm80<kCache, kHeadDim, 16, false>>(p, stream);
    }
  }
  launch_paged_sm80_kernel<PagedSm80<kCache, kHeadDim, 8, false>>(p, stream);
}

}  // namespace cuattn
