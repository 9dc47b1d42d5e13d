// SPDX-License-Identifier: Apache-2.0
// The facts of a device: its properties, and whether this build has code for it.
#include <cuda_runtime.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "cuattn/error.h"
#include "cuda/backend/device.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

// Compiled for every architecture of the portable kernels, to ask whether a device runs any of
// their codes.
__global__ void probe_kernel() {}

// Whether machine code for a device is among `archs`, as "80,90,90-ptx": that of its major version,
// up to its minor one. Note: what the driver has compiled from PTX does not count, though it calls
// itself machine code; the kernels of sm90 exist where 90 is listed.
constexpr bool has_machine_code(const char* archs, int32_t major, int32_t minor) {
  bool found = false;
  while (*archs != '\0') {
    int32_t arch = 0;
    for (; *archs >= '0' && *archs <= '9'; ++archs) arch = 10 * arch + (*archs - '0');
    bool is_real = *archs == ',' || *archs == '\0';
    found = found || (is_real && arch / 10 == major && arch % 10 <= minor);
    while (*archs != '\0' && *archs++ != ',') {
    }
  }
  return found;
}
static_assert(has_machine_code("80,90,90-ptx", 9, 0) && has_machine_code("80,90", 8, 6));
static_assert(!has_machine_code("80,90-ptx", 9, 0) && !has_machine_code("90-ptx,80", 9, 0));
static_assert(!has_machine_code("86", 8, 0) && !has_machine_code("90", 10, 0));
static_assert(has_machine_code("100", 10, 3) && !has_machine_code("", 8, 0));

// 1: machine code for the device is in the build; 0: PTX that the driver compiles; -1: neither, or
// no driver.
int32_t native_code(int32_t major, int32_t minor) {
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return -1;
  }
  return has_machine_code(CUATTN_ARCHS_OF_EACH, major, minor) ? 1 : 0;
}

DeviceInfo query_device(int32_t device_id) {
  DeviceGuard guard(device_id);
  DeviceInfo info{};
  info.is_cuda = true;
  info.id = device_id;
  cudaDeviceProp properties;
  CUATTN_CUDA_TRY(cudaGetDeviceProperties(&properties, device_id));
  info.major = properties.major;
  info.minor = properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.smem_per_block_optin = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  info.native = native_code(properties.major, properties.minor);
  info.has_cublas = false;
  std::memcpy(info.name, properties.name, sizeof(info.name) - 1);  // shortened to fit
  return info;
}

constexpr int kMaxDevices = 64;

std::string version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

}  // namespace

DeviceInfo device_info(int32_t device_id, bool find_libraries) {
  static std::mutex mutex;
  static DeviceInfo cache[kMaxDevices];
  static std::atomic<bool> ready[kMaxDevices];
  CUATTN_REQUIRE(device_id >= 0 && device_id < kMaxDevices, "attention: device cuda:", device_id,
                 " is out of range; use one of the first ", kMaxDevices);
  if (!ready[device_id].load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!ready[device_id].load(std::memory_order_relaxed)) {
      cache[device_id] = query_device(device_id);
      ready[device_id].store(true, std::memory_order_release);
    }
  }
  DeviceInfo info = cache[device_id];
  info.has_cublas = find_libraries && cublas_available();
  return info;
}

std::string describe() {
  int driver = 0, runtime = 0, count = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) count = 0;
  cudaGetLastError();
  std::string devices;
  for (int id = 0; id < count; ++id) {
    DeviceInfo info = device_info(id, false);
    devices +=
        concat(id > 0 ? ", " : "", "{\"id\": ", id, ", \"name\": \"", info.name,
               "\", \"compute_capability\": \"", info.major, ".", info.minor,
               "\", \"sms\": ", info.num_sms,
               ", \"shared_memory_per_block\": ", info.smem_per_block_optin, ", \"code\": \"",
               info.native > 0    ? "native"
               : info.native == 0 ? "ptx"
                                  : "unsupported",
               "\"}");
  }
  return concat("{\"driver\": \"", driver > 0 ? version_text(driver) : "none",
                "\", \"runtime\": \"", version_text(runtime), "\", \"status\": \"",
                cudaGetErrorName(status), "\", \"cublas\": ", cublas_available() ? "true" : "false",
                ", \"devices\": [", devices, "]}");
}

}  // namespace cuattn
