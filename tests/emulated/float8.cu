// SPDX-License-Identifier: Apache-2.0
// The naive rung on made-up float8 arrays: scales of blocks and channels, causal, keys out of use
// that hold NaN, values by rows and by columns. Prints its largest error against float64.
// test_emulator.py runs it, with mistakes planted too.
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/attention/float8.cuh"

using namespace cuattn;

namespace {

constexpr int kBatch = 2, kHeads = 4, kHeadsKv = 2, kRows = 140, kKeys = 260, kDim = 64, kDimV = 48;
constexpr int kColumn = 272;  // keys, padded

double value(uint8_t code) { return device::to_float(device::E4m3{code}); }

std::vector<uint8_t> made(int count, uint32_t seed) {
  std::vector<uint8_t> codes(static_cast<size_t>(count));
  for (uint8_t& code : codes) {
    seed = seed * 1664525u + 1013904223u;
    code = static_cast<uint8_t>((seed >> 31) << 7 | (seed >> 16) % 68);  // sizes up to 1.5
  }
  return codes;
}

std::vector<float> made_scales(int count, uint32_t seed) {
  std::vector<float> scales(static_cast<size_t>(count));
  for (float& scale : scales) {
    seed = seed * 1664525u + 1013904223u;
    scale = 0.5f + static_cast<float>(seed >> 16) / 65536;
  }
  return scales;
}

}  // namespace

int main() {
  auto q = made(kBatch * kRows * kHeads * kDim, 1), k = made(kBatch * kKeys * kHeadsKv * kDim, 2);
  auto v = made(kBatch * kKeys * kHeadsKv * kDimV, 3);
  auto q_scale = made_scales(kBatch * kHeads * 2, 4),
       k_scale = made_scales(kBatch * kHeadsKv * 3, 5);
  auto v_scale = made_scales(kBatch * kHeadsKv * kDimV, 6);
  const int32_t used[kBatch] = {kKeys, 201};
  for (int key = used[1]; key < kKeys; ++key) {
    for (int x = 0; x < kHeadsKv * kDim; ++x) k[(kKeys + key) * kHeadsKv * kDim + x] = 0x7f;
    for (int x = 0; x < kHeadsKv * kDimV; ++x) v[(kKeys + key) * kHeadsKv * kDimV + x] = 0xff;
  }
  std::vector<uint8_t> columns(kBatch * kHeadsKv * kDimV * kColumn, 0x7f);
  for (int x = 0; x < kBatch * kKeys * kHeadsKv * kDimV; ++x) {
    int c = x % kDimV, h = x / kDimV % kHeadsKv, key = x / kDimV / kHeadsKv % kKeys;
    int b = x / kDimV / kHeadsKv / kKeys;
    columns[((b * kHeadsKv + h) * kDimV + c) * kColumn + key] = v[x];
  }
  AttentionParams p{};
  p.q = q.data(), p.k = k.data();
  p.q_strides = {kRows * kHeads * kDim, kHeads * kDim, kDim};
  p.k_strides = {kKeys * kHeadsKv * kDim, kHeadsKv * kDim, kDim};
  p.out_strides = {kRows * kHeads * kDimV, kHeads * kDimV, kDimV};
  p.dtype = DType::e4m3;
  p.batch = kBatch, p.num_heads_q = kHeads, p.num_heads_kv = kHeadsKv;
  p.seqlen_q = kRows, p.seqlen_kv = kKeys, p.head_dim = kDim, p.head_dim_v = kDimV;
  p.seqused_kv = used;
  p.mask.left = static_cast<int32_t>(kUnlimited), p.mask.right = 0;
  p.scores.scale = 0.125f;
  p.float8.q = {q_scale.data(), 1.0f, 1, {kBatch, kHeads, 2}, {kHeads * 2, 2, 1}};
  p.float8.k = {k_scale.data(), 1.0f, 1, {kBatch, kHeadsKv, 3}, {kHeadsKv * 3, 3, 1}};
  p.float8.v = {v_scale.data(), 1.0f, 1, {kBatch, kHeadsKv, kDimV}, {kHeadsKv * kDimV, kDimV, 1}};

  double worst = 0;
  for (int turned = 0; turned < 2; ++turned) {
    p.v = turned ? columns.data() : v.data();
    p.v_strides = {kKeys * kHeadsKv * kDimV, kHeadsKv * kDimV, kDimV};
    if (turned) p.v_strides = {kHeadsKv * kDimV * kColumn, 1, kDimV * kColumn};
    p.v_channel_stride = turned ? kColumn : 1;
    std::vector<float> out(kBatch * kRows * kHeads * kDimV, NAN), lse(kBatch * kHeads * kRows, NAN);
    std::vector<float> scores(kBatch * kHeads * kRows * kKeys);
    p.out = out.data(), p.lse = lse.data(), p.out_dtype = DType::f32;
    p.lse_strides = {kHeads * kRows, 1, kRows};
    try {
      launch_float8(p, scores.data(), nullptr);
    } catch (const std::exception& error) {
      std::printf("error %s\n", error.what());
      return 0;
    }
    for (int line = 0; line < kBatch * kHeads * kRows; ++line) {
      int row = line % kRows, h = line / kRows % kHeads, b = line / kRows / kHeads, g = h / 2;
      std::vector<double> weights(kKeys), expected(kDimV);
      double sum = 0;
      for (int key = 0; key < used[b] && key <= row + used[b] - kRows; ++key) {
        double dot = 0;
        for (int d = 0; d < kDim; ++d) {
          dot += value(q[((b * kRows + row) * kHeads + h) * kDim + d]) *
                 value(k[((b * kKeys + key) * kHeadsKv + g) * kDim + d]);
        }
        dot *= q_scale[(b * kHeads + h) * 2 + row / 128];
        dot *= k_scale[(b * kHeadsKv + g) * 3 + key / 128];
        sum += weights[key] = std::exp(dot / 8);
        for (int c = 0; c < kDimV; ++c)
          expected[c] += weights[key] * value(v[((b * kKeys + key) * kHeadsKv + g) * kDimV + c]);
      }
      double lse_error = std::fabs(lse[line] - std::log(sum));
      worst = lse_error <= worst ? worst : lse_error;  // a NaN stays
      for (int c = 0; c < kDimV; ++c) {
        double exact = expected[c] / sum * v_scale[(b * kHeadsKv + g) * kDimV + c];
        double error = std::fabs(out[((b * kRows + row) * kHeads + h) * kDimV + c] - exact);
        worst = error <= worst ? worst : error;
      }
    }
  }
  std::printf("error %g\n", worst);
}
