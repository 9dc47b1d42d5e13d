// SPDX-License-Identifier: Apache-2.0
// The tensor-core primitives of sm_80 and later: asynchronous copies, ldmatrix, mma.m16n8k16, and
// the shared-memory swizzle that keeps ldmatrix free of bank conflicts. Source: PTX ISA, warp-level
// matrix instructions.
//
// Fragments of one warp, lane = 4 g + q (g = 0..7, q = 0..3), each register two 16-bit neighbours:
//
//   A 16 x 16 (row major)        B 16 x 8 (column n holds k down)   C 16 x 8 (float)
//   a0: row g,     k 2q..2q+1    b0: k 2q..2q+1,   n = g            c0 c1: row g,     n 2q, 2q+1
//   a1: row g + 8, k 2q..2q+1    b1: k 2q+8..2q+9, n = g            c2 c3: row g + 8, n 2q, 2q+1
//   a2: row g,     k 2q+8..
//   a3: row g + 8, k 2q+8..      Two C blocks (n 0..7, n 8..15) packed pairwise are one A: scores
//   feed P V in place.
#pragma once

#include "cuattn/device/convert.cuh"

namespace cuattn::device {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory; `valid` false writes zeros and reads nothing.
__device__ __forceinline__ void cp_async16(uint32_t smem, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async16(uint32_t smem, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem), "l"(global)
               : "memory");
}

// 8 bytes; `valid` as above.
__device__ __forceinline__ void cp_async8(uint32_t smem, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(smem), "l"(global),
               "r"(valid ? 8 : 0)
               : "memory");
}

// 4 bytes.
__device__ __forceinline__ void cp_async4(uint32_t smem, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's newest groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lanes 8i..8i+7 hold the row addresses of matrix i.
// Volatile: shared memory changes under it, and the compiler must not move it over a barrier.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem));
}

// An 8 x 8 matrix of 16-bit elements, transposed: lane 4g + q has row g, columns 2q and 2q + 1. Two
// n8 halves of an accumulator become a B operand.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ void store_shared(uint32_t smem, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared16(uint32_t smem, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

template <int kBytes>
__device__ __forceinline__ void store_shared_zero(uint32_t smem) {
  static_assert(kBytes == 1 || kBytes == 2, "one element of a cache");
  if constexpr (kBytes == 1) {
    asm volatile("st.shared.b8 [%0], %1;" ::"r"(smem), "h"(uint16_t{0}) : "memory");
  } else {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(smem), "h"(uint16_t{0}) : "memory");
  }
}

__device__ __forceinline__ uint32_t load_shared4(uint32_t smem) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_shared16(uint32_t smem) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(smem)
               : "memory");
  return value;
}

// C += A B in float32.
template <DType kType>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  static_assert(kType == DType::f16 || kType == DType::bf16, "mma.m16n8k16 takes 16-bit types");
  if constexpr (kType == DType::f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile whose rows hold kRowBytes. The chunk
// index is XORed with the row so that 8 consecutive rows of one chunk column fall into 8 different
// bank groups:
//
//   rows of 128 bytes or a multiple: every row starts at bank 0, so XOR with row mod 8;
//   rows of 64 or 192 bytes: odd rows start half a span later, so XOR with (row / 2) mod 4 is
//   enough.
template <int kRowBytes>
CUATTN_HOST_DEVICE constexpr uint32_t swizzled(uint32_t row, uint32_t chunk) {
  static_assert(kRowBytes % 64 == 0, "a row holds whole groups of four chunks");
  return row * kRowBytes + ((chunk ^ (kRowBytes % 128 == 0 ? row & 7 : (row >> 1) & 3)) << 4);
}

}  // namespace cuattn::device
