// SPDX-License-Identifier: Apache-2.0
// Kernels that each break one rule of CUDA, which the emulator must notice, and one that breaks
// none. rules NAME runs one: prints the error of its launch, or the sum of what it has written.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "cuattn/device/mma_sm80.cuh"

using namespace cuattn;
using namespace cuattn::device;

namespace {

constexpr int kThreads = 128;

// Thread i gets what thread kThreads - 1 - i has brought.
template <bool kSyncs>
__global__ void reverse(float* out, const float* in) {
  __shared__ float row[kThreads];
  int i = threadIdx.x;
  row[i] = in[i];
  if (kSyncs) __syncthreads();
  out[i] = row[kThreads - 1 - i];
}

// The same twice over one row: without a barrier between, a warp overtakes the others.
template <bool kSyncs>
__global__ void reverse_twice(float* out, const float* in) {
  __shared__ float row[kThreads];
  int i = threadIdx.x;
  row[i] = in[i];
  __syncthreads();
  float got = row[kThreads - 1 - i];
  if (kSyncs) __syncthreads();
  row[i] = 2 * got;
  __syncthreads();
  out[i] = row[i] / 2 + 0 * got;
}

template <bool kWaits>
__global__ void copy(float* out, const float* in) {
  extern __shared__ __align__(16) float rows[];
  int i = threadIdx.x;
  cp_async16(smem_address(rows + 4 * i), in + 4 * (i % 32), true);
  cp_async_commit();
  if (kWaits) cp_async_wait<0>();
  out[i] = rows[4 * i];
}

__global__ void part(float* out) {
  if (threadIdx.x % 2 == 0) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 2);
  } else {
    out[threadIdx.x] = static_cast<float>(__ballot_sync(0xffffffffu, true));
  }
}

__global__ void outside_of_mask(float* out) {
  out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 0);
}

__global__ void half_a_warp_multiplies(float* out) {
  if (threadIdx.x % 32 >= 16) return;
  float c[4] = {};
  uint32_t a[4] = {};
  mma_m16n8k16<DType::f16>(c, a, 0, 0);
  out[threadIdx.x] = c[0];
}

__global__ void wait_for_nobody(float* out) {
  if (threadIdx.x < 32) asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(64));
  out[threadIdx.x] = 1.0f;
}

__global__ void read_beyond(float* out) {
  extern __shared__ __align__(16) float rows[];
  uint32_t r[4];
  ldmatrix_x4(r, smem_address(rows) + 16 * threadIdx.x);
  out[threadIdx.x] = static_cast<float>(r[0]);
}

__global__ void read_unaligned(float* out) {
  extern __shared__ __align__(16) float rows[];
  out[threadIdx.x] = static_cast<float>(load_shared16(smem_address(rows) + 4).x);
}

__global__ void write_beyond(float* out) {
  extern __shared__ __align__(16) float rows[];
  rows[4 * kThreads] = 1.0f;
  out[threadIdx.x] = 1.0f;
}

}  // namespace

int main(int, char** arguments) {
  float in[kThreads], out[kThreads];
  for (int i = 0; i < kThreads; ++i) in[i] = out[i] = static_cast<float>(i);
  auto is = [&](const char* name) { return std::strcmp(arguments[1], name) == 0; };
  size_t bytes = 16 * kThreads;
  if (is("reverse")) reverse<true><<<1, kThreads>>>(out, in);
  if (is("reverse_twice")) reverse_twice<true><<<1, kThreads>>>(out, in);
  if (is("copy")) copy<true><<<1, kThreads, bytes>>>(out, in);
  if (is("no_barrier")) reverse<false><<<1, kThreads>>>(out, in);
  if (is("no_second_barrier")) reverse_twice<false><<<1, kThreads>>>(out, in);
  if (is("no_wait")) copy<false><<<1, kThreads, bytes>>>(out, in);
  if (is("part")) part<<<1, kThreads>>>(out);
  if (is("outside_of_mask")) outside_of_mask<<<1, kThreads>>>(out);
  if (is("half_a_warp_multiplies")) half_a_warp_multiplies<<<1, kThreads>>>(out);
  if (is("wait_for_nobody")) wait_for_nobody<<<1, kThreads>>>(out);
  if (is("read_beyond")) read_beyond<<<1, kThreads, 256>>>(out);
  if (is("read_unaligned")) read_unaligned<<<1, kThreads, bytes>>>(out);
  if (is("write_beyond")) write_beyond<<<1, kThreads, bytes>>>(out);
  if (is("unasked_memory")) copy<true><<<1, kThreads, 49153>>>(out, in);
  if (is("too_many_threads")) reverse<true><<<1, 1025>>>(out, in);
  cudaError_t error = cudaGetLastError();
  float sum = 0;
  for (float x : out) sum += x;
  if (error == cudaSuccess) std::printf("sum %g\n", sum);
  if (error != cudaSuccess)
    std::printf("%s: %s\n", cudaGetErrorName(error), cudaGetErrorString(error));
}
