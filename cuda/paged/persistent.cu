// SPDX-License-Identifier: Apache-2.0
// Paged attention in a kernel that stays on the device. Its thread blocks take items (one split of
// one unit) from a queue, step after step, until the host says stop or posts no step for idle_ns.
// The work on an item is that of paged/sm80/decode.cuh; who finishes a unit merges its parts.
//
//   host                      block that took item 0 of step s     block that took another item
//   posted = s + 1 --sys-->   posted > s, and completed = s
//                             grows the contexts
//                             opened = s + 1                       --gpu--> opened > s
//                             item, parts_done, merge              item, parts_done, merge
//                             finished += 1                        finished += 1
//   done > s       <--sys--   who finished the last item of the step: done = s + 1,
//                             then completed = s + 1               --gpu--> item 0 of s + 1
//
// Memory order. Every arrow is a release by one thread and an acquire by another, of the scope
// written on it, and __syncthreads() carries it to the other threads of both blocks; so is every
// addition to parts_done and finished (acq_rel). Order is transitive: what the host wrote before
// `posted` is seen by all blocks of the step, and what they wrote is seen by whoever saw `done`.
// `completed` comes after `done`, so that the next step's `done` cannot be overtaken by this one's.
//
// It cannot hang, however many blocks are resident. A block waits for the host, for an earlier step
// to be opened or completed, or for its own step to be opened. Items are taken in order by blocks
// that run, so all that a block waits for is in the hands of running blocks, down to the one that
// waits for the host; and that one gives up after idle_ns and ends the kernel.
// Next: src/paged/persistent.cpp (the host's side).
#include <algorithm>

#include "cuattn/device/paged/combine.cuh"
#include "cuattn/params/persistent.h"
#include "cuda/host/launchers.h"
#include "cuda/paged/sm80/decode.cuh"

namespace cuattn {
namespace {

constexpr int kHeadDim = 128, kRows = 8;

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ void store_release(uint64_t* to, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// The value after the addition of 1.
__device__ __forceinline__ uint64_t count(uint64_t* at) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(at) : "memory");
  return before + 1;
}

__device__ __forceinline__ uint32_t count(uint32_t* at) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
  return before + 1;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// 3. Roles. One thread: waits until `steps` steps are opened; false: the kernel ends.
__device__ bool wait_opened(const PersistentQueue& queue, uint64_t steps) {
  uint64_t opened;
  do {
    opened = load_acquire(&queue.opened);
  } while (opened < steps);
  return opened != PersistentQueue::kEnd;
}

__device__ bool end_kernel(const PersistentParams& s, PersistentMailbox::Ended why) {
  store_release_system(&s.mailbox->ended, why);
  store_release(&s.queue->opened, PersistentQueue::kEnd);
  return false;
}

// The thread that opens `step`: waits until the host has posted it and the one before is completed.
// Only one block at a time reads host memory here.
__device__ bool wait_posted(const PersistentParams& s, uint64_t step) {
  if (!wait_opened(*s.queue, step)) return false;
  uint64_t posted = 0, idle_since = 0;
  for (;;) {
    if (posted <= step) posted = load_acquire_system(&s.mailbox->posted);
    if (load_acquire(&s.queue->completed) < step) continue;
    if (posted == PersistentMailbox::kStop) return end_kernel(s, PersistentMailbox::kStopped);
    if (posted > step) return true;
    uint64_t now = nanoseconds();
    if (idle_since == 0) idle_since = now;
    if (static_cast<int64_t>(now - idle_since) > static_cast<int64_t>(s.idle_ns)) {
      return end_kernel(s, PersistentMailbox::kIdle);
    }
  }
}

// All threads: `step` may be worked on, or false.
__device__ bool begin_step(const PersistentParams& s, uint64_t step, bool opens) {
  bool live = true;
  if (threadIdx.x == 0) {
    live = opens ? wait_posted(s, step) : wait_opened(*s.queue, step + 1);
  }
  if (!__syncthreads_and(live)) return false;
  if (!opens) return true;
  const PagedWork& w = s.paged.work;
  for (int32_t b = threadIdx.x; s.grow > 0 && b < w.num_seqs; b += blockDim.x) {
    int64_t length = int64_t{s.context_lens[b]} + s.grow;
    s.context_lens[b] = static_cast<int32_t>(length < w.capacity ? length : w.capacity);
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release(&s.queue->opened, step + 1);
  return true;
}

// 5. Epilogue: the block that brings the last part of a unit merges it, as combine.cu does.
template <DType kType>
__device__ void end_unit(const PersistentParams& s, const PagedItem& item,
                         device::CombineShared (&shared)[kRows]) {
  const PagedParams& p = s.paged;
  const PagedWork& w = p.work;
  PagedSplits splits = paged_splits(w, paged_span(w, item.b));
  bool has_part = item.split >= splits.first && item.split < splits.first + splits.count;
  if (!has_part || splits.count == 1) return;
  __shared__ bool is_last;
  __syncthreads();  // the part is written
  if (threadIdx.x == 0) {
    uint32_t* parts_done = reinterpret_cast<uint32_t*>(s.queue + 1) +
                           int64_t{item.b} * head_groups(w) + item.head_group;
    is_last = count(parts_done) == static_cast<uint32_t>(splits.count);
    if (is_last) *parts_done = 0;  // for the next step, which is opened after this one
  }
  __syncthreads();
  if (!is_last) return;
  PagedSlots slots = paged_slots(w, item.b, item.head_group);
  auto row_at = [&](int32_t row) {
    return device::unit_row(p, item.b, item.head_group / w.row_groups,
                            item.head_group % w.row_groups * w.rows, row);
  };
  auto share_of = [&](int32_t row) {  // a row of padding has no parts
    device::RowParts<kType, device::Parts::partial> parts{p, slots, row, 0};
    return device::CombineShare<kType, device::Parts::partial>(
        p, parts, row_at(row).valid ? slots.count : 0, 0, threadIdx.x / 32);
  };
  for (int32_t row = 0; row < w.rows; row += 2) {  // two rows' loads are on their way at once
    auto even = share_of(row), odd = share_of(row + 1);
    even.put(shared[row]);
    odd.put(shared[row + 1]);
  }
  __syncthreads();
  for (int32_t row = threadIdx.x / 32; row < w.rows; row += device::kCombineWarps) {
    device::UnitRow at = row_at(row);
    if (at.valid) device::finish_row<kType>(p, shared[row], item.b, at, 0);
  }
}

// 6. Kernel
template <class Kernel, DType kType>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    paged_persistent(const __grid_constant__ PersistentParams s) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ unsigned long long taken;
  const uint64_t items = num_key_tasks(s.paged.work);
#pragma unroll 1
  for (;;) {
    if (threadIdx.x == 0) {
      taken = atomicAdd(reinterpret_cast<unsigned long long*>(&s.queue->taken), 1ull);
    }
    __syncthreads();
    uint64_t step = taken / items;
    uint32_t index = static_cast<uint32_t>(taken % items);
    if (!begin_step(s, step, index == 0)) return;
    Kernel::run(s.paged, smem, index);
    // The stages are free now.
    end_unit<kType>(s, paged_item(s.paged.work, index),
                    *reinterpret_cast<device::CombineShared(*)[kRows]>(smem));
    __syncthreads();  // the results are written
    if (threadIdx.x == 0 && count(&s.queue->finished) == (step + 1) * items) {
      store_release_system(&s.mailbox->done, step + 1);
      store_release(&s.queue->completed, step + 1);
    }
  }
}

// 7. Launcher. The grid is resident as a whole: more blocks would only begin when others end.
template <DType kType>
void launch(const PersistentParams& s, cudaStream_t stream) {
  using Kernel = PagedSm80<kType, kHeadDim, kRows, false>;
  static_assert(Kernel::kWarps == device::kCombineWarps && kHeadDim <= device::kCombineColumns &&
                kRows * sizeof(device::CombineShared) <= Kernel::kStagesBytes);
  auto kernel = paged_persistent<Kernel, kType>;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, Kernel::kSmemBytes, allowed);
  int device = 0, num_sms = 0, per_sm = 0;
  CUATTN_CUDA_TRY(cudaGetDevice(&device));
  CUATTN_CUDA_TRY(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  CUATTN_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, Kernel::kThreads,
                                                                Kernel::kSmemBytes));
  int64_t blocks = std::min(num_key_tasks(s.paged.work), int64_t{num_sms} * per_sm);
  kernel<<<grid_blocks(blocks, "persistent"), Kernel::kThreads, Kernel::kSmemBytes, stream>>>(s);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace

void launch_paged_persistent(const PersistentParams& s, cudaStream_t stream) {
  CUATTN_CUDA_TRY(cudaMemsetAsync(s.queue, 0, persistent_queue_bytes(s.paged.work), stream));
  switch (s.paged.kv_dtype) {
    case DType::f16: return launch<DType::f16>(s, stream);
    case DType::bf16: return launch<DType::bf16>(s, stream);
    default: CUATTN_ASSERT(false, "PersistentDecode: dtype ", static_cast<int>(s.paged.kv_dtype));
  }
}

}  // namespace cuattn
