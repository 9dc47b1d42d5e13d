// SPDX-License-Identifier: Apache-2.0
// What the Hopper tests share: a tile of panels in shared memory, as mma_sm90.cuh describes it.
// Next: test_device_sm90.cu, tma_tiles.cuh.
#pragma once

#include "cuattn/device/mma_sm90.cuh"
#include "cuattn/error.h"  // attention.h leaves its exceptions out under CUATTN_INTERNAL
#include "gpu.h"
#include "test.h"

namespace cuattn::test {

inline void require_hopper() {
  int major = 0, minor = 0;
  CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CUDA_OK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  if (major != 9 || minor != 0) skip("needs compute capability 9.0");
}

template <class Kernel>
void allow(Kernel kernel, int smem_bytes) {
  CUDA_OK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes));
}

// Panels: elements of 2 bytes, 64 columns each, 128-byte swizzle.
constexpr int kPanelColumns = 64;
constexpr int kAlignment =
    1024;  // of a panel; dynamic shared memory itself is only 16-byte aligned

// The place of an element in a tile of panels with `rows` rows, counted in elements.
CUATTN_HOST_DEVICE int panel_at(int row, int column, int rows) {
  int panel = column / kPanelColumns, chunk = column % kPanelColumns / 8;
  return (panel * rows + row) * kPanelColumns + ((chunk ^ (row & 7)) << 3) + column % 8;
}

CUATTN_HOST_DEVICE constexpr int tile_bytes(int rows, int panels) {
  return panels * rows * kPanelColumns * 2;
}

__device__ __forceinline__ uint16_t* aligned_smem() {
  extern __shared__ char smem[];
  uint32_t misaligned = device::smem_address(smem) % kAlignment;
  return reinterpret_cast<uint16_t*>(smem + (misaligned == 0 ? 0 : kAlignment - misaligned));
}

}  // namespace cuattn::test
