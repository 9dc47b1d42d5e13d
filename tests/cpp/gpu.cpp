// SPDX-License-Identifier: Apache-2.0
// Problems on the device, and what main.cpp asks of it.
#include "gpu.h"

#include <string_view>

#include "suite.h"
#include "test.h"

namespace cuattn::test {

int count_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

bool device_is_lost() { return settings().gpus > 0 && cudaDeviceSynchronize() != cudaSuccess; }

void release_device() {
  if (settings().gpus > 0) cudaDeviceReset();
}

void* OnDevice::address(Array& array) {
  std::unique_ptr<DeviceMemory>& copy = copies_[&array];
  copy = std::make_unique<DeviceMemory>(array.bytes().size());
  return copy->data() + array.guard_bytes();
}

OnDevice::OnDevice(Problem& problem, const char* backend, cudaStream_t stream, int device)
    : problem_(problem), stream_(stream), tma_stores_(std::string_view(backend) == "sm90") {
  bound_ = std::make_unique<Bound>(
      problem, DLDevice{kDLCUDA, device}, [this](Array& a) { return address(a); }, backend);
  for (Array* input : problem.inputs()) {
    CUDA_OK(cudaMemcpyAsync(copies_[input]->data(), input->bytes().data(), input->bytes().size(),
                            cudaMemcpyHostToDevice, stream_));
  }
  workspace_guard_ = settings().sanitize ? 0 : 2048;
  workspace_ = std::make_unique<DeviceMemory>(bound_->workspace_bytes() + 2 * workspace_guard_);
}

void OnDevice::poison() {
  auto fill = [&](Array& output) {
    CUDA_OK(cudaMemsetAsync(copies_[&output]->data(), 0xff, output.bytes().size(), stream_));
  };
  if (!settings().sanitize || tma_stores_) fill(problem_.out);
  if (settings().sanitize) return;
  fill(problem_.lse_out);
  CUDA_OK(cudaMemsetAsync(workspace_->data(), 0xff, workspace_->bytes(), stream_));
}

void OnDevice::launch() {
  bound_->run({workspace_->data() + workspace_guard_, bound_->workspace_bytes()}, stream_);
}

void OnDevice::download() {
  for (Array* output : {&problem_.out, &problem_.lse_out}) {
    if (output == &problem_.lse_out && !problem_.lse) continue;
    CUDA_OK(cudaMemcpyAsync(output->bytes().data(), copies_[output]->data(), output->bytes().size(),
                            cudaMemcpyDeviceToHost, stream_));
  }
  CUDA_OK(cudaStreamSynchronize(stream_));
}

std::string OnDevice::intact() {
  if (settings().sanitize) return "";
  std::vector<uint8_t> seen;
  for (Array* input : problem_.inputs()) {
    seen.resize(input->bytes().size());
    CUDA_OK(cudaMemcpy(seen.data(), copies_[input]->data(), seen.size(), cudaMemcpyDeviceToHost));
    if (seen != input->bytes()) return "an input was changed [" + problem_.text() + "]";
  }
  seen.resize(workspace_->bytes());
  CUDA_OK(cudaMemcpy(seen.data(), workspace_->data(), seen.size(), cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < workspace_guard_; ++i) {
    if (seen[i] != 0xff || seen[seen.size() - 1 - i] != 0xff)
      return "the workspace was overrun [" + problem_.text() + "]";
  }
  return "";
}

std::string run_on_device(Problem& problem, const char* backend) {
  OnDevice device(problem, backend);
  device.poison();
  device.launch();
  device.download();
  return device.intact();
}

}  // namespace cuattn::test
