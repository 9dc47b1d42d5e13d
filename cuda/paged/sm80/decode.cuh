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

namespace cuattn {

// kXsplit: vLLM's layout, K [head_dim / x, block_size, x] and V [head_dim, block_size] in a block.
template <DType kCache, int kHeadDim, int kRows, bool kXsplit>
struct PagedSm80 {
  // 1. Types and sizes
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

  // 3. Roles: every warp loads and computes its own slices. The loader runs up to kStages slices
  // ahead, into the next tasks where need be; the block of a slice is looked up one slice earlier
  // still, so that nobody waits for the table.
  struct Loader {
    const PagedSm80& me;
    device::KeyTasks tasks;
    device::KeyTask task;
    int32_t key;     // first key of the next slice
    int32_t block;   // of key `lane % 16` of the slice, as the table has it
    int32_t within;  // and the place of the key in that block
    bool live;       // there is a next slice
    int stage;       // to fill next
    int free;        // stages to fill

    // `first`: what `walk` found last.
    __device__ Loader(const PagedSm80& self, const device::KeyTasks& walk,
                      const device::KeyTask& first)
        : me(self),
          tasks(walk),
          task(first),
          key(first.begin + self.warp * kSlice),
          live(true),
          stage(0),
          free(self.num_stages) {}

    // Finds the next slice and its blocks.
    __device__ __forceinline__ void find(const PagedParams& p) {
      while (live && key >= task.end) {
        live = tasks.next(p.work, task);
        key = task.begin + me.warp * kSlice;
      }
      if (!live) return;
      // Entries past the context are not read. A block that holds 16 keys is one for absent keys,
      // too: their places follow on.
      bool one_block = in_one_block(p);
      int32_t mine = key + me.lane % kSlice, first = mine / 16 * 16;
      if (first >= task.end) first = key;
      uint32_t token = one_block ? first : max(min(mine, task.end - 1), task.low);
      uint32_t index = token / static_cast<uint32_t>(p.pages.block_size);
      block = *p.pages.entry(task.b, index);
      within = token - index * p.pages.block_size + (one_block ? me.lane % 16 : 0);
    }
    static __device__ bool in_one_block(const PagedParams& p) {
      return p.pages.block_size % 16 == 0;
    }
    __device__ __forceinline__ bool holds(int32_t row) const {  // key `row` of the slice counts
      return static_cast<uint32_t>(key + row - task.low) <
             static_cast<uint32_t>(task.end - task.low);
    }

    // Where a token of this kv head begins.
    __device__ __forceinline__ const char* token_in(const PagedParams& p, const void* cache,
                                                    const CacheStrides& strides, int32_t id,
                                                    int32_t place) const {
      int64_t at = p.pages.existing(id) * strides.block + task.kv_head * strides.head +
                   place * strides.token;
      return static_cast<const char*>(cache) + at * kItem;
    }

    // Keys as rows: kLanes lanes copy one, so that a warp reads whole lines.
    template <bool kOneBlock>
    __device__ __forceinline__ void copy_rows(const PagedParams& p, uint32_t to) const {
      constexpr int kLanes = kRowBytes / 16 < 32 ? kRowBytes / 16 : 32;
      constexpr int kPassRows = 32 / kLanes;
      int32_t row = me.lane / kLanes, chunk = me.lane % kLanes;
      bool column_valid = chunk * 16 < p.head_dim * kItem;
      const char *gK = nullptr, *gV = nullptr;
      auto find_row = [&](int32_t id, int32_t place) {
        gK = token_in(p, p.k_cache, p.k_strides, id, place) + chunk * 16;
        gV = token_in(p, p.v_cache, p.v_strides, id, place) + chunk * 16;
      };
      to += device::swizzled<kRowBytes>(row, chunk);
#pragma unroll
      for (int pass = 0; pass < kSlice / kPassRows; ++pass) {
        int32_t at = row + pass * kPassRows;
        if (!kOneBlock || pass * kPassRows % 16 == 0) {
          find_row(__shfl_sync(0xffffffffu, block, at), __shfl_sync(0xffffffffu, within, at));
        }
        bool valid = column_valid && holds(at);
        // kPassRows is a power of 2: the rows of a pass change the swizzle by a constant.
        uint32_t smem =
            (to ^ (kPassRows < 8 ? pass * kPassRows % 8 * 16 : 0)) + pass * kPassRows * kRowBytes;
        device::cp_async16(smem, gK, valid);
        device::cp_async16(smem + kKBytes, gV, valid);
        gK += kPassRows * kItem * p.k_strides.token;
        gV += kPassRows * kItem * p.v_strides.token;
      }
    }

    // K: a lane takes one key, 16 bytes at a time. V: 8 keys of one d at a time, kept as rows of d.
    __device__ __forceinline__ void copy_xsplit(const PagedParams& p, uint32_t to) const {
      constexpr int kAside = 32 / kSlice, kPieces = kSlice / 8, kPassRows = 32 / kPieces;
      int32_t row = me.lane % kSlice, piece = me.lane % kPieces;
      bool row_valid = holds(row);
      const char* gK = token_in(p, p.k_cache, p.k_strides, block, within) +
                       me.lane / kSlice * p.pages.block_size * 16;
#pragma unroll
      for (int i = 0; i < kRowBytes / 16 / kAside; ++i) {
        int32_t chunk = me.lane / kSlice + kAside * i;
        device::cp_async16(to + Slice::k_chunk(row, chunk), gK,
                           row_valid && chunk * 16 < p.head_dim * kItem);
        gK += kAside * p.pages.block_size * 16;
      }
      // The 8 keys: blocks are multiples of 8.
      int32_t first_d = me.lane / kPieces, id = __shfl_sync(0xffffffffu, block, 8 * piece);
      int32_t place = __shfl_sync(0xffffffffu, within, 8 * piece) / 8 * 8;
      const char* gV =
          token_in(p, p.v_cache, p.v_strides, id, place) + first_d * p.pages.block_size * kItem;
      bool piece_valid = key + 8 * piece < task.end && key + 8 * piece + 8 > task.low;
#pragma unroll
      for (int i = 0; i < kHeadDim / kPassRows; ++i) {
        int32_t d = first_d + kPassRows * i;
        bool valid = piece_valid && d < p.head_dim;
        if constexpr (kFp8) {
          device::cp_async8(to + kKBytes + Slice::v_row(d, piece), gV, valid);
        } else {
          device::cp_async16(to + kKBytes + Slice::v_row(d, piece), gV, valid);
        }
        gV += kPassRows * p.pages.block_size * kItem;
      }
    }

    // Starts the copies of the next slice, if there is one, as one group.
    __device__ __forceinline__ void copy(const PagedParams& p) {
      uint32_t to = me.stage_address(stage);
      if (live) {
        if constexpr (kXsplit) {
          copy_xsplit(p, to);
        } else if (in_one_block(p)) {
          copy_rows<true>(p, to);
        } else {
          copy_rows<false>(p, to);
        }
        key += me.num_warps * kSlice;
      }
      device::cp_async_commit();
      stage = stage + 1 < me.num_stages ? stage + 1 : 0;
      --free;
    }

    // Note: one place for copy and one for find. Instructions that run once cost a fetch each;
    // every further copy of them is felt in short calls.
    __device__ __forceinline__ void fill(const PagedParams& p) {
      bool found = free < me.num_stages;  // not in the first call
#pragma unroll 1
      while (true) {
        if (found) copy(p);
        find(p);
        if (found && free == 0) break;
        found = true;
      }
    }
  };

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
  static std::atomic<uint64_t> allowed{0};
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
