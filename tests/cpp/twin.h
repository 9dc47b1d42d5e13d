// SPDX-License-Identifier: Apache-2.0
// An array on both sides, for tests that hold the GPU against the CPU.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "gpu.h"

namespace cuattn::test {

// An array on the host and its copy on the device, with guard bands.
class Twin {
 public:
  Twin(DType dtype, std::initializer_list<int64_t> shape)
      : guard_(settings().sanitize ? 0 : 512),
        dtype_(dtype),
        host_(nullptr, dtype, shape),
        device_(host_) {
    bytes_.assign(static_cast<size_t>(host_.size() * host_.dtype.bits / 8) + 2 * guard_, 0xff);
    memory_ = std::make_unique<DeviceMemory>(bytes_.size());
    host_.data = bytes_.data() + guard_;
    device_.data = memory_->data() + guard_;
    device_.device = {kDLCUDA, 0};
  }

  template <class T>
  T* data() {
    return static_cast<T*>(host_.data);
  }
  int64_t size() const { return host_.size(); }
  const TensorView& on(bool gpu) const { return gpu ? device_ : host_; }
  void upload() {
    CUDA_OK(cudaMemcpy(memory_->data(), bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice));
  }
  // What the device holds.
  std::vector<uint8_t> download() const {
    std::vector<uint8_t> there(bytes_.size());
    CUDA_OK(cudaMemcpy(there.data(), memory_->data(), there.size(), cudaMemcpyDeviceToHost));
    return there;
  }
  bool same() const { return download() == bytes_; }
  int64_t bytes() const { return static_cast<int64_t>(bytes_.size() - 2 * guard_); }
  bool guards_intact(const std::vector<uint8_t>& there) const {
    auto poisoned = [](uint8_t byte) { return byte == 0xff; };
    return std::all_of(there.begin(), there.begin() + guard_, poisoned) &&
           std::all_of(there.end() - guard_, there.end(), poisoned);
  }
  // Element i of both sides, in float.
  std::pair<float, float> both(const std::vector<uint8_t>& there, int64_t i) const {
    return {float_at(bytes_, i), float_at(there, i)};
  }

 private:
  float float_at(const std::vector<uint8_t>& bytes, int64_t i) const {
    const uint8_t* data = bytes.data() + guard_;
    if (dtype_ == DType::f32) return reinterpret_cast<const float*>(data)[i];
    uint16_t half = reinterpret_cast<const uint16_t*>(data)[i];
    return dtype_ == DType::f16 ? f16_value(half) : bf16_value(half);
  }

  size_t guard_;
  DType dtype_;
  TensorView host_, device_;
  std::vector<uint8_t> bytes_;
  std::unique_ptr<DeviceMemory> memory_;
};

inline void fill_normal(Random& random, DType dtype, Twin& twin) {
  for (int64_t i = 0; i < twin.size(); ++i) {
    float value = random.normal();
    if (dtype == DType::f32) twin.data<float>()[i] = value;
    if (dtype == DType::f16) twin.data<uint16_t>()[i] = f16_bits(value);
    if (dtype == DType::bf16) twin.data<uint16_t>()[i] = bf16_bits(value);
  }
}

}  // namespace cuattn::test
