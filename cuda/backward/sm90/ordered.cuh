// SPDX-License-Identifier: Apache-2.0
// The order of dQ in the fused pass on Hopper (deterministic=True). Consumers leave their parts of a
// tile of dQ in shared memory, and a thread beside the producer adds them to the sums in bulk when
// the turn of its keys has come: a counter for each tile of rows says how many parts it has got.
//
//   group 0, 1 | part of step 0 -> buffer 0 | of step 1 -> buffer 1 | (0 is empty) of step 2 ..
//   adder      |            | turn of 0? add | turn of 1? add, 0 is there: its counter + 1 | ..
//
// A CTA draws its keys as a ticket and waits for lower tickets alone, so that whatever CTAs are
// resident, one can go on. Heavy keys come first, or last where rows come from the diagonal on: a CTA
// then reaches a tile when the one before has left it. Used by fused.cuh.
#pragma once

#include "cuda/backward/sm90/key_tiles.cuh"

namespace cuattn::backward {

template <class Pass>
__host__ __device__ __forceinline__ int32_t* counters_of(const AttentionParams& f,
                                                         const RowStates& states, float* sums) {
  return reinterpret_cast<int32_t*>(sums + states.pitch * f.num_heads_q * Pass::kDims.qk);
}

// All threads: the work of this CTA, in the order in which CTAs begin.
template <class Shared>
__device__ __forceinline__ int32_t draw_ticket(int32_t* counters, char* smem,
                                               const Shared& shared) {
  device::wait_for_previous_kernel();  // it cleared the counters
  int32_t* drawn =
      reinterpret_cast<int32_t*>(smem + (shared.ticket() - device::smem_address(smem)));
  if (threadIdx.x == 0) *drawn = atomicAdd(counters, 1);
  __syncthreads();
  return __shfl_sync(0xffffffffu, *drawn, 0);  // known to be one for all lanes
}

// One thread, before Shared::init_barriers, whose fence is theirs as well.
template <class Shared>
__device__ __forceinline__ void init_order_barriers(const Shared& shared) {
  if (threadIdx.x != 0) return;
  for (int s = 0; s < 2; ++s) {
    device::barrier_init(shared.part_full(s), kConsumers * 4);
    device::barrier_init(shared.part_empty(s), 1);
  }
  device::barrier_init(shared.crossing_empty(), kConsumers * 4);
}

// threadIdx.x, read again: what follows from it is not held in registers through a loop.
__device__ __forceinline__ uint32_t fresh_thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A group of consumers: its share of a part of dQ, to a buffer in shared memory once that is empty.
template <class Shared, int kCount>
__device__ __forceinline__ void hand_over_part(const Shared& shared, const device::Ring<2>& parts,
                                               int group, const float (&dq)[kCount]) {
  const int part = parts.stage();
  device::barrier_wait(shared.part_empty(part), parts.parity() ^ 1);
  const uint32_t to = shared.part(part) + group * 64 * 64 * 4 + fresh_thread() % 128 * 16;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 2048), "f"(dq[4 * i]),
                 "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                 : "memory");
  }
  device::async_proxy_fence();
  hand_over(shared.part_full(part));
}

// Bulk adds of one thread; the first part of a tile is stored instead.
__device__ __forceinline__ void bulk_store(float* to, uint32_t smem, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(smem), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_add(float* to, uint32_t smem, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(smem), "r"(bytes)
      : "memory");
}
// Until all but the newest kNewest of them are in memory.
template <int kNewest>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNewest) : "memory");
}

// A tile of rows, by the thread whose adds they are: all parts before are there, and what it adds next
// comes after them; this one is there. Note: of lengths that contradict each other two sequences may
// share a counter, which is then past a rank; nobody waits for ever.
__device__ __forceinline__ bool is_turn(const int32_t* counter, int32_t rank) {
  int32_t count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count >= rank;
}
__device__ __forceinline__ void begin_turn() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void end_turn(int32_t* counter) {
  asm volatile("fence.proxy.async;\nred.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter)
               : "memory");
}

// How many parts of a tile come before that of a CTA.
template <class Pass>
struct Ranks {
  int32_t first, last;
  __device__ __forceinline__ Ranks(const AttentionParams& f, const typename Pass::Work& work) {
    constexpr int kRows = Pass::kTile.m, kKeys = Pass::kTile.n;
    static_assert(!Pass::kLastKeysFirst || kRows == kKeys,
                  "a tile of rows on sees one more of keys");
    first = last = work.key0 / kKeys;
    if constexpr (!Pass::kLastKeysFirst) return;
    auto behind = [&](int32_t end) {  // tiles of keys that the last row before `end` sees
      const int32_t row = min(end, work.queries.used) - 1;
      const KeyRange seen =
          visible_keys(Pass::left(f), Pass::right(f), row, work.queries.used, work.keys.used);
      return (seen.end - 1 - work.key0) / kKeys;
    };
    first = behind((work.range.begin + 1) * kRows);
    last = behind(work.queries.used);
  }
  __device__ __forceinline__ int32_t at(int step) const {
    return Pass::kLastKeysFirst ? min(first + step, last) : first;
  }
};

// The adder: one thread. Its registers are few.
template <class Pass>
struct Adder {
  static constexpr uint32_t kBytes = Pass::kPartBytes, kNone = ~0u;

  const typename Pass::Shared& shared;
  int32_t* counters;
  device::Ring<2> ring{0};
  uint32_t owed = kNone;  // the counter of an add that is under way from the other buffer

  // That add is in memory: who waits for it goes on.
  template <int kNewest>
  __device__ __forceinline__ void settle() {
    if (owed == kNone) return;
    bulk_wait<kNewest>();
    end_turn(counters + owed);
    owed = kNone;
    device::barrier_arrive(shared.part_empty(ring.stage() ^ 1));
  }

  __device__ __forceinline__ void run(const AttentionParams& f, const typename Pass::Work& work,
                                      const RowStates& states, float* sums) {
    constexpr int kBlocks = Pass::kTile.m / kOrderRows;
    const int32_t first_head = work.kv_head * work.group;
    const Ranks<Pass> ranks(f, work);
    const int32_t tiles = work.range.end - work.range.begin;
    constexpr bool kMixes = Pass::kMixesHeads;
#pragma unroll 1
    for (int32_t outer = 0; outer < (kMixes ? tiles : work.group); ++outer) {
#pragma unroll 1
      for (int32_t inner = 0; inner < (kMixes ? work.group : tiles); ++inner) {
        const int32_t head = first_head + (kMixes ? inner : outer), step = kMixes ? outer : inner;
        const int32_t tile =
            Pass::kLastRowsFirst ? work.range.end - 1 - step : work.range.begin + step;
        const int64_t place = states.place(f, work.queries, work.batch, head);
        const uint32_t block = static_cast<uint32_t>(place / kOrderRows) + tile * kBlocks;
        const uint32_t counter = kOrderPad + block;
        const int32_t rank = ranks.at(step);
        device::barrier_wait(shared.part_full(ring.stage()), ring.parity());
        const device::Watchdog watchdog;
        while (!is_turn(counters + counter, rank)) {
          settle<0>();
          watchdog.check();
        }
        begin_turn();
        float* to = sums + int64_t{block} * (kOrderRows * Pass::kDims.qk);
        const uint32_t part = shared.part(ring.stage());
        if (rank == 0)
          bulk_store(to, part, kBytes);
        else
          bulk_add(to, part, kBytes);
        settle<1>();
        owed = counter;
        ring.next();
      }
    }
    settle<0>();
  }
};

}  // namespace cuattn::backward
