// SPDX-License-Identifier: Apache-2.0
// One instance of attention/sm80/forward.cuh on a made-up problem; prints its largest error against
// float64. test_emulator.py compiles it with mistakes planted in the kernel.
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/attention/sm80/forward.cuh"

using namespace cuattn;

namespace {

constexpr int kRows = 150, kKeys = 260, kDim = 64;

std::vector<uint16_t> made(int count, uint32_t seed) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = device::from_float<device::Half>(static_cast<float>(seed >> 16) / 16384 - 2).bits;
  }
  return values;
}
double value(uint16_t bits) { return device::to_float(device::Half{bits}); }

}  // namespace

// No call here splits keys.
namespace cuattn {
void launch_merge(const MergeParams&, int32_t, cudaStream_t) {}
}  // namespace cuattn

int main() {
  auto q = made(kRows * kDim, 1), k = made(kKeys * kDim, 2), v = made(kKeys * kDim, 3);
  std::vector<uint16_t> out(kRows * kDim, 0xffff);
  AttentionParams p{};
  AttentionSchedule schedule{};
  schedule.num_splits = 1;
  p.q = q.data(), p.k = k.data(), p.v = v.data(), p.out = out.data();
  p.q_strides = p.k_strides = p.v_strides = p.out_strides = {0, kDim, kDim};
  p.dtype = p.out_dtype = DType::f16;
  p.batch = p.num_heads_q = p.num_heads_kv = 1;
  p.seqlen_q = kRows, p.seqlen_kv = kKeys;
  p.head_dim = p.head_dim_v = kDim;
  p.mask.left = p.mask.right = static_cast<int32_t>(kUnlimited);
  p.scores.scale = 0.125f;
  try {
    launch_forward_sm80<DType::f16, kDim, kDim, MaskKind::none, ScoreKind::identity>({p, schedule},
                                                                                     nullptr);
  } catch (const std::exception& error) {
    std::printf("error %s\n", error.what());
    return 0;
  }
  double worst = 0;
  for (int row = 0; row < kRows; ++row) {
    std::vector<double> weights(kKeys), expected(kDim);
    double sum = 0;
    for (int key = 0; key < kKeys; ++key) {
      double dot = 0;
      for (int d = 0; d < kDim; ++d) dot += value(q[row * kDim + d]) * value(k[key * kDim + d]);
      sum += weights[key] = std::exp(dot / 8);
    }
    for (int key = 0; key < kKeys; ++key) {
      for (int d = 0; d < kDim; ++d) expected[d] += weights[key] / sum * value(v[key * kDim + d]);
    }
    for (int d = 0; d < kDim; ++d) {
      double error = std::fabs(value(out[row * kDim + d]) - expected[d]);
      worst = error <= worst ? worst : error;  // a NaN stays
    }
  }
  std::printf("error %g\n", worst);
}
