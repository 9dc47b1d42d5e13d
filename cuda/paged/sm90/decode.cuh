// SPDX-License-Identifier: Apache-2.0
// Paged attention of one or a few queries on Hopper (sm_90a): float16 and bfloat16, nhd and hnd
// caches with blocks of a multiple of 8 tokens. Memory bound: everything serves that bytes are
// always on their way. Operands are swapped, so that keys fill the 64 rows of a wgmma and the few
// queries its columns: S^T = K Q^T and O^T += V^T P^T, with K and V as they lie in the cache.
// One or two warps copy blocks through the TMA, four multiply. Source: the swap of FlashMLA and
// hpc-ops; PTX ISA, wgmma. Tasks, rows and results: device/paged/tasks.cuh. Storage and copies:
// copy.cuh. Scores and sums: softmax.cuh. Clusters and parts: device/paged/cluster.cuh. Next:
// paged/combine.cu.
//
//   math warps     | softmax of S0 | softmax of S1 | ...
//   tensor cores   | S0 |          | O0 | S1 |     | O1 | S2 | ...      in a cluster one at a time
#pragma once

#include <numeric>

#include "cuattn/device/paged/cluster.cuh"
#include "cuda/host/launch.h"
#include "cuda/paged/sm90/softmax.cuh"

namespace cuattn {

template <DType kType, int kHeadDim, int kRows, ScoreKind kScore, SplitUse kUse>
struct PagedSm90 : PagedSm90Softmax<kType, kHeadDim, kRows, kScore, kUse> {
  // 1. Types and sizes
  using Tiles = PagedSm90Tiles<kType, kHeadDim, kRows, kUse>;
  using Softmaxes = PagedSm90Softmax<kType, kHeadDim, kRows, kScore, kUse>;
  using Softmaxes::kCount, Softmaxes::kColumns, Softmaxes::kExactMaxima, Softmaxes::at,
      Softmaxes::sync_math, Softmaxes::score_tile, Softmaxes::weigh_tile,
      Softmaxes::raise_references, Softmaxes::share_sums, Softmaxes::row_sum;
  using Tiles::kCluster, Tiles::kTile, Tiles::kMathThreads, Tiles::kPanels, Tiles::kPanelBytes,
      Tiles::kStageBytes, Tiles::kRowPanelBytes, Tiles::rank, Tiles::task_index, Tiles::next_task;
  using typename Softmaxes::Lane, typename Softmaxes::RowFacts, typename Softmaxes::Softmax;
  using typename Tiles::Shared;
  using Mma = device::Wgmma<kType, kRows>;
  using T = device::Element<kType>;

  // 2. The math warps. Their softmax: softmax.cuh.
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

  // 0 x NaN is NaN: rows of V that nobody sees become zeros.
  static __device__ __forceinline__ void clear_rows(uint32_t v, int begin, int end) {
    for (int i = threadIdx.x; i < (end - begin) * kPanels * 8; i += kMathThreads) {
      int chunk = i % 8, panel = i / 8 % kPanels, row = begin + i / (8 * kPanels);
      device::store_shared16(v + panel * kPanelBytes + row * 128 + chunk * 16, {});
    }
  }

  // Merges the parts of a split that one block computes one after the other: the same sums in the
  // same order as the blocks of a cluster make.
  struct MergedParts {
    device::MergedRow rows[kColumns];
    float out[kPanels][kCount] = {};

    __device__ __forceinline__ void take(const Shared& shared, const Lane& me, Softmax& state,
                                         float (&part)[kPanels][kCount]) {
      Softmaxes::template share_sums<false>(shared, me, state);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float2 found = row_sum(shared, state.reference[c], state.to_log2, me.row(c));
        device::MergedRow::Weights weights = rows[c].add(found.x, found.y);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& value = part[panel][at(c, half)];
            out[panel][at(c, half)] =
                device::MergedRow::value(weights, out[panel][at(c, half)], value);
            value = 0.0f;
          }
        }
      }
      state.clear();
    }
    // Hands the merged row on as if one softmax had made it. Only one thread of a row keeps the
    // sum, because the epilogue adds the sums of a row's threads.
    __device__ __forceinline__ void give(const Lane& me, Softmax& state,
                                         float (&to)[kPanels][kCount]) const {
      sync_math();  // the next sums go where threads may still read those of the last part
      state.to_log2 = 1.0f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        state.reference[c] = rows[c].maximum;
        state.sum[c] = me.thread < 4 ? rows[c].sum : 0.0f;
      }
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) to[panel][i] = out[panel][i];
      }
    }
  };

  // 3. Main loop, in steps
  // S^T = K Q^T, begun.
  static __device__ __forceinline__ void multiply_qk(uint64_t q_desc, uint64_t k,
                                                     float (&scores)[kCount]) {
    using namespace device;
    pin(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      Mma::template ss<0>(scores, advance(k, step / 4 * kPanelBytes + step % 4 * 32),
                          advance(q_desc, step / 4 * kRowPanelBytes + step % 4 * 32), step != 0);
    }
    wgmma_commit();
  }

  // O^T += V^T P^T, begun.
  static __device__ __forceinline__ void multiply_pv(uint64_t p_desc, uint64_t v_desc, int stage,
                                                     float (&out)[kPanels][kCount]) {
    using namespace device;
    uint64_t v = advance(v_desc, stage * kStageBytes);
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
  }

  // Zeros for the values of an edge tile that nobody sees; it begins with `first_key`, and `left` of
  // its keys are the task's.
  static __device__ __forceinline__ void clear_unseen(const Shared& shared,
                                                      const device::Ring<>& ring,
                                                      const device::KeyTask& task,
                                                      int32_t first_key, int32_t left) {
    uint32_t v = shared.v + ring.stage() * kStageBytes;
    device::barrier_wait(shared.v_full(ring.stage()), ring.parity());  // others wait later
    clear_rows(v, 0, min(task.low - first_key, kTile.n));
    clear_rows(v, left, kTile.n);
  }

  // Writes P and adds its sums. `first`: the tile is the task's first.
  static __device__ __forceinline__ void weigh(const Shared& shared, const Lane& me, bool first,
                                               Softmax& state, float (&scores)[kCount],
                                               float (&out)[kPanels][kCount]) {
    using namespace device;
    float sums[kColumns];
    if constexpr (kExactMaxima) {
      raise_references(shared, me, state, scores, out);
      weigh_tile(shared, me, state, scores, sums);
      async_proxy_fence();  // P, and the cleared rows
      sync_math();
    } else {
      bool raises = first;
      do {
        if (raises) raise_references(shared, me, state, scores, out);
        bool exceeds = weigh_tile(shared, me, state, scores, sums);
        async_proxy_fence();
        raises = named_barrier_any(1, kMathThreads, exceeds);
      } while (raises);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) state.sum[c] += sums[c];
  }

  // Whether there was a task; `task` is the last, which a cluster merges.
  static __device__ __forceinline__ bool compute(const PagedParams& p, const Shared& shared,
                                                 device::KeyTask& task) {
    using namespace device;
    const Lane me;
    const uint64_t q_desc = wgmma_descriptor(shared.q, 0), p_desc = wgmma_descriptor(shared.p, 0);
    const uint64_t k_desc = wgmma_descriptor(shared.k, 0);
    const uint64_t v_desc = wgmma_descriptor(shared.v, kPanelBytes);
    Ring ring(0, p.stages);
    KeyTasks tasks(p.work, task_index(p.work));
    bool had_task = false;
    while (next_task(p.work, tasks, task)) {
      had_task = true;
      load_rows(p, task, shared);
      Softmax state(p);
      float out[kPanels][kCount] = {};
      MergedParts merged;
      // Every row sees all keys of [full_begin, full_end).
      const PagedWork& w = p.work;
      int32_t full_end = min(task.end, w.mask.visible(0, w.q_len, task.context).end);
      int32_t full_begin = w.mask.visible(w.q_len - 1, w.q_len, task.context).begin;
      int32_t first_key = task.begin, left = task.end - task.begin;
      uint32_t last_v_empty = 0, last_parity = 0;
      float scores[kCount];
      auto start_scores = [&] {
        uint64_t k = advance(k_desc, ring.stage() * kStageBytes);
        barrier_wait(shared.k_full(ring.stage()), ring.parity());
        multiply_qk(q_desc, k, scores);
      };
      // With `kMore` the scores of the next tile are on their way while O of this one is.
      auto add_tile = [&]<bool kMore>() {
        wgmma_wait<0>();
        pin(scores);
        if (me.lane == 0) barrier_arrive(shared.k_empty(ring.stage()));

        bool edge = full_end - first_key < kTile.n || first_key < full_begin;
        score_tile(p, shared, me, first_key, edge, scores);
        if (edge) clear_unseen(shared, ring, task, first_key, left);
        bool first = first_key == task.begin;
        if (!first) barrier_wait(last_v_empty, last_parity);  // all warps have read the last P
        weigh(shared, me, first, state, scores, out);
        barrier_wait(shared.v_full(ring.stage()), ring.parity());
        multiply_pv(p_desc, v_desc, ring.stage(), out);
        last_v_empty = shared.v_empty(ring.stage());
        last_parity = ring.parity();
        ring.next();
        if constexpr (kMore) start_scores();
        wgmma_wait<kMore ? 1 : 0>();
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) pin(out[panel]);
        if (me.lane == 0) barrier_arrive(last_v_empty);
        if constexpr (kUse == SplitUse::in_parts) {
          if (!kMore || (first_key + kTile.n) % kPagedPartKeys == 0) {
            merged.take(shared, me, state, out);
          }
        }
      };
      if constexpr (kCluster) {  // few tiles: less code to fetch counts for more
#pragma unroll 1
        for (; left > 0; left -= kTile.n, first_key += kTile.n) {
          start_scores();
          add_tile.template operator()<false>();
        }
      } else if (left > 0) {
        start_scores();
#pragma unroll 1
        for (; left > kTile.n; left -= kTile.n, first_key += kTile.n) {
          add_tile.template operator()<true>();
        }
        add_tile.template operator()<false>();
      }
      if constexpr (kCluster) {
        keep(shared, me, state, out);
      } else {
        if constexpr (kUse == SplitUse::in_parts) merged.give(me, state, out);
        store(p, task, shared, me, state, out);
      }
    }
    return had_task;
  }

  // 4. Epilogue. One thread a row finds where its result goes and by what it is multiplied; then
  // each thread writes what it holds.
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
      sync_math();  // the next unit writes the facts of its rows where the targets were
      if (!keeps || task.slot >= 0) break;  // V2 with a single partition writes out as well
    }
  }

  // In a cluster each block leaves its part in shared memory, O in the place of K, sum and maximum
  // in that of the facts of the rows; then all blocks merge the parts.
  static __device__ __forceinline__ device::ClusterParts parts(const Shared& shared) {
    return {shared.k, shared.facts, (kHeadDim + 4) * 4};  // 4 more columns: other banks
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
  static __device__ __forceinline__ void merge(const PagedParams& p, const device::KeyTask& task,
                                               const Shared& shared) {
    device::merge_cluster<kType, kHeadDim, kPagedMaxCluster>(p, task, parts(shared), rank(p.work),
                                                             kMathThreads);
  }
};

// 5. Kernel
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    paged_sm90_kernel(const __grid_constant__ PagedParams p,
                      const __grid_constant__ PagedSm90Maps maps) {
  extern __shared__ uint8_t smem[];
  const typename Kernel::Shared shared(smem, p.stages);
  int copy_warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - Kernel::kMathThreads / 32;
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
  [[maybe_unused]] device::KeyTask task;
  [[maybe_unused]] bool had_task = false;
  if (copy_warp >= 0) {
    typename Kernel::Copies copies(copy_warp);
    Kernel::prefetch(p, maps, copies);
    __syncwarp();
    device::wait_for_previous_kernel();
    Kernel::copy(p, maps, shared, copies);
  } else {
    device::wait_for_previous_kernel();
    had_task = Kernel::compute(p, shared, task);
  }
  if constexpr (Kernel::kCluster) {
    device::cluster_sync();
    if (had_task) Kernel::merge(p, task, shared);
    device::cluster_sync();  // no block ends while others read what it holds
  }
}

// 6. Launcher
template <class Kernel>
void launch_paged_sm90_kernel(const PagedParams& p, cudaStream_t stream) {
  static uint64_t allowed = 0;
  constexpr int kMostStages = paged_sm90_stages(Kernel::kDim, Kernel::kTile, true);
  allow_shared_memory(paged_sm90_kernel<Kernel>, Kernel::smem_bytes(kMostStages), allowed);
  PagedSm90Maps maps;
  maps.piece = std::gcd(p.pages.block_size, Kernel::kTile.n);
  maps.k = paged_cache_map(p, p.k_cache, p.k_strides, maps.piece);
  maps.v = paged_cache_map(p, p.v_cache, p.v_strides, maps.piece);
  const PagedWork& w = p.work;
  dim3 grid, cluster;
  if (Kernel::kCluster) {  // in the order of paged_item
    grid = dim3(head_groups(w), w.num_splits * w.cluster, w.num_seqs);
    cluster.y = w.cluster;
  } else {
    grid.x = grid_blocks(num_key_tasks(w), "sm90");
  }
  PagedParams params = p;
  if (p.pages.packed_rows > 0) params.pages.num_blocks = 1;
  launch_clusters(paged_sm90_kernel<Kernel>, grid, cluster, Kernel::kThreads,
                  Kernel::smem_bytes(p.stages), 9, stream, params, maps);
}

template <DType kType, int kHeadDim, int kHeadDimV>
void launch_paged_sm90(const PagedParams& p, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  auto launch_kind = [&]<int kRows, ScoreKind kScore>() {
    auto launch = [&]<SplitUse kUse>() {
      launch_paged_sm90_kernel<PagedSm90<kType, kHeadDim, kRows, kScore, kUse>>(p, stream);
    };
    if constexpr (paged_sm90_clusters(kHeadDim, kRows)) {
      if (p.work.cluster > 1) return launch.template operator()<SplitUse::by_cluster>();
      if (p.work.in_parts) return launch.template operator()<SplitUse::in_parts>();
    }
    launch.template operator()<SplitUse::whole>();
  };
  auto launch_rows = [&]<int kRows>() {
    if (p.scores.scored()) return launch_kind.template operator()<kRows, ScoreKind::scored>();
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
