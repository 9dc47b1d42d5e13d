// SPDX-License-Identifier: Apache-2.0
// What the backend knows of a device, and how it makes one current.
#pragma once

#include <string>

#include "cuattn/plan.h"
#include "cuda/host/launch.h"

namespace cuattn {

// Makes `device` current for the calling thread, and restores what was.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    CUATTN_CUDA_TRY(cudaGetDevice(&previous_));
    // Setting the device once gives a thread its context, without which the driver makes no tensor
    // maps.
    static thread_local bool has_context = false;
    if (previous_ == device && has_context) {
      previous_ = -1;
    } else {
      CUATTN_CUDA_TRY(cudaSetDevice(device));
      has_context = true;
    }
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// Device properties do not change: asked once per device. Looking for cuBLAS costs a search of the
// file system, so only who wants to know pays for it.
DeviceInfo device_info(int32_t device_id, bool find_libraries);

// JSON object: driver, runtime and every device.
std::string describe();

}  // namespace cuattn
