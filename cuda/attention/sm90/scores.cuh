// SPDX-License-Identifier: Apache-2.0
// The score functor of device/mask.cuh over a whole wgmma accumulator: each option is asked for
// once a tile instead of once a score. A bias of 16-bit elements comes through shared memory, a
// tile ahead; any other is read from where it lies. Used by forward.cuh.
#pragma once

#include "cuattn/device/mask.cuh"
#include "cuattn/device/mma_sm90.cuh"

namespace cuattn {

// A tile of a bias in shared memory: panels of 64 keys (panel, row, 64), as the TMA swizzles them.
template <DType kType, int kRows, int kKeys>
struct BiasTile {
  static constexpr int kPanels = (kKeys + 63) / 64, kBytes = kPanels * kRows * 128;
  static_assert(kKeys % 16 == 0);

  // scores[i] * factor + bias, of row `row` + i / 2 % 2 * 8 and key i / 4 * 8 + i % 2 past those of
  // the lane.
  static __device__ __forceinline__ void add(float (&scores)[kKeys / 2], float factor,
                                             uint32_t smem, int row) {
    using namespace device;
    int lane = threadIdx.x % 32, upper = lane / 16;
    row += lane % 16;
#pragma unroll
    for (int chunk = 0; chunk < kKeys / 8; chunk += 2) {  // of 8 keys
      uint32_t words[4];
      ldmatrix_x4(words, smem + chunk / 8 * kRows * 128 + swizzled<128>(row, chunk % 8 + upper));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* s = &scores[4 * chunk + 2 * i];
        const auto& bias = reinterpret_cast<const Element<kType>(&)[2]>(words[i]);
        s[0] = fmaf(s[0], factor, to_float(bias[0]));
        s[1] = fmaf(s[1], factor, to_float(bias[1]));
      }
    }
  }
};

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

template <int kCount>
__device__ __forceinline__ void multiply(float (&scores)[kCount], float factor) {
  if (factor == 1.0f) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] *= factor;
}

// scores[i] times the factor that is returned becomes mod(scores[i], token + i / 2 % 2 * 8, key),
// with key = first + i / 4 * 8 + i % 2, but for the bias.
template <DType kType, int kCount>
__device__ __forceinline__ float modify_scores(
    float (&scores)[kCount], const device::ScoreMod<kType, ScoreKind::scored>& mod, int32_t token,
    int32_t first) {
  using namespace device;
  if (mod.softcap <= 0.0f && mod.slope == 0.0f) return mod.scale;
  if (mod.softcap > 0.0f) {
    float in = mod.scale * mod.inv_softcap;
    if (kType == DType::f16 && mod.softcap > kLargeSoftcap) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) scores[i] = mod.softcap * tanh_of_small(scores[i] * in);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        // tanh_approx is right to 2^-11 of its result: less than what a bfloat16 score is rounded
        // by.
        float x = scores[i] * in;
        scores[i] = mod.softcap * (kType == DType::bf16 ? tanh_approx(x) : tanh_exp2(x));
      }
    }
  } else {
    multiply(scores, mod.scale);
  }
  if (mod.slope != 0.0f) {
    float sign = mod.slope > 0.0f ? -1.0f : 1.0f, base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      base[half] = mod.slope * static_cast<float>(token + half * 8 + mod.diagonal - first);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float distance =
          fmaf(-mod.slope, static_cast<float>((i >> 2) * 8 + (i & 1)), base[i >> 1 & 1]);
      scores[i] = fmaf(sign, fabsf(distance), scores[i]);
    }
  }
  return 1.0f;
}

// Then the bias, from where it lies. Padding reads what the last token or key has.
template <DType kType, int kCount>
__device__ __forceinline__ void add_bias(float (&scores)[kCount],
                                         const device::ScoreMod<kType, ScoreKind::scored>& mod,
                                         int32_t token, int32_t first, int32_t last_token,
                                         int32_t last_key) {
  using namespace device;
  int64_t size = mod.bias_dtype == DType::f32 ? 4 : mod.bias_dtype == DType::boolean ? 1 : 2;
  const char* row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    row[half] = mod.bias + (min(token + half * 8, last_token) * mod.bias_stride_q + first) * size;
  bool pairs = mod.bias_stride_kv == 1 && first + kCount * 2 - 7 <= last_key &&
               ((reinterpret_cast<uintptr_t>(row[0]) | reinterpret_cast<uintptr_t>(row[1])) &
                (2 * size - 1)) == 0;
  if (!__all_sync(0xffffffffu, pairs)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int32_t key = first + (i >> 2) * 8 + (i & 1);
      int32_t row = min(token + (i >> 1 & 1) * 8, last_token);
      scores[i] = mod.add_bias(scores[i], row, min(key, last_key));
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

// Whether a row may see no key in front of some key.
template <MaskKind kMask>
constexpr bool kBegins = kMask == MaskKind::window || kMask == MaskKind::rows;

// -inf for keys that a thread's two rows do not see. `first`: the key of its first score.
template <MaskKind kMask, int kCount>
__device__ __forceinline__ void mask_scores(float (&scores)[kCount], const KeyRange (&visible)[2],
                                            int32_t first) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const KeyRange& keys = visible[i >> 1 & 1];
    int column = (i >> 2) * 8 + (i & 1);
    bool seen = column < keys.end - first && (!kBegins<kMask> || column >= keys.begin - first);
    scores[i] = seen ? scores[i] : device::negative_infinity();
  }
}

}  // namespace cuattn
