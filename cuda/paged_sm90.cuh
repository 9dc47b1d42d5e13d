// SPDX-License-Identifier: Apache-2.0
// Paged attention of one or a few queries on Hopper (sm_90a): float16 and bfloat16, nhd and hnd
// caches with blocks of a multiple of 8 tokens. Memory bound: everything serves that bytes are
// always on their way. Operands are swapped, so that keys fill the 64 rows of a wgmma and the few
// queries its columns: S^T = K Q^T and O^T += V^T P^T, with K and V as they lie in the cache.
// One warp copies blocks through the TMA, four multiply. Source: the swap of FlashMLA and hpc-ops;
// PTX ISA, wgmma. Tasks, rows and results: device/paged.cuh. Next: paged_combine.cu.
//
//   copy warp   | K0 V0 | K1 V1 | K2 V2 |  wait for a free stage  | K3 | V3 | ...      3 stages
//   math warps          | S0 softmax O0 | S1 softmax O1 | ...
#pragma once

#include <numeric>

#include "cuattn/device/paged_cluster.cuh"
#include "cuattn/device/wgmma_sm90.cuh"
#include "cuattn/tile_config.h"
#include "launch.h"
#include "tensor_maps.h"

namespace cuattn {

// K and V caches as (head_dim, tokens of a block, kv heads, blocks, 1): a box is 64 columns of
// `piece` tokens, the most that both a block and a tile are made of.
struct PagedSm90Maps {
  device::TensorMap k, v;
  int32_t piece;
};

// kCluster: the splits of a unit are the blocks of a cluster, which merges them.
template <DType kType, int kHeadDim, int kRows, ScoreKind kScore, bool kCluster>
struct PagedSm90 {
  // 1. Types and sizes
  static constexpr bool kMerges = kCluster;
  static constexpr int kDim = kHeadDim;
  static constexpr Tile kTile = paged_sm90_tile(kHeadDim, kRows).tile;
  static constexpr int kMathThreads = 128, kThreads = kMathThreads + 32;
  static constexpr int kPanels = kHeadDim / 64;
  static constexpr int kPanelBytes = kTile.n * 128;          // 64 columns of K or V
  static constexpr int kStageBytes = kPanels * kPanelBytes;  // of K; V has as many
  static constexpr int kRowPanelBytes = kRows * 128;         // 64 columns of Q or P
  static constexpr int kLoadLanes = kTile.n / 8 * kPanels;   // boxes of a stage at most
  // The next kernel is let in when a block has 192 KB left to copy. A block that has no more than
  // 256 KB asks L2 for its first tiles before its turn comes; more would push out what it asked
  // for.
  static constexpr int kReleaseKeys = (192 << 10) / (2 * kStageBytes) * kTile.n;
  static constexpr int kPrefetchKeys = (256 << 10) / (2 * kStageBytes) * kTile.n;
  static constexpr int kCount = kRows / 2;    // accumulators of 64 keys (S) or 64 columns (O)
  static constexpr int kColumns = kRows / 4;  // unit rows that a thread holds, in columns of S^T
  using Mma = device::Wgmma<kType, kRows>;
  using T = device::Element<kType>;
  static constexpr int kCtasPerSm =
      kRows > 32 || kHeadDim > 128 ? 1 : 2;  // registers, shared memory
  static_assert(kTile.n == 64 && kTile.m == kRows, "a tile of keys is one wgmma");
  static_assert(kLoadLanes <= 32, "one lane a box");

  // What is known of a unit row, kept in shared memory: read for tiles with an edge, or per score.
  struct alignas(16) RowFacts {
    float slope;       // ALiBi
    int32_t position;  // of the query among the keys
    KeyRange visible;
  };

  // 2. Shared storage, in address order: K and V (stage, panel, key, 64), Q (panel, row, 64), P
  // (row, key), the maxima and the sums of four warps (row, warp), RowFacts (row), barriers.
  struct Shared {
    uint32_t k, v, q, p, maxima, sums, facts, barriers;
    __device__ Shared(const void* base, int stages) {
      k = (device::smem_address(base) + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
      v = k + stages * kStageBytes;
      q = v + stages * kStageBytes;
      p = q + kPanels * kRowPanelBytes;
      maxima = p + kRowPanelBytes;
      sums = maxima + kRows * 16;
      facts = sums + kRows * 16;
      barriers = facts + kRows * 16;
    }
    __device__ uint32_t k_full(int stage) const { return barriers + 32 * stage; }
    __device__ uint32_t k_empty(int stage) const { return barriers + 32 * stage + 8; }
    __device__ uint32_t v_full(int stage) const { return barriers + 32 * stage + 16; }
    __device__ uint32_t v_empty(int stage) const { return barriers + 32 * stage + 24; }
  };
  static constexpr int smem_bytes(int stages) {
    return 1024 + stages * (2 * kStageBytes + 32) + (kPanels + 1) * kRowPanelBytes + 3 * kRows * 16;
  }

  // Which split a block has, in the order of paged_item; with a plan, which worker it is.
  static __device__ __forceinline__ uint32_t task_index() {
    if (!kCluster) return blockIdx.x;
    return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  }

  // 3. Roles. While the kernel before this one ends, the copy warp of a split asks L2 for the first
  // tiles: of the keys that lie in the cache all but the newest do so already. Note: where all
  // warps may come to code in which lanes part, the loops after it lose their uniform registers: 3
  // to 12 % slower.
  static __device__ __forceinline__ void prefetch(const PagedParams& p, const PagedSm90Maps& maps) {
    const int32_t pieces = kTile.n / maps.piece;  // of a tile
    int32_t lane = threadIdx.x % 32, panel = lane % kPanels, my_piece = lane / kPanels;
    if (p.work.num_splits == 0) return;
    device::KeyGuess guess = device::guess_keys(p.work, task_index());
    const uint32_t begin = guess.begin, end = guess.end;
    if (guess.end - guess.begin > kPrefetchKeys) return;
    uint32_t token = begin + lane * maps.piece;
    int32_t entry = 0;  // of one of the first 32 pieces
    if (token < end) {
      entry = device::peek(p.block_tables + guess.b * p.block_tables_stride + token / p.block_size);
    }
#pragma unroll 1
    for (int32_t first = 0; first < p.stages * pieces && first + pieces <= 32; first += pieces) {
      int32_t piece = first + my_piece;
      int32_t block = device::existing_block(p, __shfl_sync(0xffffffffu, entry, piece));
      token = begin + piece * maps.piece;
      if (my_piece < pieces && token < end) {
        int32_t row = static_cast<int32_t>(token % p.block_size);
        device::tma_prefetch_box(&maps.k, panel * 64, row, guess.kv_head, block, 0);
        device::tma_prefetch_box(&maps.v, panel * 64, row, guess.kv_head, block, 0);
      }
    }
  }

  // The copy warp: each lane has one box of every tile. Together the lanes hold the block table
  // entries of the next 32 pieces, and load those of the 32 after them. Keys that nobody sees are
  // never read: block -1 is outside the tensor, and the TMA writes zeros.
  static __device__ __forceinline__ void copy(const PagedParams& p, const PagedSm90Maps& maps,
                                              const Shared& shared) {
    const int32_t pieces = kTile.n / maps.piece;  // of a tile
    int32_t lane = threadIdx.x % 32, panel = lane % kPanels, my_piece = lane / kPanels;
    bool has_box = my_piece < pieces;
    const uint32_t to = panel * kPanelBytes + my_piece * maps.piece * 128;
    // Note: a division in the loop over tiles costs 3 % of long contexts.
    const int32_t block_size = p.block_size, row_step = kTile.n % block_size;
    device::RunTimeRing ring(p.stages, 1);
    auto load = [&](const device::TensorMap& map, uint32_t smem, uint32_t empty, uint32_t full,
                    int32_t row, int32_t head, int32_t block) {
      device::barrier_wait(empty, ring.parity());
      if (lane == 0) device::barrier_arrive_expect(full, kStageBytes);
      __syncwarp();
      if (has_box) {
        device::tma_load(smem + ring.stage() * kStageBytes + to, &map, full, panel * 64, row, head,
                         block, 0, device::kEvictNormal);
      }
    };
    device::KeyTasks tasks(p.work, task_index());
    device::KeyTask task;
    while (tasks.next(p.work, task)) {
      auto seen = [&](uint32_t token) {
        return token + maps.piece > static_cast<uint32_t>(task.low) &&
               token < static_cast<uint32_t>(task.end);
      };
      // Note: entries stay as they were loaded until their tile comes. One instruction on them
      // here, such as the clamp of their range, and the warp waits for the table: 5 to 8 % slower.
      uint32_t to_load = task.begin + lane * maps.piece;
      auto load_entries = [&] {
        uint32_t token = to_load;
        to_load += 32 * maps.piece;
        if (!seen(token)) return 0;
        return device::table_entry(p, task.b, static_cast<int32_t>(token / block_size));
      };
      int32_t entries = load_entries(), left = task.end - task.begin;
      uint32_t token = task.begin + my_piece * maps.piece;
      int32_t row = static_cast<int32_t>(token % block_size);
      bool releases = tasks.is_last(p.work);
#pragma unroll 1
      while (left > 0) {
        int32_t next_entries = load_entries();
#pragma unroll 1
        for (int32_t piece = my_piece; piece < 32 + my_piece && left > 0; piece += pieces) {
          if (releases && left <= kReleaseKeys) {
            device::release_next_kernel();
            releases = false;
          }
          int32_t entry = __shfl_sync(0xffffffffu, entries, piece);
          int32_t block = seen(token) ? device::existing_block(p, entry) : -1;
          load(maps.k, shared.k, shared.k_empty(ring.stage()), shared.k_full(ring.stage()), row,
               task.kv_head, block);
          load(maps.v, shared.v, shared.v_empty(ring.stage()), shared.v_full(ring.stage()), row,
               task.kv_head, block);
          token += kTile.n;
          row += row_step;
          if (row >= block_size) row -= block_size;
          left -= kTile.n;
          ring.next();
        }
        entries = next_entries;
      }
    }
    if (kCluster) device::release_next_kernel();  // a block without keys has not
  }

  // The math warps. A thread holds keys `key` and `key` + 8 of a tile (rows of S^T), or as many
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

  // Q of the unit and the facts of its rows; padding rows are zeros.
  static __device__ __forceinline__ void load_rows(const PagedParams& p,
                                                   const device::KeyTask& task,
                                                   const Shared& shared) {
    constexpr int kChunks = kHeadDim / 8;  // of 16 bytes
    for (int i = threadIdx.x; i < kRows * kChunks; i += kMathThreads) {
      int row = i / kChunks, chunk = i % kChunks;
      device::UnitRow unit = device::unit_row(p, task.b, task.kv_head, task.row0, row);
      uint4 value = {};
      if (unit.valid && chunk * 8 < p.head_dim) {
        const T* from = static_cast<const T*>(p.q) + task.b * p.q_strides.batch +
                        unit.place * p.q_strides.seq + unit.head * p.q_strides.head;
        value = *reinterpret_cast<const uint4*>(from + chunk * 8);
      }
      device::store_shared16(
          shared.q + chunk / 8 * kRowPanelBytes + device::swizzled<128>(row, chunk % 8), value);
    }
    if (threadIdx.x < kRows) {
      device::UnitRow unit = device::unit_row(p, task.b, task.kv_head, task.row0, threadIdx.x);
      device::RowScore<kType> score;
      score.init(p, task, unit, 1.0f);
      device::store_shared16(
          shared.facts + threadIdx.x * 16,
          __builtin_bit_cast(uint4, RowFacts{score.slope, score.position, score.visible}));
    }
    device::async_proxy_fence();
    sync_math();
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

  struct Softmax {
    float max[kColumns], sum[kColumns];  // sum: of this thread's keys
    float to_log2;                       // a score times this is an exponent in base 2
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
          score *= p.scale;
          if (p.softcap > 0.0f) score = p.softcap * device::tanh_exp2(score / p.softcap);
          score -= row.slope * fabsf(static_cast<float>(row.position - key));
        }
        bool seen = key >= row.visible.begin && key < row.visible.end;
        if (edge && !seen) score = device::negative_infinity();
      }
    }
  }

  // Maxima of all four warps, then probabilities; O is brought to the new maximum.
  static __device__ __forceinline__ void softmax_tile(const Shared& shared, const Lane& me,
                                                      Softmax& state, float (&scores)[kCount],
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
      float max = fmaxf(fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w)), state.max[c]);
      // A row that has seen nothing keeps -inf; 0 in its place keeps -inf - (-inf) out of the
      // exponent.
      float safe = max == negative_infinity() ? 0.0f : max;
      float rescale = exp2_approx((state.max[c] - safe) * state.to_log2);
      float reference = safe * state.to_log2;
      state.max[c] = max;
      state.sum[c] *= rescale;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[at(c, half)];
        score = exp2_approx(fmaf(score, state.to_log2, -reference));
        state.sum[c] += score;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) out[panel][at(c, half)] *= rescale;
      }
    }
    // P^T of 16 keys and 8 rows at a time, transposed on the way: rows of P, keys contiguous.
#pragma unroll
    for (int block = 0; block < kRows / 8; ++block) {
      int row = block * 8 + me.lane % 8, chunk = me.warp * 2 + me.lane / 8 % 2;
      const float* s = scores + block * 4;
      stmatrix_x2_trans(shared.p + swizzled<128>(row, chunk), pack2<kType>(s[0], s[1]),
                        pack2<kType>(s[2], s[3]));
    }
  }

  // 0 x NaN is NaN: rows of V that nobody sees become zeros.
  static __device__ __forceinline__ void clear_rows(uint32_t v, int begin, int end) {
    for (int i = threadIdx.x; i < (end - begin) * kPanels * 8; i += kMathThreads) {
      int chunk = i % 8, panel = i / 8 % kPanels, row = begin + i / (8 * kPanels);
      device::store_shared16(v + panel * kPanelBytes + row * 128 + chunk * 16, {});
    }
  }

  // 4. Main loop
  static __device__ __forceinline__ void compute(const PagedParams& p, const Shared& shared) {
    using namespace device;
    const Lane me;
    const uint64_t q_desc = wgmma_descriptor(shared.q, 0), p_desc = wgmma_descriptor(shared.p, 0);
    const uint64_t k_desc = wgmma_descriptor(shared.k, 0);
    const uint64_t v_desc = wgmma_descriptor(shared.v, kPanelBytes);
    RunTimeRing ring(p.stages, 0);
    KeyTasks tasks(p.work, task_index());
    KeyTask task;
    if (kCluster) keep_nothing(shared);
    while (tasks.next(p.work, task)) {
      load_rows(p, task, shared);
      Softmax state;
      state.to_log2 = kScore == ScoreKind::scored ? kLog2e : p.scale * kLog2e;
      float out[kPanels][kCount] = {};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        state.max[c] = negative_infinity();
        state.sum[c] = 0.0f;
      }
      // Every row sees all keys of [full_begin, full_end).
      const PagedWork& w = p.work;
      int32_t full_end =
          min(task.end, visible_keys(w.window_left, w.window_right, 0, w.q_len, task.context).end);
      int32_t full_begin =
          visible_keys(w.window_left, w.window_right, w.q_len - 1, w.q_len, task.context).begin;
      int32_t first_key = task.begin;
#pragma unroll 1
      for (int32_t left = task.end - task.begin; left > 0; left -= kTile.n, first_key += kTile.n) {
        float scores[kCount];
        uint64_t k = advance(k_desc, ring.stage() * kStageBytes);
        barrier_wait(shared.k_full(ring.stage()), ring.parity());
        pin(scores);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
          Mma::template ss<0>(scores, advance(k, step / 4 * kPanelBytes + step % 4 * 32),
                              advance(q_desc, step / 4 * kRowPanelBytes + step % 4 * 32),
                              step != 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(scores);
        if (me.lane == 0) barrier_arrive(shared.k_empty(ring.stage()));

        bool edge = full_end - first_key < kTile.n || first_key < full_begin;
        score_tile(p, shared, me, first_key, edge, scores);
        softmax_tile(shared, me, state, scores, out);
        barrier_wait(shared.v_full(ring.stage()), ring.parity());
        if (edge) {
          uint32_t v = shared.v + ring.stage() * kStageBytes;
          clear_rows(v, 0, min(task.low - first_key, kTile.n));
          clear_rows(v, left, kTile.n);
        }
        async_proxy_fence();  // P, and the cleared rows
        sync_math();

        uint64_t v = advance(v_desc, ring.stage() * kStageBytes);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) pin(out[panel]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kTile.n / 16; ++step) {
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            Mma::template ss<0, 1>(out[panel], advance(v, panel * kPanelBytes + step * 16 * 128),
                                   advance(p_desc, step * 32), 1);
          }
        }
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) pin(out[panel]);
        if (me.lane == 0) barrier_arrive(shared.v_empty(ring.stage()));
        ring.next();
      }
      if constexpr (kCluster) {
        keep(shared, me, state, out);
      } else {
        store(p, task, shared, me, state, out);
      }
    }
  }

  // 5. Epilogue. The sums of the four warps meet.
  static __device__ __forceinline__ void share_sums(const Shared& shared, const Lane& me,
                                                    const Softmax& state) {
    using namespace device;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float sum = over_warp(state.sum[c], [](float a, float b) { return a + b; });
      uint32_t slot = me.row(c) * 16 + me.warp * 4;
      if (me.lane < 4) store_shared(shared.sums + slot, __float_as_uint(sum));
      if (me.lane < 4) store_shared(shared.maxima + slot, __float_as_uint(state.max[c]));
    }
    sync_math();
  }
  // The maximum (base 2) of a row, and its sum.
  static __device__ __forceinline__ float2 row_sum(const Shared& shared, const Softmax& state,
                                                   int row) {
    float4 sums = of_warps(shared.sums, row), maxima = of_warps(shared.maxima, row);
    return {maxima.x * state.to_log2, (sums.x + sums.y) + (sums.z + sums.w)};
  }

  // One thread a row finds where its result goes and by what it is multiplied; then each thread
  // writes what it holds.
  struct alignas(16) RowTarget {
    void* to;  // nullptr: a padding row
    float factor;
    DType type;
  };
  static __device__ __forceinline__ void store(const PagedParams& p, const device::KeyTask& task,
                                               const Shared& shared, const Lane& me,
                                               const Softmax& state,
                                               const float (&out)[kPanels][kCount]) {
    using namespace device;
    share_sums(shared, me, state);
#pragma unroll 1
    for (bool keeps = keeps_partition(p, task);; keeps = false) {
      if (me.thread < kRows) {
        UnitRow row = unit_row(p, task.b, task.kv_head, task.row0, me.thread);
        auto [maximum, sum] = row_sum(shared, state, me.thread);
        RowTarget target = {};
        if (row.valid) {
          RowOutput output = keeps ? partition_output(p, task, row, maximum, sum, true)
                                   : task_output(p, task, row, me.thread, maximum, sum, true);
          target = {output.to, output.factor, output.type};
        }
        store_shared16(shared.facts + me.thread * 16, __builtin_bit_cast(uint4, target));
      }
      sync_math();
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        auto target = __builtin_bit_cast(RowTarget, load_shared16(shared.facts + me.row(c) * 16));
#pragma unroll
        for (int i = 0; i < 2 * kPanels; ++i) {
          int column = i / 2 * 64 + i % 2 * 8 + me.key;
          float value = out[i / 2][at(c, i % 2)];
          value = target.factor == 0.0f ? 0.0f : value * target.factor;
          if (target.to != nullptr && column < p.head_dim) {
            if (target.type == DType::f32) {
              static_cast<float*>(target.to)[column] = value;
            } else {
              static_cast<T*>(target.to)[column] = from_float<T>(value);
            }
          }
        }
      }
      sync_math();                          // the next facts come where the targets were
      if (!keeps || task.slot >= 0) break;  // V2: a partition that is all writes the output, too
    }
  }

  // In a cluster a block leaves its part in shared memory, O where K was and the rest where the
  // facts of the rows were, and all blocks merge them.
  static __device__ __forceinline__ device::ClusterParts parts(const Shared& shared) {
    return {shared.k, shared.facts, (kHeadDim + 4) * 4};  // 4 more columns: other banks
  }
  static __device__ __forceinline__ void keep_nothing(const Shared& shared) {
    if (threadIdx.x >= kRows) return;
    device::store_shared(parts(shared).sum(threadIdx.x), float2{device::negative_infinity(), 0.0f});
  }
  static __device__ __forceinline__ void keep(const Shared& shared, const Lane& me,
                                              const Softmax& state,
                                              const float (&out)[kPanels][kCount]) {
    share_sums(shared, me, state);
    device::ClusterParts part = parts(shared);
    if (me.thread < kRows) {
      device::store_shared(part.sum(me.thread), row_sum(shared, state, me.thread));
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < 2 * kPanels; ++i) {
        int column = i / 2 * 64 + i % 2 * 8 + me.key;
        device::store_shared(part.value(me.row(c), column),
                             __float_as_uint(out[i / 2][at(c, i % 2)]));
      }
    }
  }
  static __device__ __forceinline__ void merge(const PagedParams& p, const Shared& shared) {
    device::merge_cluster<kType, kHeadDim, kPagedMaxCluster>(p, paged_item(p.work, task_index()),
                                                             parts(shared), kMathThreads);
  }
};

// 6. Kernel
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    paged_sm90_kernel(const __grid_constant__ PagedParams p,
                      const __grid_constant__ PagedSm90Maps maps) {
  extern __shared__ uint8_t smem[];
  const typename Kernel::Shared shared(smem, p.stages);
  bool copies = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == Kernel::kMathThreads / 32;
  if (threadIdx.x == Kernel::kMathThreads) {
    device::tma_prefetch(&maps.k);
    device::tma_prefetch(&maps.v);
    for (int stage = 0; stage < p.stages; ++stage) {
      device::barrier_init(shared.k_full(stage), 1);
      device::barrier_init(shared.v_full(stage), 1);
      device::barrier_init(shared.k_empty(stage), 4);  // one lane of each math warp
      device::barrier_init(shared.v_empty(stage), 4);
    }
    device::barrier_init_fence();
  }
  __syncthreads();
  if (copies) {
    Kernel::prefetch(p, maps);
    __syncwarp();
    device::wait_for_previous_kernel();
    Kernel::copy(p, maps, shared);
  } else {
    device::wait_for_previous_kernel();
    Kernel::compute(p, shared);
  }
  if constexpr (Kernel::kMerges) {
    device::cluster_sync();
    if (!copies) Kernel::merge(p, shared);
    device::cluster_sync();  // no block ends while others read what it holds
  }
}

// 7. Launcher
template <class Kernel>
void launch_paged_sm90_kernel(const PagedParams& p, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed{0};
  constexpr int kMostStages = paged_sm90_stages(Kernel::kDim, Kernel::kTile, true);
  allow_shared_memory(paged_sm90_kernel<Kernel>, Kernel::smem_bytes(kMostStages), allowed);
  PagedSm90Maps maps;
  maps.piece = std::gcd(p.block_size, Kernel::kTile.n);
  maps.k = paged_cache_map(p, p.k_cache, p.k_strides, maps.piece);
  maps.v = paged_cache_map(p, p.v_cache, p.v_strides, maps.piece);
  const PagedWork& w = p.work;
  dim3 grid, cluster;
  if (Kernel::kMerges) {  // in the order of paged_item
    grid = dim3(head_groups(w), w.num_splits, w.num_seqs);
    cluster.y = w.num_splits;
  } else {
    grid.x = grid_blocks(num_key_tasks(w), "sm90");
  }
  launch_clusters(paged_sm90_kernel<Kernel>, grid, cluster, Kernel::kThreads,
                  Kernel::smem_bytes(p.stages), 9, stream, p, maps);
}

template <DType kType, int kHeadDim>
void launch_paged_sm90(const PagedParams& p, cudaStream_t stream) {
  auto launch_kind = [&]<int kRows, ScoreKind kScore>() {
    if constexpr (paged_sm90_clusters(kHeadDim, kRows)) {
      using Kernel = PagedSm90<kType, kHeadDim, kRows, kScore, true>;
      if (p.work.in_cluster) return launch_paged_sm90_kernel<Kernel>(p, stream);
    }
    launch_paged_sm90_kernel<PagedSm90<kType, kHeadDim, kRows, kScore, false>>(p, stream);
  };
  auto launch_rows = [&]<int kRows>() {
    bool scored = p.softcap > 0.0f || p.alibi_slopes != nullptr || !(p.scale > 0.0f);
    if (scored) return launch_kind.template operator()<kRows, ScoreKind::scored>();
    launch_kind.template operator()<kRows, ScoreKind::identity>();
  };
  if (p.work.rows <= 8) return launch_rows.template operator()<8>();
  if (p.work.rows <= 16) return launch_rows.template operator()<16>();
  if constexpr (paged_sm90_tile(kHeadDim, 64).tile.m == 64) {
    if (p.work.rows > 32) return launch_rows.template operator()<64>();
  }
  launch_rows.template operator()<32>();
}

}  // namespace cuattn
