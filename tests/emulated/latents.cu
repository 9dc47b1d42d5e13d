// SPDX-License-Identifier: Apache-2.0
// Both tiles of mla/sm80/decode.cuh over packed latents, by lists of tokens with holes in them;
// prints the largest error against float64. Every token that no list names holds NaN.
// test_emulator.py compiles it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/mla/sm80/decode.cuh"

using namespace cuattn;

namespace {

constexpr int kSeqs = 3, kTopk = 70, kBlocks = 5, kBlockSize = 7, kSlots = kBlocks * kBlockSize;
constexpr int kLatent = PackedLatent::kLatent, kRope = PackedLatent::kRope;
constexpr int kTokenBytes = PackedLatent::kBytes + 16;  // tokens lie apart
constexpr float kScale = 0.05f;

uint32_t drawn() {
  static uint32_t seed = 1;
  seed = seed * 1664525u + 1013904223u;
  return seed >> 16;
}
float number() { return static_cast<float>(drawn()) / 16384 - 2; }
uint16_t rounded(float x) { return device::from_float<device::Bfloat16>(x).bits; }
double value(uint16_t bits) { return device::to_float(device::Bfloat16{bits}); }

std::vector<uint16_t> queries(int count) {
  std::vector<uint16_t> q(static_cast<size_t>(count));
  for (uint16_t& x : q) x = rounded(number());
  return q;
}

// Slots are odd ones, so that the others are nobody's.
std::vector<int32_t> lists() {
  const int32_t kNone[] = {-1, INT32_MIN, INT32_MAX, kSlots};
  std::vector<int32_t> slots(kSeqs * kTopk);
  for (size_t i = 0; i < slots.size(); ++i) {
    bool is_hole = i < kTopk || drawn() % 3 == 0;  // the first list has nothing else
    slots[i] = is_hole ? kNone[drawn() % 4] : static_cast<int32_t>(drawn() % (kSlots / 2)) * 2 + 1;
  }
  return slots;
}

std::vector<char> cache() {
  std::vector<char> bytes(static_cast<size_t>(kSlots) * kTokenBytes, '\xff');
  for (int slot = 1; slot < kSlots; slot += 2) {
    char* token = &bytes[static_cast<size_t>(slot) * kTokenBytes];
    for (int d = 0; d < kLatent; ++d) {
      uint32_t code = drawn() % 255;
      token[d] = static_cast<char>(code % 128 == 127 ? 0 : code);
    }
    for (int part = 0; part < 4; ++part) {
      float scale = 0.0001f * static_cast<float>(part + 1) * static_cast<float>(1 + drawn() % 8);
      std::memcpy(token + PackedLatent::kScalesAt + 4 * part, &scale, 4);
    }
    for (int d = 0; d < kRope; ++d) {
      uint16_t x = rounded(number());
      std::memcpy(token + PackedLatent::kRopeAt + 2 * d, &x, 2);
    }
  }
  return bytes;
}

// Column d of key and value, the rope columns behind.
double element(const std::vector<char>& cache, int slot, int d) {
  const char* token = &cache[static_cast<size_t>(slot) * kTokenBytes];
  uint16_t bits;
  if (d >= kLatent) {
    std::memcpy(&bits, token + PackedLatent::kRopeAt + 2 * (d - kLatent), 2);
    return value(bits);
  }
  float scale;
  std::memcpy(&scale, token + PackedLatent::kScalesAt + d / PackedLatent::kScaled * 4, 4);
  float code = device::to_float(device::E4m3{static_cast<uint8_t>(token[d])});
  return value(rounded(code * scale));
}

struct Call {
  int heads;
  std::vector<uint16_t> q, q_rope, out;
  std::vector<int32_t> slots = lists(), lens = {kTopk, 33, kTopk};
  std::vector<char> keys = cache();

  explicit Call(int heads)
      : heads(heads),
        q(queries(kSeqs * heads * kLatent)),
        q_rope(queries(kSeqs * heads * kRope)),
        out(q.size(), 0xffff) {}

  PagedParams params() {
    PagedParams p{};
    p.dtype = p.out_dtype = DType::bf16;
    p.kv_dtype = DType::e4m3;
    p.num_heads_q = heads;
    p.head_dim = kLatent;
    p.q = q.data(), p.out = out.data(), p.k_cache = p.v_cache = keys.data();
    p.q_strides = p.out_strides = {heads * kLatent, 0, kLatent};
    p.k_strides = p.v_strides = {kBlockSize * kTokenBytes, 0, kTokenBytes};
    p.latent = {q_rope.data(),
                keys.data() + PackedLatent::kRopeAt,
                {heads * kRope, 0, kRope},
                {kBlockSize * kTokenBytes / 2, 0, kTokenBytes / 2},
                kRope,
                1,
                true,
                false,
                nullptr};
    p.pages = {kBlocks, kBlockSize, slots.data(), kTopk, 0};
    p.k_scale = p.v_scale = 1.0f;
    p.scores.scale = kScale;
    Tile tile = mla_sm80_tile(heads).tile;
    PagedWork& w = p.work;
    w.context_lens = lens.data();
    w.num_seqs = kSeqs;
    w.q_len = w.num_splits = w.cluster = w.tracks = w.num_heads_kv = 1;
    w.num_workers = 8;
    w.group = heads;
    w.rows = heads < tile.m ? heads : tile.m;
    w.row_groups = (heads - 1) / w.rows + 1;
    w.capacity = kTopk;
    w.tile = tile.n;
    w.mask.left = w.mask.right = static_cast<int32_t>(kUnlimited);
    return p;
  }

  double error(int b, int h) const {
    std::vector<double> expected(kLatent, 0.0);
    double sum = 0;
    for (int i = 0; i < lens[b]; ++i) {
      int32_t slot = slots[b * kTopk + i];
      if (slot < 0 || slot >= kSlots) continue;
      double dot = 0;
      for (int d = 0; d < kLatent; ++d)
        dot += value(q[(b * heads + h) * kLatent + d]) * element(keys, slot, d);
      for (int d = 0; d < kRope; ++d)
        dot += value(q_rope[(b * heads + h) * kRope + d]) * element(keys, slot, kLatent + d);
      double weight = std::exp(dot * kScale);
      sum += weight;
      for (int d = 0; d < kLatent; ++d) expected[d] += weight * element(keys, slot, d);
    }
    double worst = 0;
    for (int d = 0; d < kLatent; ++d) {
      double want = sum > 0 ? expected[d] / sum : 0;
      double error = std::fabs(value(out[(b * heads + h) * kLatent + d]) - want);
      worst = error <= worst ? worst : error;  // a NaN stays
    }
    return worst;
  }
};

}  // namespace

int main() {
  double worst = 0;
  for (int heads : {5, 37}) {  // 16 rows and 32 keys, and 32 rows, two groups of them, and 16 keys
    Call call(heads);
    try {
      launch_mla_sm80<DType::bf16, kLatent, kLatent>(call.params(), nullptr);
    } catch (const std::exception& error) {
      std::printf("error %s\n", error.what());
      return 0;
    }
    for (int b = 0; b < kSeqs; ++b) {
      for (int h = 0; h < heads; ++h) {
        double error = call.error(b, h);
        worst = error <= worst ? worst : error;
      }
    }
  }
  std::printf("error %g\n", worst);
}
