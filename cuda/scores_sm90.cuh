// SPDX-License-Identifier: Apache-2.0
// The score functor of device/mask.cuh over a whole wgmma accumulator: each option is asked for
// once a tile instead of once a score, and a bias is read in words. Used by prefill_sm90.cuh.
#pragma once

#include "cuattn/device/mask.cuh"

namespace cuattn {

// A bias that a tile reads in pairs of keys: `kBatch` loads are on their way at a time. kWord: two
// elements.
template <class Word, int kCount, class Add>
__device__ __forceinline__ void add_bias_pairs(float (&scores)[kCount], const char* row0,
                                               const char* row1, Add add) {
  constexpr int kBlocks = kCount / 4, kBatch = kBlocks % 4 == 0 ? 4 : 2;  // blocks of 8 keys
  static_assert(kBlocks % kBatch == 0);
#pragma unroll
  for (int begin = 0; begin < kBlocks; begin += kBatch) {
    Word words[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      words[i][0] = __ldg(reinterpret_cast<const Word*>(row0) + (begin + i) * 4);
      words[i][1] = __ldg(reinterpret_cast<const Word*>(row1) + (begin + i) * 4);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float* s = &scores[4 * (begin + i)];
      add(s[0], s[1], words[i][0]);
      add(s[2], s[3], words[i][1]);
    }
  }
}

// scores[i] becomes mod(scores[i], token[i / 2 % 2], key), with key = first + i / 4 * 8 + i % 2.
// Padding is clamped: tokens by the caller, keys to last_key.
template <DType kType, int kCount>
__device__ __forceinline__ void modify_scores(float (&scores)[kCount],
                                              const device::ScoreMod<kType, ScoreKind::scored>& mod,
                                              const int32_t (&token)[2], int32_t first,
                                              int32_t last_key) {
  using namespace device;
  if (mod.softcap > 0.0f) {
    float in = mod.scale * mod.inv_softcap;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // tanh_approx is right to 2^-11 of its result: less than what a bfloat16 score is rounded by.
      float x = scores[i] * in;
      scores[i] = mod.softcap * (kType == DType::bf16 ? tanh_approx(x) : tanh_exp2(x));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] *= mod.scale;
  }
  if (mod.slope != 0.0f) {
    float sign = mod.slope > 0.0f ? -1.0f : 1.0f, base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      base[half] = mod.slope * static_cast<float>(token[half] + mod.diagonal - first);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float distance =
          fmaf(-mod.slope, static_cast<float>((i >> 2) * 8 + (i & 1)), base[i >> 1 & 1]);
      scores[i] = fmaf(sign, fabsf(distance), scores[i]);
    }
  }
  if (mod.bias == nullptr) return;
  int64_t size = mod.bias_dtype == DType::f32 ? 4 : mod.bias_dtype == DType::boolean ? 1 : 2;
  const char* row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    row[half] = mod.bias + (token[half] * mod.bias_stride_q + first) * size;
  bool pairs = mod.bias_stride_kv == 1 && first + kCount * 2 - 7 <= last_key &&
               ((reinterpret_cast<uintptr_t>(row[0]) | reinterpret_cast<uintptr_t>(row[1])) &
                (2 * size - 1)) == 0;
  if (!__all_sync(0xffffffffu, pairs)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int32_t key = first + (i >> 2) * 8 + (i & 1);
      scores[i] = mod.add_bias(scores[i], token[i >> 1 & 1], min(key, last_key));
    }
  } else if (mod.bias_dtype == DType::f32) {
    add_bias_pairs<float2>(scores, row[0], row[1], [](float& a, float& b, float2 x) {
      a += x.x;
      b += x.y;
    });
  } else if (mod.bias_dtype == DType::boolean) {
    add_bias_pairs<uint16_t>(scores, row[0], row[1], [](float& a, float& b, uint16_t x) {
      if ((x & 0xff) == 0) a = negative_infinity();
      if (x < 256) b = negative_infinity();
    });
  } else {
    add_bias_pairs<uint32_t>(scores, row[0], row[1], [](float& a, float& b, uint32_t x) {
      a += to_float(reinterpret_cast<const Element<kType>(&)[2]>(x)[0]);
      b += to_float(reinterpret_cast<const Element<kType>(&)[2]>(x)[1]);
    });
  }
}

}  // namespace cuattn
