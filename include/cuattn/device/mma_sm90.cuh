// SPDX-License-Identifier: Apache-2.0
// Hopper's machinery (sm_90a): mbarriers, the tensor memory accelerator (TMA), warpgroup matrix
// products (wgmma), register reallocation. Source: PTX ISA, sections mbarrier,
// cp.async.bulk.tensor, wgmma, setmaxnreg. Every primitive has its test in
// tests/cpp/test_device_sm90.cu; boxes of the TMA have theirs in test_tensor_maps.cu and
// test_page_maps.cu.
//
// A tile in shared memory is made of panels of 64 columns (128 bytes a row), swizzled over 128
// bytes: within each group of 8 rows (1024 bytes, where a panel must begin) the 16-byte chunk c of
// row r lies at chunk c ^ (r & 7). TMA writes it so, wgmma reads it so.
//
//   panel 0: rows x 128 B | panel 1: rows x 128 B | ...
//   address(row, chunk) = panel + row * 128 + ((chunk ^ (row & 7)) << 4)
#pragma once

#include "cuattn/device/mma_sm80.cuh"

namespace cuattn::device {

// 128 opaque bytes that describe a tensor to the TMA; made on the host by cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
  char bytes[128];
};

// ---- mbarriers: a phase ends when `count` arrivals and all expected bytes have come. A wait names
// the parity of the phase: 0 for the first; 1 passes at once on a new barrier.

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once and announces `bytes` that a copy will deliver.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Note: the loop stands inside one asm statement. As a C++ loop it makes ptxas spill and serialise
// wgmma (C7512). Builds with CUATTN_WATCHDOG trap after two seconds instead of hanging.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#ifdef CUATTN_WATCHDOG
  asm volatile(
      "{\n.reg .pred done, late;\n.reg .u64 begin, now;\nmov.u64 begin, %%globaltimer;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\n"
      "mov.u64 now, %%globaltimer;\nsub.u64 now, now, begin;\n"
      "setp.gt.u64 late, now, 2000000000;\n@late trap;\nbra again;\nover:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Of other waits: made before one, asked in its loop.
class Watchdog {
#ifdef CUATTN_WATCHDOG
 public:
  __device__ __forceinline__ void check() const {
    if (now() - begin_ > 2'000'000'000) __trap();
  }

 private:
  static __device__ __forceinline__ uint64_t now() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  }
  uint64_t begin_ = now();
#else
 public:
  __device__ __forceinline__ void check() const {}
#endif
};

// A place in a ring of kCount stages, or of as many as a launch says (kCount 0). Its barriers are
// waited for in the parity of the round: `first_parity` 0 for who waits for what others bring, 1
// for who brings it.
template <int kCount = 0>
class Ring {
 public:
  __device__ explicit Ring(uint32_t first_parity, int count = kCount)
      : count_(count), parity_(first_parity) {}
  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ uint32_t parity() const { return parity_; }
  __device__ __forceinline__ void next() {
    if (++stage_ == count_) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  int stage_ = 0, count_;
  uint32_t parity_;
};

template <>
class Ring<2> {  // both in one register
 public:
  __device__ explicit Ring(uint32_t first_parity) : count_(2 * first_parity) {}
  __device__ __forceinline__ int stage() const { return count_ & 1; }
  __device__ __forceinline__ uint32_t parity() const { return count_ >> 1 & 1; }
  __device__ __forceinline__ void next() { ++count_; }

 private:
  uint32_t count_;
};

// As Ring, in one register, for a few more instructions.
template <int kCount>
class PackedRing {
 public:
  __device__ __forceinline__ explicit PackedRing(uint32_t first_parity) : place_(first_parity) {}
  __device__ __forceinline__ int stage() const { return place_ >> 1; }
  __device__ __forceinline__ uint32_t parity() const { return place_ & 1; }
  __device__ __forceinline__ void next() {
    place_ += 2;
    if (place_ >= 2 * kCount) place_ = (place_ & 1) ^ 1;
  }

 private:
  uint32_t place_;
};

// ---- named barriers (0 is __syncthreads): `threads` counts those that wait and those that only
// arrive.

__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Waits, and says whether `mine` holds for one of them.
__device__ __forceinline__ bool named_barrier_any(uint32_t id, uint32_t threads, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %3, 0;\n"
      "barrier.cta.red.or.pred any, %1, %2, mine;\nselp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return any != 0;
}

// ---- clusters

// All threads of the cluster that have not ended meet; what they wrote before is there behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// What stands at `address` of this thread block's shared memory, in block `rank` of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ float load_cluster(uint32_t address) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ float2 load_cluster2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(v.x), "=f"(v.y)
               : "r"(address)
               : "memory");
  return v;
}

// One lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

// Moves registers between warpgroups; all four warps of a group execute it.
template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- TMA

constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;  // L2: read once
constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;  // L2: read by many CTAs

__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box of a 5-D tensor to shared memory; its bytes are counted on `barrier`. Elements outside
// the tensor are zeros, and count.
__device__ __forceinline__ void tma_load(uint32_t smem, const TensorMap* map, uint32_t barrier,
                                         int32_t c0, int32_t c1, int32_t c2, int32_t c3, int32_t c4,
                                         uint64_t l2_hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(l2_hint)
      : "memory");
}

// Asks L2 for a box.
__device__ __forceinline__ void tma_prefetch_box(const TensorMap* map, int32_t c0, int32_t c1,
                                                 int32_t c2, int32_t c3, int32_t c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// The reverse of tma_load; elements outside the tensor are not written.
__device__ __forceinline__ void tma_store(const TensorMap* map, uint32_t smem, int32_t c0,
                                          int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the sources of all but the newest kPending groups have been read.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Before wgmma or the TMA reads what ordinary stores of this thread wrote to shared memory.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Two transposed: lanes 0 to 15 give the addresses of what were columns.
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t smem, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.x2.trans.m8n8.shared.b16 [%0], {%1, %2};" ::"r"(smem),
               "r"(r0), "r"(r1)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// ---- wgmma: a warpgroup multiplies A (64 x 16, shared memory or registers) by B (16 x N, shared
// memory).

// 64-bit descriptor of a swizzled operand. K-major (the reduction axis is contiguous): groups of 8
// rows are 1024 bytes apart, `leading` is unused. MN-major: `leading` = bytes from one panel of 64
// columns to the next.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t smem, uint32_t leading_bytes) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kStride = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kStride | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         ((smem & 0x3ffff) >> 4);
}
// The descriptor `bytes` further on.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A struct of 32-bit words, two at a time (8-byte aligned).
template <class T>
__device__ __forceinline__ void store_shared(uint32_t smem, const T& value) {
  static_assert(sizeof(T) % 8 == 0);
  union {
    T value;
    uint32_t words[sizeof(T) / 4];
  } u{value};
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / 4; i += 2) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(smem + 4 * i), "r"(u.words[i]),
                 "r"(u.words[i + 1])
                 : "memory");
  }
}
template <class T>
__device__ __forceinline__ void load_shared(T& value, uint32_t smem) {
  static_assert(sizeof(T) % 8 == 0);
  union {
    uint32_t words[sizeof(T) / 4];
    T value;
  } u;
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / 4; i += 2) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(u.words[i]), "=r"(u.words[i + 1])
                 : "r"(smem + 4 * i)
                 : "memory");
  }
  value = u.value;
}

// Waits that follow are not scheduled before `x`, an exponential: a store that never happens, for
// nothing is greater than infinity, stands between.
__device__ __forceinline__ void order_after(float x) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.gt.f32 p, %0, 0f7F800000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(x),
      "r"(0)
      : "memory");
}

// The same number, of which ptxas knows that a warp shares it: descriptors made from it stay in uniform
// registers, where else four instructions may bring them there before each wgmma.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

// A value that the compiler keeps in its register instead of computing it again at every use.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <class T>
__device__ __forceinline__ T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// Registers that a wgmma is about to write, whatever they held: nothing of them is kept until then.
template <int kCount>
__device__ __forceinline__ void claim(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(registers[i])::"memory");
}

// Pins registers that a pending wgmma reads or writes: without it the compiler moves ordinary code
// across.
template <class T, int kCount>
__device__ __forceinline__ void pin(T (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(T) == sizeof(float) && static_cast<T>(0.5f) != T{}) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

}  // namespace cuattn::device
