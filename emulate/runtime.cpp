// SPDX-License-Identifier: Apache-2.0
// The runtime functions of the emulated device, and in cuBLAS's place its absence.
#include "emulate/runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "cuattn/error.h"
#include "cuda/host/launchers.h"

namespace emulate {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_text;

constexpr int kMajor = 8, kMinor = 0, kMultiprocessors = 4;
constexpr int kSharedBytes = 163 << 10;  // of a block, as on 8.0
constexpr size_t kGranted = 48 << 10;    // without asking

std::mutex mutex;
std::map<const void*, int>& shared_memory_limits() {
  static auto* limits = new std::map<const void*, int>;
  return *limits;
}

cudaError_t failed(cudaError_t error, const char* text) {
  set_error(error, text);
  return error;
}

}  // namespace

void set_error(cudaError_t error, const std::string& text) {
  last_error = error;
  last_text = text;
}

size_t allowed_shared_memory(const void* kernel) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = shared_memory_limits().find(kernel);
  return found == shared_memory_limits().end() ? kGranted : static_cast<size_t>(found->second);
}

}  // namespace emulate

using emulate::failed;

cudaError_t cudaGetLastError() { return std::exchange(emulate::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return emulate::last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
  }
  return "unknown";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : emulate::last_text.c_str();
}

cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice, "there is one device, 0");
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {"emulated", emulate::kMajor, emulate::kMinor, emulate::kMultiprocessors,
                 emulate::kSharedBytes};
  return cudaSetDevice(device);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = emulate::kMultiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = emulate::kMajor; break;
    case cudaDevAttrComputeCapabilityMinor: *value = emulate::kMinor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emulate::kSharedBytes; break;
  }
  return cudaSetDevice(device);
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*memory != nullptr) std::memset(*memory, 0xff, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return cudaMalloc(memory, bytes);
}
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  return std::memmove(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) {
    std::memmove(static_cast<char*>(to) + row * to_pitch,
                 static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return std::memset(to, value, bytes), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  void* same = const_cast<void*>(pointer);
  *attributes = {cudaMemoryTypeDevice, 0, same, same};
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > emulate::kSharedBytes)
    return failed(cudaErrorInvalidValue, "a block has at most 163 KB of shared memory");
  std::lock_guard<std::mutex> lock(emulate::mutex);
  emulate::shared_memory_limits()[kernel] = value;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  return *attributes = {1024}, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                          size_t smem_bytes) {
  size_t by_memory = emulate::kSharedBytes / std::max<size_t>(smem_bytes, 1);
  *blocks = static_cast<int>(std::min<size_t>(by_memory, 2048 / std::max(threads, 1)));
  return cudaSuccess;
}

// The image is the path of a library (tests/flex/emulated_functor.py builds one).
cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* image, void*, void*, unsigned,
                                void*, void*, unsigned) {
  *library = dlopen(static_cast<const char*>(image), RTLD_NOW | RTLD_LOCAL);
  return *library == nullptr ? failed(cudaErrorInvalidValue, dlerror()) : cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library, const char* name) {
  *kernel = dlsym(library, (std::string(name) + "_emulated").c_str());
  return *kernel == nullptr ? failed(cudaErrorInvalidValue, dlerror()) : cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, int, int value, int) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, value);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  using Launch = void (*)(const cudaLaunchConfig_t*, void**);
  reinterpret_cast<Launch>(const_cast<void*>(kernel))(config, arguments);
  return cudaSuccess;
}

namespace cuattn {

bool cublas_available() { return false; }
void launch_cublas(const AttentionParams&, void*, int, cudaStream_t) {
  CUATTN_ASSERT(false, "the emulator has no cuBLAS");
}
void launch_functor_sm90(const FunctorParams&, int64_t, const AttentionSchedule&, const Plan&, int,
                         cudaStream_t) {
  CUATTN_ASSERT(false, "the emulator has no sm90");
}

}  // namespace cuattn
