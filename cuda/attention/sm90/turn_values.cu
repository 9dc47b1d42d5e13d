// SPDX-License-Identifier: Apache-2.0
// Values of e4m3 that lie by rows, turned into columns in the workspace before float8.cuh reads them:
// one pass over memory.
#include "cuattn/device/math.cuh"
#include "cuattn/params/attention.h"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kTurnThreads = 256, kTurnTokens = 128;

// to[batch, head, channel, token] of `pitch` tokens a channel = v[batch, token, head, channel]. A
// block turns 128 tokens of a head. In shared memory each 16 tokens stand a word further on, so that
// 8 lanes, which write 128 bytes of a channel together, read from 8 banks.
__global__ void __launch_bounds__(kTurnThreads)
    turn_values(const char* v, Strides strides, int32_t tokens, int32_t heads, int32_t channels,
                char* to, int64_t pitch) {
  extern __shared__ __align__(16) char tile[];
  const int32_t tiles = device::ceil_div(tokens, kTurnTokens), row_bytes = channels + 4;
  const int32_t first = blockIdx.x % tiles * kTurnTokens, head = blockIdx.x / tiles % heads;
  const int64_t batch = blockIdx.x / tiles / heads;
  auto place = [&](int token) { return tile + token * row_bytes + token / 16 * 4; };
  const char* from = v + batch * strides.batch + head * strides.head;
  const int chunks = channels / 16;
  for (int i = threadIdx.x; i < kTurnTokens * chunks; i += kTurnThreads) {
    int token = i / chunks, chunk = i % chunks;
    uint4 x = {0, 0, 0, 0};
    if (first + token < tokens)
      x = *reinterpret_cast<const uint4*>(from + (first + token) * strides.seq + chunk * 16);
    auto* words = reinterpret_cast<uint32_t*>(place(token) + chunk * 16);
    words[0] = x.x;
    words[1] = x.y;
    words[2] = x.z;
    words[3] = x.w;
  }
  __syncthreads();
  char* rows = to + (batch * heads + head) * channels * pitch + first;
  for (int i = threadIdx.x; i < channels * (kTurnTokens / 16); i += kTurnThreads) {
    int group = i % 8, channel = i / 8;
    if (first + group * 16 >= tokens) continue;  // the pitch is a multiple of 16
    uint32_t words[4] = {};
#pragma unroll
    for (int token = 0; token < 16; ++token) {
      uint32_t byte = static_cast<uint8_t>(place(group * 16 + token)[channel]);
      words[token / 4] |= byte << token % 4 * 8;
    }
    *reinterpret_cast<uint4*>(rows + channel * pitch + group * 16) =
        uint4{words[0], words[1], words[2], words[3]};
  }
}

}  // namespace

void launch_turn_values(AttentionParams& p, void* workspace, cudaStream_t stream) {
  bool ragged = p.cu_seqlens_kv != nullptr;
  int32_t batch = ragged ? 1 : p.batch;
  int64_t tokens = ragged ? p.total_kv : p.seqlen_kv, pitch = column_pitch(tokens);
  int64_t blocks = device::ceil_div<int64_t>(tokens, kTurnTokens) * p.num_heads_kv * batch;
  int smem_bytes = kTurnTokens * (p.head_dim_v + 4) + kTurnTokens / 16 * 4;
  if (blocks > 0) {
    turn_values<<<grid_blocks(blocks, "sm90"), kTurnThreads, smem_bytes, stream>>>(
        static_cast<const char*>(p.v), p.v_strides, static_cast<int32_t>(tokens), p.num_heads_kv,
        p.head_dim_v, static_cast<char*>(workspace), pitch);
    CUATTN_CUDA_TRY(cudaGetLastError());
  }
  p.v = workspace;
  p.v_strides = {p.num_heads_kv * p.head_dim_v * pitch, 1, p.head_dim_v * pitch};
  p.v_channel_stride = pitch;
}

}  // namespace cuattn
