// SPDX-License-Identifier: Apache-2.0
// reshape_and_cache and gather_cache through the C++ header, on the CPU: every byte of every array
// against a model on the host, all layouts and dtypes, rows and blocks that lie apart.
// Next: test_cache_cuda.cpp.
#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cache.h"
#include "test.h"

namespace cuattn::test {
namespace {

// ---- reshape_and_cache

enum class Scale { none, number, per_head, one_element };

// Below it, numbers lie evenly.
double smallest_normal(DType dtype) { return std::ldexp(1.0, dtype == DType::f16 ? -14 : -126); }

struct WriteProblem {
  DType dtype = DType::f32;
  bool e4m3 = false;
  KvLayout layout = KvLayout::nhd;
  int64_t tokens = 0, heads = 1, dim_k = 16, dim_v = 16, blocks = 1, block_size = 16;
  int64_t half = 0;  // of the rotated elements; 0: none
  bool interleaved = false;
  Scale scale = Scale::none;

  Array k, v, k_cache, v_cache, k_scales, v_scales, cos, sin;
  double k_scale = 1, v_scale = 1;
  std::vector<int64_t> slots, positions;

  void fill(Random& random) {
    DType stored = e4m3 ? DType::e4m3 : dtype;
    k = rows_apart(dtype, tokens, heads, dim_k);
    v = rows_apart(dtype, tokens, heads, dim_v);
    k_cache = cache_apart(stored, layout, true, blocks, block_size, heads, dim_k);
    v_cache = cache_apart(stored, layout, false, blocks, block_size, heads, dim_v);
    cos = sin = Array(DType::f32, {50, half}, {half + 3, 1});
    fill_normal(random, cos);
    fill_normal(random, sin);
    int64_t scales = scale == Scale::per_head ? heads : 1;
    k_scales = v_scales = Array(DType::f32, {scales}, {2});
    for (Array* array : {&k_scales, &v_scales})
      array->for_each_offset([&](int64_t i) { array->set(i, 0.001f * random.range(1, 400)); });
    if (scale == Scale::number) k_scale = 0.37, v_scale = 2.5;
    slots = shuffled(random, blocks * block_size);
    slots.resize(static_cast<size_t>(tokens));
    for (int64_t i = 0; i < tokens; ++i) {
      positions.push_back(random.range(0, 49));
      if (random.chance(0.1)) {  // skipped: its row stays NaN, its position is no row of cos
        slots[i] = -1;
        positions[i] = 1'000'000;
        continue;
      }
      for (Array* rows : {&k, &v})
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t d = 0; d < rows->shape()[2]; ++d)
            rows->set(i * rows->strides()[0] + h * rows->strides()[1] + d, random.normal());
    }
  }

  void run() {
    CacheOptions options;
    options.kv_layout = layout;
    options.k_scale = k_scale, options.v_scale = v_scale;
    TensorView ks = view_of(k_scales), vs = view_of(v_scales);
    if (scale == Scale::per_head || scale == Scale::one_element)
      options.k_scales = &ks, options.v_scales = &vs;
    TensorView c = view_of(cos), s = view_of(sin), at = view_of(positions);
    if (half > 0) options.cos = &c, options.sin = &s, options.positions = &at;
    options.rope_interleaved = interleaved;
    TensorView caches[] = {view_of(k_cache), view_of(v_cache)};
    if (e4m3 && heads % 2 == 0) {  // the same bytes by another name
      for (TensorView& cache : caches) cache.dtype = {kDLUInt, 8, 1};
    }
    reshape_and_cache(view_of(k), view_of(v), caches[0], caches[1], view_of(slots), options);
  }

  double scale_of(bool is_k, int64_t head) const {
    const Array& scales = is_k ? k_scales : v_scales;
    if (scale == Scale::per_head) return scales.get(2 * head);
    return scale == Scale::one_element ? scales.get(0) : is_k ? k_scale : v_scale;
  }

  // What belongs into the cache, and how far rounding in float32 may lead from it.
  std::pair<double, double> expected(bool is_k, int64_t token, int64_t head, int64_t d) const {
    const Array& rows = is_k ? k : v;
    int64_t row = token * rows.strides()[0] + head * rows.strides()[1];
    double value = rows.get(row + d), slack = 0;
    if (is_k && d < 2 * half) {
      int64_t pair = interleaved ? d / 2 : d % half;
      bool second = interleaved ? d % 2 == 1 : d >= half;
      double a = rows.get(row + (interleaved ? 2 * pair : pair));
      double b = rows.get(row + (interleaved ? 2 * pair + 1 : pair + half));
      double c = cos.get(positions[token] * cos.strides()[0] + pair);
      double s = sin.get(positions[token] * sin.strides()[0] + pair);
      value = second ? b * c + a * s : a * c - b * s;
      slack = 1e-6 * (std::abs(a) + std::abs(b)) * (std::abs(c) + std::abs(s));
      if (!e4m3) slack += epsilon(dtype) / 2 * std::max(std::abs(value), smallest_normal(dtype));
    }
    if (!e4m3) return {value, slack};
    double factor = 1 / scale_of(is_k, head);
    return {value * factor, slack * factor + 1e-6 * std::abs(value * factor)};
  }

  std::string text() const {
    std::ostringstream text;
    text << name_of(dtype) << (e4m3 ? " to e4m3" : "") << " layout " << static_cast<int>(layout)
         << " tokens " << tokens << " heads " << heads << " dims " << dim_k << ", " << dim_v
         << " block " << block_size << " half " << half << (interleaved ? " interleaved" : "")
         << " scale " << static_cast<int>(scale);
    return text.str();
  }
};

// The nearest float8_e4m3fn, saturated.
double e4m3_nearest(double value) {
  double best = 448;
  for (int bits = 0; bits < 0x7f; ++bits) {
    double candidate = e4m3_value(static_cast<uint8_t>(bits));
    if (std::abs(candidate - std::abs(value)) < std::abs(best - std::abs(value))) best = candidate;
  }
  return std::copysign(best, value);
}

// Empty when the cache holds its rows, and all of its other bytes are what they were.
std::string judge_write(const WriteProblem& p, bool is_k, std::vector<uint8_t> want) {
  const Array& cache = is_k ? p.k_cache : p.v_cache;
  size_t item = static_cast<size_t>(bytes_of(cache.dtype()));
  for (int64_t i = 0; i < p.tokens; ++i)
    for (int64_t h = 0; h < p.heads && p.slots[i] >= 0; ++h)
      for (int64_t d = 0; d < (is_k ? p.dim_k : p.dim_v); ++d) {
        int64_t place = cache_place(cache, p.layout, is_k, p.slots[i] / p.block_size,
                                    p.slots[i] % p.block_size, h, d);
        size_t at = byte_of(cache, place);
        auto [value, slack] = p.expected(is_k, i, h, d);
        double got = p.e4m3 ? e4m3_value(cache.bytes()[at]) : cache.get(place);
        double near = p.e4m3 ? std::abs(e4m3_nearest(value) - value) : 0;
        if (!(std::abs(got - value) <= near + slack)) {
          std::ostringstream text;
          text << p.text() << ": " << (is_k ? "k" : "v") << " of token " << i << ", head " << h
               << ", element " << d << " is " << got << " instead of " << value;
          return text.str();
        }
        std::copy_n(cache.bytes().begin() + at, item, want.begin() + at);
      }
  return cache.bytes() == want ? "" : p.text() + ": something else was written";
}

std::vector<WriteProblem> write_problems(DType dtype, bool e4m3, KvLayout layout, Random& random) {
  WriteProblem base;
  base.dtype = dtype, base.e4m3 = e4m3, base.layout = layout;
  std::vector<WriteProblem> list(6, base);
  list[1].half = 5;
  list[2].half = 8, list[2].interleaved = true;
  list[3].scale = Scale::number, list[3].half = 16;
  list[4].scale = Scale::per_head;
  list[5].scale = Scale::one_element;
  for (WriteProblem& p : list) {
    p.heads = random.range(1, 5);
    p.dim_k = 16 * random.range(2, 6), p.dim_v = 16 * random.range(1, 6);
    p.block_size = layout == KvLayout::vllm ? random.pick<int>({8, 16, 32}) : random.range(1, 40);
    p.blocks = random.range(2, 9);
    p.tokens = random.range(1, static_cast<int>(p.blocks * p.block_size));
    if (!e4m3) p.scale = Scale::none;
    p.fill(random);
  }
  return list;
}

TEST(cpu_cache_holds_rows_in_their_slots) {
  Random random(case_seed("cache_write"));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (bool e4m3 : {false, true})
      for (KvLayout layout : kLayouts)
        for (WriteProblem& p : write_problems(dtype, e4m3, layout, random)) {
          std::vector<uint8_t> k_before = p.k_cache.bytes(), v_before = p.v_cache.bytes();
          p.run();
          for (bool is_k : {true, false}) {
            std::string wrong = judge_write(p, is_k, is_k ? k_before : v_before);
            CHECK(wrong.empty(), wrong);
          }
        }
}

// Tables and lengths say of the newest tokens of sequences what slots and positions would.
TEST(cpu_cache_takes_the_newest_tokens_of_sequences) {
  Random random(case_seed("cache_newest"));
  for (KvLayout layout : kLayouts) {
    constexpr int64_t kSeqs = 3, kNew = 2, kColumns = 3, kBlock = 8;
    WriteProblem p;
    p.layout = layout;
    p.tokens = kSeqs * kNew, p.heads = 2, p.half = 4;
    p.blocks = kSeqs * kColumns, p.block_size = kBlock;
    p.fill(random);
    std::vector<int32_t> tables, lens = {random.range(2, kColumns * kBlock), 1, 0};
    for (int64_t block : shuffled(random, p.blocks)) tables.push_back(static_cast<int32_t>(block));
    for (int64_t i = 0; i < p.tokens; ++i) {
      int64_t seq = i / kNew, place = lens[seq] - kNew + i % kNew;
      p.positions[i] = std::max<int64_t>(place, 0);
      p.slots[i] = -1;
      if (place < 0) continue;
      p.slots[i] = tables[seq * kColumns + place / kBlock] * kBlock + place % kBlock;
    }
    WriteProblem q = p;
    p.run();
    TensorView block_tables(tables.data(), DType::i32, {kSeqs, kColumns});
    TensorView context_lens(lens.data(), DType::i32, {kSeqs});
    TensorView c = view_of(q.cos), s = view_of(q.sin);
    CacheOptions options;
    options.kv_layout = layout;
    options.block_tables = &block_tables, options.context_lens = &context_lens;
    options.cos = &c, options.sin = &s;
    reshape_and_cache(view_of(q.k), view_of(q.v), view_of(q.k_cache), view_of(q.v_cache),
                      TensorView{}, options);
    CHECK(q.k_cache.bytes() == p.k_cache.bytes() && q.v_cache.bytes() == p.v_cache.bytes(),
          "layout ", static_cast<int>(layout));
  }
}

// ---- gather_cache

TEST(cpu_cache_gives_back_the_rows_of_its_sequences) {
  Random random(case_seed("cache_gather"));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3})
    for (KvLayout layout : kLayouts)
      for (int round = 0; round < 4; ++round) {
        int64_t block_size =
            layout == KvLayout::vllm ? random.pick<int>({8, 16, 32}) : random.range(1, 40);
        int64_t blocks = random.range(1, 6), width = 4, heads = random.range(1, 4);
        int64_t dims[] = {16 * random.range(1, 5), 16 * random.range(1, 5)};
        std::vector<int32_t> ends = {0}, tables;
        for (int seq = 0; seq < 4; ++seq) {
          int length = seq == 2 ? 0 : random.range(0, static_cast<int>(width * block_size));
          ends.push_back(ends.back() + length);
          for (int64_t i = 0; i < width; ++i) {
            bool used = i * block_size < length;
            tables.push_back(used ? random.range(0, static_cast<int>(blocks) - 1)
                                  : random.pick<int>({-1, 1 << 30}));
          }
        }
        TensorView cu_seqlens(ends.data(), DType::i32, {5});
        TensorView block_tables(tables.data(), DType::i32, {4, width});
        CHECK(gather_cache_total(cu_seqlens) == ends.back());
        Array caches[2], outs[2];
        std::vector<uint8_t> want[2];
        for (int side = 0; side < 2; ++side) {
          bool is_k = side == 0;
          caches[side] = cache_apart(dtype, layout, is_k, blocks, block_size, heads, dims[side]);
          fill_bytes(random, caches[side]);
          outs[side] = rows_apart(dtype, ends.back() + 3, heads, dims[side]);
          want[side] = outs[side].bytes();
          for (int seq = 0; seq < 4; ++seq)
            for (int i = 0; i < ends[seq + 1] - ends[seq]; ++i)
              for (int64_t h = 0; h < heads; ++h)
                for (int64_t d = 0; d < dims[side]; ++d) {
                  int64_t block = tables[seq * width + i / block_size];
                  size_t from = byte_of(caches[side], cache_place(caches[side], layout, is_k, block,
                                                                  i % block_size, h, d));
                  const std::vector<int64_t>& s = outs[side].strides();
                  size_t to = byte_of(outs[side], (ends[seq] + i) * s[0] + h * s[1] + d);
                  std::copy_n(caches[side].bytes().begin() + from, bytes_of(dtype),
                              want[side].begin() + to);
                }
        }
        gather_cache(view_of(caches[0]), view_of(caches[1]), block_tables, cu_seqlens,
                     view_of(outs[0]), view_of(outs[1]), layout);
        for (int side = 0; side < 2; ++side)
          CHECK(outs[side].bytes() == want[side], "side ", side, " of ", name_of(dtype),
                " in layout ", static_cast<int>(layout), ", block_size ", block_size);
      }
}

}  // namespace
}  // namespace cuattn::test
