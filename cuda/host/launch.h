// SPDX-License-Identifier: Apache-2.0
// Host side of a launch: error checks, the shared-memory opt-in, the order of tiles.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuattn/fail.h"
#include "cuattn/params/attention.h"

// Throws CudaError with call, name and text; clears the error so that the next call starts clean.
#define CUATTN_CUDA_TRY(call)                                                                   \
  do {                                                                                          \
    cudaError_t cuattn_status_ = (call);                                                        \
    if (cuattn_status_ != cudaSuccess) {                                                        \
      cudaGetLastError();                                                                       \
      ::cuattn::fail<::cuattn::CudaError>(#call, " failed: ", cudaGetErrorName(cuattn_status_), \
                                          ": ", cudaGetErrorString(cuattn_status_));            \
    }                                                                                           \
  } while (0)

namespace cuattn {

// Lets `kernel` use `smem_bytes` of dynamic shared memory. The attribute is per device and stays,
// so it is set on the first launch only; one flag word per kernel, one bit per device (devices
// beyond 63 set it every time).
// Note: no std::atomic, whose header takes a second to compile.
template <class KernelPointer>
void allow_shared_memory(KernelPointer kernel, int smem_bytes, uint64_t& done) {
  if (smem_bytes <= 48 * 1024) return;  // every device grants this much without asking
  int device = 0;
  CUATTN_CUDA_TRY(cudaGetDevice(&device));
  uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (__atomic_load_n(&done, __ATOMIC_ACQUIRE) & bit) return;
  CUATTN_CUDA_TRY(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes));
  __atomic_fetch_or(&done, bit, __ATOMIC_RELEASE);
}

// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  CUATTN_CUDA_TRY(cudaGetDevice(&device));
  CUATTN_CUDA_TRY(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
inline int device_major() { return device_attribute(cudaDevAttrComputeCapabilityMajor); }
// The most shared memory that a thread block may have.
inline int granted_shared_memory() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

// The widest unit of copy in bytes, up to 16: it divides every address and size whose bits are in
// `starts`.
constexpr int copy_unit(uint64_t starts) {
  return (starts & 15) == 0 ? 16 : static_cast<int>(starts & (~starts + 1) & 15);
}

// Blocks of a one-dimensional grid; every tile, head and sequence is one block, so no axis limit of
// 65,535 applies.
inline unsigned grid_blocks(int64_t blocks, const char* kernel) {
  CUATTN_REQUIRE(blocks <= 0x7fffffff, "attention: backend ", kernel, " would need ", blocks,
                 " thread blocks, a CUDA grid holds 2147483647; split the batch");
  return static_cast<unsigned>(blocks);
}

// Code for sm_80 does not wait for the kernel before it, whatever device its PTX runs on.
inline constexpr bool kKernelsWait = [] {
  for (int arch : {__CUDA_ARCH_LIST__}) {
    if (arch >= 900) return true;
  }
  return false;
}();

// Launches `kernel` so that, from sm_90 on, it may start while the kernel before it on the stream
// still runs; it calls device::wait_for_previous_kernel() before it reads what that one wrote.
// `cluster`: thread blocks that run together; all 1 is none.
template <class... Parameters, class... Arguments>
void launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 cluster, int threads,
                     int smem_bytes, int major, cudaStream_t stream,
                     const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (kKernelsWait && major >= 9) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster.x * cluster.y * cluster.z > 1) {
    cudaLaunchAttribute& together = attributes[config.numAttrs++];
    together.id = cudaLaunchAttributeClusterDimension;
    together.val.clusterDim = {cluster.x, cluster.y, cluster.z};
  }
  CUATTN_CUDA_TRY(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// The same without clusters.
template <class... Parameters, class... Arguments>
void launch_overlapping(void (*kernel)(Parameters...), dim3 grid, int threads, int smem_bytes,
                        int major, cudaStream_t stream, const Arguments&... arguments) {
  launch_clusters(kernel, grid, dim3(), threads, smem_bytes, major, stream, arguments...);
}

}  // namespace cuattn
