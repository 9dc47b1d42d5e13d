// SPDX-License-Identifier: Apache-2.0
// Kernels at fault, each for a tool that must report it.
#include <chrono>
#include <iostream>

#include "cuattn/device/mma_sm90.cuh"
#include "gpu.h"
#include "suite.h"

namespace cuattn::test {
namespace {

using namespace cuattn::device;

__global__ void write_past_the_end(int* out, int count) { out[count + threadIdx.x] = 1; }

__global__ void read_unset(const int* in, int* out) { out[threadIdx.x] = in[threadIdx.x] + 1; }

__global__ void race(int* out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = shared[63 - threadIdx.x];  // written by the other warp, without a barrier
}

__global__ void diverge(int* out) {
  if (threadIdx.x < 33) __syncthreads();  // of the second warp one lane comes
  out[threadIdx.x] = 1;
}

// Waits for an arrival that no thread makes; without the watchdog, and before Hopper, not at all.
__global__ void wait_in_vain() {
#if defined(CUATTN_WATCHDOG) && __CUDA_ARCH__ >= 900
  __shared__ alignas(8) uint64_t barrier;
  if (threadIdx.x == 0) barrier_init(smem_address(&barrier), 1);
  __syncthreads();
  barrier_wait(smem_address(&barrier), 0);
#endif
}

// 0 when a kernel that waits in vain was ended by the watchdog.
int plant_hang() {
  auto begin = std::chrono::steady_clock::now();
  wait_in_vain<<<1, 32>>>();
  cudaError_t status = cudaDeviceSynchronize();
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::cout << "a kernel that waits in vain: " << cudaGetErrorName(status) << " after "
            << seconds.count() << " s\n";
  return status == cudaErrorLaunchFailure || status == cudaErrorIllegalInstruction ? 0 : 1;
}

}  // namespace

int plant_fault(const std::string& tool) {
  OnGpu<int> in(size_t{64}), out(size_t{64});
  if (tool == "memcheck") {
    write_past_the_end<<<1, 1>>>(out.data(), 64);
  } else if (tool == "racecheck") {
    race<<<1, 64>>>(out.data());
  } else if (tool == "initcheck") {
    read_unset<<<1, 64>>>(in.data(), out.data());
  } else if (tool == "synccheck") {
    diverge<<<1, 64>>>(out.data());
  } else if (tool == "watchdog") {
    return plant_hang();
  } else {
    return 2;
  }
  CUDA_OK(cudaGetLastError());
  cudaDeviceSynchronize();  // its error, if any, is the fault
  return 0;
}

}  // namespace cuattn::test
