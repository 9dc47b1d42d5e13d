// SPDX-License-Identifier: Apache-2.0
// What a launch asks of the emulated runtime.
#pragma once

#include <cuda_runtime.h>

#include <string>

namespace emulate {

void set_error(cudaError_t error, const std::string& text);
size_t allowed_shared_memory(const void* kernel);

}  // namespace emulate
