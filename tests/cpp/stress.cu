// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <thread>

#include "gpu.h"
#include "stress.h"

namespace cuattn::test {
namespace {

using Clock = std::chrono::steady_clock;

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// The CTAs count themselves in device memory: over PCIe, atomics on the host's memory lose counts.
// The last tells the host.
__global__ void hold(unsigned* came, unsigned held, volatile unsigned* all_came,
                     const volatile unsigned* released) {
  const uint64_t begin = nanoseconds();
  if (threadIdx.x == 0 && atomicAdd(came, 1) == held - 1) {
    *all_came = 1;
    __threadfence_system();
  }
  while (*released == 0 && nanoseconds() - begin < 20'000'000'000) __nanosleep(1000);
}

__global__ void compare(const unsigned* x, const unsigned* y, size_t words, unsigned* count) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  unsigned found = 0;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step)
    found += x[i] != y[i];
  if (found > 0) atomicAdd(count, found);
}

// Polls until `is_done`; false after 10 s.
template <class IsDone>
bool comes_true(IsDone is_done) {
  for (auto begin = Clock::now(); !is_done(); std::this_thread::yield())
    if (Clock::now() - begin > std::chrono::seconds(10)) return false;
  return true;
}

}  // namespace

HeldSms::HeldSms(int free) {
  int device = 0, sms = 0, bytes = 0;
  CUDA_OK(cudaGetDevice(&device));
  CUDA_OK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  CUDA_OK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  CUDA_OK(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  CUDA_OK(cudaHostAlloc(&flags_, sizeof(Flags), cudaHostAllocMapped));
  *flags_ = {};
  CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  CUDA_OK(cudaMalloc(&came_, sizeof(unsigned)));
  // In the stream of the launch, which does not wait for the default stream.
  CUDA_OK(cudaMemsetAsync(came_, 0, sizeof(unsigned), stream_));
  const unsigned held = static_cast<unsigned>(sms - free);
  if (held == 0) return;
  hold<<<held, 32, bytes, stream_>>>(came_, held, &flags_->all_came, &flags_->released);
  CUDA_OK(cudaGetLastError());
  const volatile unsigned& all_came = flags_->all_came;
  static bool failed = false;  // once is long enough
  if (failed || !comes_true([&] { return all_came != 0; })) {
    failed = true;
    const_cast<volatile unsigned&>(flags_->released) = 1;
    throw std::runtime_error("the SMs were not held within 10 s");
  }
}

HeldSms::~HeldSms() {
  const_cast<volatile unsigned&>(flags_->released) = 1;
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
  cudaFree(came_);
  cudaFreeHost(flags_);
}

bool HeldSms::ends(cudaStream_t stream) const {
  return comes_true([&] { return cudaStreamQuery(stream) != cudaErrorNotReady; }) &&
         cudaStreamQuery(stream) == cudaSuccess && cudaStreamQuery(stream_) == cudaErrorNotReady;
}

void count_differences(const void* x, const void* y, size_t bytes, unsigned* count,
                       cudaStream_t stream) {
  compare<<<256, 256, 0, stream>>>(static_cast<const unsigned*>(x), static_cast<const unsigned*>(y),
                                   bytes / 4, count);
  CUDA_OK(cudaGetLastError());
}

}  // namespace cuattn::test
