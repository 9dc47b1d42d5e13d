// SPDX-License-Identifier: Apache-2.0
// mla/unpack.cu over random lists of tokens: rows and counts bit for bit against plain loops, and
// what the sm80 kernel makes of these rows against what it makes of the packed tokens themselves.
// Prints how many numbers differ. Every token that no list names holds NaN. test_emulator.py
// compiles it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/mla/sm80/decode.cuh"
#include "cuda/mla/unpack.cu.cpp"  // as translated

using namespace cuattn;

namespace {

using Packed = PackedLatent;
constexpr int kHeads = 3, kGuard = 40;  // kGuard: rows and entries behind the last
constexpr uint16_t kUntouched = 0x5a5a;

struct Shape {
  int seqs, queries, topk, list_stride, blocks, block_size;
  int token_gap, block_gap;  // bytes
  bool has_lens;
  int holes;  // in a hundred entries
};
const Shape kShapes[] = {
    {3, 1, 70, 70, 5, 7, 0, 0, false, 30},     {2, 3, 133, 140, 9, 16, 16, 48, true, 50},
    {1, 2, 1, 1, 1, 400, 0, 0, true, 0},       {5, 1, 64, 64, 64, 1, 32, 0, false, 2},
    {1, 1, 8500, 8501, 3, 64, 0, 0, true, 40}, {2, 2, 0, 0, 1, 4, 0, 0, false, 0},
    {4, 1, 300, 301, 2, 33, 0, 16, true, 99},
};

uint32_t drawn() {
  static uint32_t seed = 1;
  seed = seed * 1664525u + 1013904223u;
  return seed >> 16;
}
uint16_t rounded(float x) { return device::from_float<device::Bfloat16>(x).bits; }

struct Call {
  Shape s;
  int lists = s.seqs * s.queries, slots = s.blocks * s.block_size;
  int64_t token = Packed::kBytes + s.token_gap, block = s.block_size * token + s.block_gap;
  std::vector<char> cache;
  std::vector<int32_t> entries, lens, counts;
  std::vector<uint16_t> q, q_rope, rows;
  std::vector<std::vector<int32_t>> found;  // of each list, its tokens

  explicit Call(const Shape& shape)
      : s(shape),
        cache(static_cast<size_t>(s.blocks * block), '\xff'),
        counts(static_cast<size_t>(lists + 1), -7),
        q(static_cast<size_t>(lists * kHeads * Packed::kLatent)),
        q_rope(static_cast<size_t>(lists * kHeads * Packed::kRope)),
        rows((static_cast<size_t>(lists) * s.topk + kGuard) * Packed::kColumns, kUntouched) {
    for (int slot = 1; slot < slots || slot == 1; slot += 2) fill(slot % slots);
    for (auto* numbers : {&q, &q_rope})
      for (uint16_t& x : *numbers) x = rounded(static_cast<float>(drawn()) / 16384 - 2);
    draw_lists();
  }

  char* at(int slot) { return &cache[slot / s.block_size * block + slot % s.block_size * token]; }
  void fill(int slot) {
    char* to = at(slot);
    for (int d = 0; d < Packed::kLatent; ++d) {
      uint32_t code = drawn() % 256;
      to[d] = static_cast<char>(code % 128 == 127 ? 0 : code);
    }
    for (int part = 0; part < 4; ++part) {
      float scale = 0.0001f * static_cast<float>(part + 1) * static_cast<float>(1 + drawn() % 8);
      std::memcpy(to + Packed::kScalesAt + 4 * part, &scale, 4);
    }
    for (int d = 0; d < Packed::kRope; ++d) {
      uint16_t x = rounded(static_cast<float>(drawn()) / 16384 - 2);
      std::memcpy(to + Packed::kRopeAt + 2 * d, &x, 2);
    }
  }

  // Slots are odd ones, where there are any. What stands behind the length of a list would be seen.
  void draw_lists() {
    const int32_t none[] = {-1, INT32_MIN, INT32_MAX, slots};
    entries.resize(static_cast<size_t>(lists) * s.list_stride + kGuard);
    for (int32_t& entry : entries)
      entry = static_cast<int32_t>(drawn() % 100) < s.holes
                  ? none[drawn() % 4]
                  : (static_cast<int32_t>(drawn()) % slots | 1) % slots;
    for (int32_t& entry : entries)
      if (slots > 1 && entry >= 0 && entry < slots && entry % 2 == 0) entry = 1;
    for (int b = 0; b < lists; ++b) {
      const int kinds[] = {s.topk, static_cast<int>(drawn() % (s.topk + 1)), s.topk + 9, -3};
      lens.push_back(kinds[drawn() % 4]);
      int length = s.has_lens ? lens.back() : s.topk;
      found.emplace_back();
      for (int i = 0; i < length && i < s.topk; ++i) {
        int32_t slot = entries[static_cast<size_t>(b) * s.list_stride + i];
        if (slot >= 0 && slot < slots) found.back().push_back(slot);
      }
    }
  }

  PagedParams params(uint16_t* out) {
    PagedParams p{};
    p.dtype = p.out_dtype = DType::bf16;
    p.kv_dtype = DType::e4m3;
    p.num_heads_q = kHeads;
    p.head_dim = Packed::kLatent;
    p.q = q.data(), p.out = out, p.k_cache = p.v_cache = cache.data();
    p.q_strides = p.out_strides = {s.queries * kHeads * Packed::kLatent, kHeads * Packed::kLatent,
                                   Packed::kLatent};
    p.k_strides = p.v_strides = {block, 0, token};
    p.latent.q_rope = q_rope.data();
    p.latent.rope_cache = cache.data() + Packed::kRopeAt;
    p.latent.q_strides = {s.queries * kHeads * Packed::kRope, kHeads * Packed::kRope,
                          Packed::kRope};
    p.latent.strides = {block / 2, 0, token / 2};
    p.latent.rope_dim = Packed::kRope;
    p.latent.queries = s.queries;
    p.latent.is_used = true;
    p.latent.own_lens = counts.data();
    p.latent.own_rows = rows.data();
    p.pages = {s.blocks, s.block_size, entries.data(), s.list_stride, 0};
    p.k_scale = p.v_scale = 1.0f;
    p.scores.scale = 0.05f;
    Tile tile = mla_sm80_tile(kHeads).tile;
    PagedWork& w = p.work;
    w.context_lens = s.has_lens ? lens.data() : nullptr;
    w.num_seqs = lists;
    w.q_len = w.num_splits = w.cluster = w.tracks = w.num_heads_kv = w.row_groups = 1;
    w.group = w.rows = kHeads;
    w.capacity = s.topk;
    w.tile = tile.n;
    w.mask.left = w.mask.right = static_cast<int32_t>(kUnlimited);
    return p;
  }

  // Rows of each list, then what was there before.
  int wrong_rows() {
    int wrong = counts.back() != -7;
    std::vector<uint16_t> want(rows.size(), kUntouched);
    for (int b = 0; b < lists; ++b) {
      wrong += counts[b] != static_cast<int32_t>(found[b].size());
      uint16_t* to = &want[static_cast<size_t>(b) * s.topk * Packed::kColumns];
      for (int32_t slot : found[b]) {
        const char* from = at(slot);
        for (int d = 0; d < Packed::kLatent; ++d) {
          float scale;
          std::memcpy(&scale, from + Packed::kScalesAt + d / Packed::kScaled * 4, 4);
          float code = device::to_float(device::E4m3{static_cast<uint8_t>(from[d])});
          to[d] = rounded(code * scale);
        }
        std::memcpy(to + Packed::kLatent, from + Packed::kRopeAt, 2 * Packed::kRope);
        to += Packed::kColumns;
      }
    }
    for (size_t i = 0; i < rows.size(); ++i) wrong += rows[i] != want[i];
    return wrong;
  }

  int wrong() {
    std::vector<uint16_t> by_rows(q.size(), 0xffff), by_tokens(q.size(), 0xffff);
    PagedParams over_rows = launch_unpack(params(by_rows.data()), nullptr);
    int wrong = wrong_rows();
    if (wrong > 0) return wrong;
    launch_mla_sm80<DType::bf16, Packed::kLatent, Packed::kLatent>(over_rows, nullptr);
    // The packed tokens by lists without holes.
    for (int b = 0; b < lists; ++b)
      std::copy(found[b].begin(), found[b].end(), &entries[static_cast<size_t>(b) * s.list_stride]);
    PagedParams over_tokens = params(by_tokens.data());
    over_tokens.work.context_lens = counts.data();
    launch_mla_sm80<DType::bf16, Packed::kLatent, Packed::kLatent>(over_tokens, nullptr);
    for (size_t i = 0; i < q.size(); ++i) {
      bool is_number = (by_rows[i] & 0x7f80) != 0x7f80;
      wrong += !is_number || by_rows[i] != by_tokens[i];
    }
    return wrong;
  }
};

}  // namespace

int main() {
  int wrong = 0;
  try {
    for (const Shape& shape : kShapes) wrong += Call(shape).wrong();
  } catch (const std::exception& error) {
    std::printf("error %s\n", error.what());
    return 0;
  }
  std::printf("wrong %d\n", wrong);
}
