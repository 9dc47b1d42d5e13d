// SPDX-License-Identifier: Apache-2.0
// What the cache operations share: caches as blocks of memory, and data of the device on the host.
#pragma once

#include <initializer_list>
#include <vector>

#include "cuattn/cache_params.h"
#include "validate.h"

namespace cuattn {

constexpr int64_t kGroupBytes = 16;  // x of the vLLM layout, and one 128-bit load

// The pointer, and these of its strides, are multiples of 16 bytes.
void require_aligned(const char* function, const char* argument, const TensorView& view,
                     std::initializer_list<int64_t> strides);

// What an array holds, as the host sees it: itself on the CPU; on CUDA a copy, made only where the
// checks are on, else nothing.
template <class T>
class HostCopy {
 public:
  HostCopy(const Backend& backend, DLDevice device, const T* data, int64_t count, Stream stream)
      : data_(data) {
    if (is_cpu(device) || data == nullptr || count == 0) return;
    copy_.resize(static_cast<size_t>(count));
    bool done =
        checks_device_data() &&
        backend.read_back(copy_.data(), data, copy_.size() * sizeof(T), device.device_id, stream);
    data_ = done ? copy_.data() : nullptr;
  }
  const T* data() const { return data_; }

 private:
  const T* data_;
  std::vector<T> copy_;
};

}  // namespace cuattn
