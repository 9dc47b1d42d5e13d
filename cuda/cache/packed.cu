// SPDX-License-Identifier: Apache-2.0
// mla_write into packed latents of 656 bytes (params/pages.h), quantised on the way: a warp a token,
// 16 columns a lane, so that eight lanes share a scale. Next: cpu/cache.cpp (in plain loops).
#include "cuattn/device/convert.cuh"
#include "cuattn/params/cache.h"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kWarps = 8, kColumns = 16;  // columns of a lane: 32 of its bytes
static_assert(kColumns * 32 == PackedLatent::kLatent && PackedLatent::kScaled % kColumns == 0);

__global__ void __launch_bounds__(kWarps * 32)
    write_packed(const __grid_constant__ CacheWriteParams p) {
  using Packed = PackedLatent;
  using T = device::Element<DType::bf16>;
  const int lane = threadIdx.x % 32;
  int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (token >= p.num_tokens) return;
  int64_t slot = slot_of(p, token);
  if (slot < 0) return;
  const T* gRow = static_cast<const T*>(p.v.rows) + p.v.row(token, 0) + lane * kColumns;
  char* gTo =
      static_cast<char*>(p.v.cache) + p.v.place(slot / p.block_size, slot % p.block_size, 0);
  uint4 raw[2] = {reinterpret_cast<const uint4*>(gRow)[0], reinterpret_cast<const uint4*>(gRow)[1]};
  const T* row = reinterpret_cast<const T*>(raw);
  float x[kColumns], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    x[i] = device::to_float(row[i]);
    largest = fmaxf(largest, fabsf(x[i]));
  }
#pragma unroll
  for (int step = 1; step < Packed::kScaled / kColumns; step *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  float scale = Packed::scale(largest);
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t low = device::pack2_e4m3(__fdiv_rn(x[4 * i], scale), __fdiv_rn(x[4 * i + 1], scale));
    uint32_t high =
        device::pack2_e4m3(__fdiv_rn(x[4 * i + 2], scale), __fdiv_rn(x[4 * i + 3], scale));
    codes[i] = low | high << 16;
  }
  reinterpret_cast<uint4*>(gTo)[lane] = {codes[0], codes[1], codes[2], codes[3]};
  constexpr int kSharers = Packed::kScaled / kColumns;
  if (lane % kSharers == 0)
    reinterpret_cast<float*>(gTo + Packed::kScalesAt)[lane / kSharers] = scale;
  const uint32_t* gRope =
      reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.k.rows) + p.k.row(token, 0));
  reinterpret_cast<uint32_t*>(gTo + Packed::kRopeAt)[lane] = gRope[lane];
}

}  // namespace

void launch_packed_write(const CacheWriteParams& p, cudaStream_t stream) {
  unsigned blocks = grid_blocks((p.num_tokens - 1) / kWarps + 1, "mla_write");
  write_packed<<<blocks, kWarps * 32, 0, stream>>>(p);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
