// SPDX-License-Identifier: Apache-2.0
// One instance of paged/sm80/decode.cuh over packed rows, which are blocks that overlap (params/
// pages.h), their lengths written by paged/apart.cu; prints its largest error against float64. Behind
// the last row stands NaN. test_emulator.py compiles it.
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/paged/apart.cu.cpp"  // as translated
#include "cuda/paged/sm80/decode.cuh"

using namespace cuattn;

namespace {

constexpr int kSeqs = 5, kHeads = 8, kHeadsKv = 2, kDim = 64, kGroup = kHeads / kHeadsKv;
const int32_t kStarts[kSeqs + 1] = {0, 77, 77, 78, 300, 437};
constexpr int kKeys = 437, kGuard = 64, kLongest = 222;

std::vector<uint16_t> made(int count, uint32_t seed, int poisoned) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = device::from_float<device::Half>(static_cast<float>(seed >> 16) / 16384 - 2).bits;
  }
  values.resize(static_cast<size_t>(count + poisoned), 0xffff);
  return values;
}
double value(uint16_t bits) { return device::to_float(device::Half{bits}); }

PagedParams problem(const int32_t* lens) {
  PagedParams p{};
  p.dtype = p.kv_dtype = p.out_dtype = DType::f16;
  p.num_heads_q = kHeads;
  p.head_dim = kDim;
  p.q_strides = p.out_strides = {kHeads * kDim, 0, kDim};
  p.k_strides = p.v_strides = {kHeadsKv * kDim, kDim, kHeadsKv * kDim};
  p.pages = {kKeys, 1 << 30, kStarts, 1, kKeys};
  p.k_scale = p.v_scale = 1.0f;
  p.scores.scale = 0.125f;
  PagedWork& w = p.work;
  w.context_lens = lens;
  w.num_seqs = kSeqs;
  w.q_len = w.row_groups = w.num_splits = w.cluster = w.tracks = 1;
  w.num_workers = 8;
  w.num_heads_kv = kHeadsKv;
  w.group = w.rows = kGroup;
  w.capacity = kLongest;
  w.tile = 64;
  w.mask.left = w.mask.right = static_cast<int32_t>(kUnlimited);
  return p;
}

// Of head `h` of sequence `b`: O in float64.
std::vector<double> attended(const std::vector<uint16_t>& q, const std::vector<uint16_t>& k,
                             const std::vector<uint16_t>& v, int b, int h) {
  std::vector<double> out(kDim, 0.0);
  double sum = 0;
  for (int key = kStarts[b]; key < kStarts[b + 1]; ++key) {
    int row = (key * kHeadsKv + h / kGroup) * kDim;
    double dot = 0;
    for (int d = 0; d < kDim; ++d) dot += value(q[(b * kHeads + h) * kDim + d]) * value(k[row + d]);
    double weight = std::exp(dot / 8);
    sum += weight;
    for (int d = 0; d < kDim; ++d) out[d] += weight * value(v[row + d]);
  }
  for (double& x : out) x = sum > 0 ? x / sum : 0;
  return out;
}

}  // namespace

int main() {
  auto q = made(kSeqs * kHeads * kDim, 1, 0);
  auto k = made(kKeys * kHeadsKv * kDim, 2, kGuard * kHeadsKv * kDim);
  auto v = made(kKeys * kHeadsKv * kDim, 3, kGuard * kHeadsKv * kDim);
  std::vector<uint16_t> out(kSeqs * kHeads * kDim, 0xffff);
  std::vector<int32_t> lens(kSeqs, -1);
  PagedParams p = problem(lens.data());
  p.q = q.data(), p.k_cache = k.data(), p.v_cache = v.data(), p.out = out.data();
  try {
    launch_key_lengths({kStarts, nullptr, kKeys, kSeqs, kLongest, lens.data()}, nullptr);
    launch_paged_sm80<DType::f16, kDim, kDim>(p, nullptr);
  } catch (const std::exception& error) {
    std::printf("error %s\n", error.what());
    return 0;
  }
  double worst = 0;
  for (int b = 0; b < kSeqs; ++b) {
    for (int h = 0; h < kHeads; ++h) {
      std::vector<double> expected = attended(q, k, v, b, h);
      for (int d = 0; d < kDim; ++d) {
        double error = std::fabs(value(out[(b * kHeads + h) * kDim + d]) - expected[d]);
        worst = error <= worst ? worst : error;  // a NaN stays
      }
    }
  }
  std::printf("error %g\n", worst);
}
