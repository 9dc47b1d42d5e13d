// SPDX-License-Identifier: Apache-2.0
// A problem on the device: copies of its arrays, guard bands included, a run, and the way back.
// Next: test_attention.cpp.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "problem.h"

#define CUDA_OK(call) ::cuattn::test::require_success((call), #call)

namespace cuattn::test {

inline void require_success(cudaError_t status, const char* call) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

// cudaMalloc of exactly `bytes`: the sanitizer sees each access past the end.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
    CUDA_OK(cudaMalloc(&data_, bytes == 0 ? 1 : bytes));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// A vector's copy on the device.
template <class T>
struct OnGpu {
  DeviceMemory memory;
  size_t count;

  explicit OnGpu(const std::vector<T>& host) : memory(host.size() * sizeof(T)), count(host.size()) {
    CUDA_OK(cudaMemcpy(memory.data(), host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  explicit OnGpu(size_t count) : memory(count * sizeof(T)), count(count) {}
  T* data() { return reinterpret_cast<T*>(memory.data()); }
  std::vector<T> host() {
    CUDA_OK(cudaGetLastError());
    std::vector<T> copy(count);
    CUDA_OK(cudaMemcpy(copy.data(), memory.data(), count * sizeof(T), cudaMemcpyDeviceToHost));
    return copy;
  }
};

class OnDevice {
 public:
  // Uploads the inputs and prepares the call on `device`, which must be current; throws as prepare
  // does.
  OnDevice(Problem& problem, const char* backend, cudaStream_t stream = nullptr, int device = 0);

  // The outputs and the workspace; not under --sanitize, so that initcheck sees gaps. Yet it does
  // not see what the TMA stores, which is out alone: there the poison shows them.
  void poison();
  void launch();    // asynchronous
  void download();  // waits; fills problem.out and problem.lse_out
  std::string
  intact();  // what was changed that no kernel may touch: inputs, the workspace's guard bands

 private:
  void* address(Array& array);

  Problem& problem_;
  cudaStream_t stream_;
  bool tma_stores_;
  std::map<Array*, std::unique_ptr<DeviceMemory>> copies_;
  std::unique_ptr<Bound> bound_;
  std::unique_ptr<DeviceMemory> workspace_;
  size_t workspace_guard_ = 0;
};

// poison, launch, download, and what intact() says.
std::string run_on_device(Problem& problem, const char* backend);

}  // namespace cuattn::test
