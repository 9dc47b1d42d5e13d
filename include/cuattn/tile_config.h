// SPDX-License-Identifier: Apache-2.0
// The tiles of the tensor-core kernels, one row per head size, with their shared-memory arithmetic. Read by the kernels
// (their shapes), by src/plan.cpp (what explain() prints) and by nobody else.
#pragma once

#include "cuattn/params.h"

namespace cuattn {

// What a CTA computes: m query rows against n keys at a time, `stages` K and V tiles in flight, by `warps` warps.
struct Tile {
  int32_t m, n, stages, warps;
};

// Head sizes for which sm80 kernels are compiled; a smaller head runs padded with zeros in shared memory.
struct HeadDims {
  int32_t qk, v;
};
constexpr HeadDims kSm80HeadDims[] = {{32, 32}, {64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};

// Bytes of shared memory: Q, then `stages` tiles of K and of V, 2 bytes an element.
constexpr int32_t sm80_smem_bytes(HeadDims d, Tile tile) {
  return 2 * (tile.m * d.qk + tile.stages * tile.n * (d.qk + d.v));
}

constexpr int32_t kSmemOptinSm80 = 163 * 1024;  // compute capability 8.0: 163 KB per block; 9.0: 227 KB
constexpr int32_t kSmemOptinSm86 = 99 * 1024;   // 8.6, 8.9, 12.0

// `small`: for devices that grant a block only 99 KB. Heads up to 96 fit there as they are.
constexpr Tile sm80_tile(HeadDims d, bool small) {
  if (d.qk <= 64) return {128, 64, 2, 4};   // 64: 16 + 2 * 16 = 48 KB
  if (d.qk <= 96) return {128, 64, 2, 4};   // 96: 24 + 2 * 24 = 72 KB
  if (small) {
    if (d.qk <= 128) return {64, 64, 2, 4};   // 16 + 2 * 32 = 80 KB
    if (d.qk <= 192) return {64, 32, 2, 4};   // 24 + 2 * 24 = 72 KB
    return {64, 32, 2, 4};                    // 32 + 2 * 32 = 96 KB
  }
  if (d.qk <= 128) return {128, 64, 2, 4};  // 32 + 2 * 32 = 96 KB: two CTAs per SM on 9.0
  if (d.qk <= 192) return {128, 64, 1, 8};  // 48 + 48 = 96 KB
  return {128, 64, 1, 8};                   // 64 + 64 = 128 KB
}

}  // namespace cuattn
