// SPDX-License-Identifier: Apache-2.0
// The cache operations through the C++ header, on the CPU: every byte of every array against a
// model on the host, all layouts and dtypes, rows and blocks that lie apart; and what is refused.
// Next: test_cache_cuda.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuattn/kv_cache.h"
#include "paged.h"
#include "test.h"

namespace cuattn::test {
namespace {

using Invalid = std::invalid_argument;

const DLDevice kHost{kDLCPU, 0};
constexpr KvLayout kLayouts[] = {KvLayout::nhd, KvLayout::hnd, KvLayout::vllm};

TensorView view_of(Array& array) { return array.view(array.data(), kHost); }
TensorView view_of(std::vector<int64_t>& numbers) {
  return {numbers.data(), DType::i64, {static_cast<int64_t>(numbers.size())}};
}
TensorView pairs_of(std::vector<int64_t>& numbers) {
  return {numbers.data(), DType::i64, {static_cast<int64_t>(numbers.size() / 2), 2}};
}

// Where an element stands in the bytes of an array, guard bands included.
size_t byte_of(const Array& array, int64_t offset) {
  return array.guard_bytes() + static_cast<size_t>(offset * bytes_of(array.dtype()));
}

void fill_normal(Random& random, Array& array) {
  array.for_each_offset([&](int64_t i) { array.set(i, random.normal()); });
}

void fill_bytes(Random& random, Array& array) {
  array.for_each_offset([&](int64_t i) {
    for (int b = 0; b < bytes_of(array.dtype()); ++b)
      array.bytes()[byte_of(array, i) + b] = static_cast<uint8_t>(random.range(0, 255));
  });
}

// [tokens, heads, dim] with gaps of NaN between rows and between heads.
Array rows_apart(DType dtype, int64_t tokens, int64_t heads, int64_t dim) {
  return Array(dtype, {tokens, heads, dim}, {heads * (dim + 8) + 24, dim + 8, 1});
}

// A cache with a block's gap after each block, as where K and V share an allocation.
Array cache_apart(DType dtype, KvLayout layout, bool is_k, int64_t blocks, int64_t block_size,
                  int64_t heads, int64_t dim) {
  Array dense = paged_cache(dtype, layout, is_k, blocks, block_size, heads, dim);
  std::vector<int64_t> strides = dense.strides();
  strides[0] *= 2;
  return Array(dtype, dense.shape(), strides);
}

std::vector<int64_t> shuffled(Random& random, int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) order[i] = i;
  for (int64_t i = count - 1; i > 0; --i)
    std::swap(order[i], order[random.range(0, static_cast<int>(i))]);
  return order;
}

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

// ---- copy_blocks, swap_blocks

// The bytes of one block of `from` into one of `to`, which are of the same shape within a block.
void copy_block(const Array& from, int64_t source, const Array& to, int64_t destination,
                std::vector<uint8_t>& bytes) {
  size_t count = static_cast<size_t>(bytes_of(from.dtype()));
  for (size_t axis = 1; axis < from.shape().size(); ++axis) count *= from.shape()[axis];
  std::copy_n(from.bytes().begin() + byte_of(from, source * from.strides()[0]), count,
              bytes.begin() + byte_of(to, destination * to.strides()[0]));
}

std::vector<TensorView> views_of(std::vector<Array>& arrays) {
  std::vector<TensorView> views;
  for (Array& array : arrays) views.push_back(view_of(array));
  return views;
}

std::vector<Array> layers_of(Random& random, int layers, DType dtype, KvLayout layout, bool is_k,
                             int64_t blocks, int64_t dim) {
  std::vector<Array> list;
  for (int i = 0; i < layers; ++i) {
    list.push_back(cache_apart(dtype, layout, is_k, blocks, 8, 3, dim));
    fill_bytes(random, list.back());
  }
  return list;
}

TEST(cpu_blocks_are_copied_within_each_cache) {
  Random random(case_seed("copy_blocks"));
  for (DType dtype : {DType::f32, DType::bf16, DType::e4m3})
    for (KvLayout layout : kLayouts)
      for (bool has_v : {false, true}) {
        int layers = random.range(1, 4), blocks = random.range(4, 12);
        std::vector<Array> k = layers_of(random, layers, dtype, layout, true, blocks, 32);
        std::vector<Array> v =
            layers_of(random, has_v ? layers : 0, dtype, layout, false, blocks, 48);
        std::vector<int64_t> order = shuffled(random, blocks), mapping;
        for (int i = 1; i < blocks / 2; ++i)  // order[0] goes to two places
          mapping.insert(mapping.end(), {order[i / 2], order[blocks / 2 + i]});
        std::vector<std::vector<uint8_t>> want;
        for (std::vector<Array>* list : {&k, &v})
          for (Array& cache : *list) {
            want.push_back(cache.bytes());
            for (size_t i = 0; i < mapping.size(); i += 2)
              copy_block(cache, mapping[i], cache, mapping[i + 1], want.back());
          }
        copy_blocks(views_of(k), views_of(v), pairs_of(mapping));
        size_t index = 0;
        for (std::vector<Array>* list : {&k, &v})
          for (Array& cache : *list)
            CHECK(cache.bytes() == want[index++], "cache ", index, " of layout ",
                  static_cast<int>(layout));
      }
}

TEST(cpu_blocks_swap_through_host_memory) {
  Random random(case_seed("swap_blocks"));
  for (DType dtype : {DType::f32, DType::f16, DType::e4m3})
    for (KvLayout layout : kLayouts) {
      constexpr int kLayers = 2, kBlocks = 9, kPlaces = 6;
      std::vector<Array> from = layers_of(random, kLayers, dtype, layout, true, kBlocks, 32);
      std::vector<Array> back = layers_of(random, kLayers, dtype, layout, true, kBlocks, 32);
      size_t bytes = static_cast<size_t>(kPlaces * 8 * 3 * 32 * bytes_of(dtype));
      HostMemory memory(kLayers * bytes);
      std::memset(memory.data(), 0xff, memory.bytes());
      std::vector<TensorView> middle;
      for (int i = 0; i < kLayers; ++i) {
        middle.push_back(view_of(from[i]));
        TensorView& view = middle.back();
        view.data = static_cast<char*>(memory.data()) + i * bytes;
        view.shape[0] = kPlaces;
        view.strides[0] /= 2;  // without the gaps
      }
      std::vector<int64_t> out = shuffled(random, kBlocks), in = shuffled(random, kBlocks);
      std::vector<int64_t> places = shuffled(random, kPlaces), there, return_trip;
      std::vector<std::vector<uint8_t>> source, want;
      for (int i = 0; i + 1 < kPlaces; ++i) {  // one place stays empty
        there.insert(there.end(), {out[i], places[i]});
        return_trip.insert(return_trip.end(), {places[i], in[i]});
      }
      for (int layer = 0; layer < kLayers; ++layer) {
        source.push_back(from[layer].bytes());
        want.push_back(back[layer].bytes());
        for (int i = 0; i + 1 < kPlaces; ++i)
          copy_block(from[layer], out[i], back[layer], in[i], want.back());
      }
      swap_blocks(views_of(from), middle, pairs_of(there));
      swap_blocks(middle, views_of(back), pairs_of(return_trip));
      for (int layer = 0; layer < kLayers; ++layer) {
        CHECK(from[layer].bytes() == source[layer], "the source of layer ", layer);
        CHECK(back[layer].bytes() == want[layer], "layer ", layer, " of layout ",
              static_cast<int>(layout));
        const uint8_t* empty = static_cast<const uint8_t*>(memory.data()) + layer * bytes +
                               places[kPlaces - 1] * (bytes / kPlaces);
        CHECK(std::all_of(empty, empty + bytes / kPlaces, [](uint8_t b) { return b == 0xff; }),
              "a place that no pair names was written");
      }
    }
}

TEST(host_memory_has_one_owner) {
  HostMemory first(1000), none(0);
  CHECK(first.bytes() == 1000 && none.bytes() == 0 && none.data() != nullptr);
  void* data = first.data();
  CHECK(reinterpret_cast<uintptr_t>(data) % 4096 == 0, "it does not begin on a page");
  std::memset(data, 0, 1000);
  bool pinned = first.is_pinned();
  HostMemory second = std::move(first);
  CHECK(second.data() == data && first.data() == nullptr && second.is_pinned() == pinned);
  second = std::move(none);
  CHECK(second.data() != data && second.bytes() == 0);
  check_throws<std::runtime_error>("cannot have", [] { HostMemory(SIZE_MAX); });
}

// ---- what is refused

// Valid arguments of every function, to be spoilt one at a time.
struct Calls {
  Array rows[2], caches[2], outs[2], others[2];
  std::vector<int64_t> slots = {0, 31, -1}, positions = {0, 1, 2}, mapping = {0, 1, 2, 3};
  std::vector<int32_t> tables = {3, 0, 1, 2}, ends = {0, 10, 12};
  Array angles = Array(DType::f32, {4, 8}), scales = Array(DType::f32, {2});
  TensorView k, v, k_cache, v_cache, slot_mapping, k_out, v_out, block_tables, cu_seqlens;
  TensorView cos, sin, at, k_scales, block_mapping;
  std::vector<TensorView> k_caches, v_caches, src, dst;
  CacheOptions options;
  KvLayout kv_layout = KvLayout::nhd;

  Calls() {
    for (int side = 0; side < 2; ++side) {
      rows[side] = Array(DType::f32, {3, 2, 16});
      caches[side] = Array(DType::f32, {4, 8, 2, 16});
      outs[side] = Array(DType::f32, {12, 2, 16});
      others[side] = Array(DType::f32, {5, 8, 2, 16});
      for (Array* array : {&rows[side], &caches[side]})
        array->for_each_offset([&](int64_t i) { array->set(i, 1 + side + 0.01f * i); });
    }
    angles.for_each_offset([&](int64_t i) { angles.set(i, 0.5f); });
    scales.for_each_offset([&](int64_t i) { scales.set(i, 2); });
    k = view_of(rows[0]), v = view_of(rows[1]);
    k_cache = view_of(caches[0]), v_cache = view_of(caches[1]);
    k_out = view_of(outs[0]), v_out = view_of(outs[1]);
    slot_mapping = view_of(slots), at = view_of(positions), block_mapping = pairs_of(mapping);
    block_tables = TensorView(tables.data(), DType::i32, {2, 2});
    cu_seqlens = TensorView(ends.data(), DType::i32, {3});
    cos = sin = view_of(angles), k_scales = view_of(scales);
    k_caches = src = {k_cache}, v_caches = {v_cache};
    dst = {view_of(others[0])};
  }
  Calls(const Calls&) = delete;

  void write() { reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, options); }
  void gather() {
    gather_cache(k_cache, v_cache, block_tables, cu_seqlens, k_out, v_out, kv_layout);
  }
  void total() { gather_cache_total(cu_seqlens); }
  void copy() { copy_blocks(k_caches, v_caches, block_mapping); }
  void swap() { swap_blocks(src, dst, block_mapping); }

  std::vector<uint8_t> written() const {
    std::vector<uint8_t> all;
    for (const auto* arrays : {&caches, &outs, &others})
      for (const Array& array : *arrays)
        all.insert(all.end(), array.bytes().begin(), array.bytes().end());
    return all;
  }
};

using Function = void (Calls::*)();

template <class Error>
void refuses(Function function, const char* named, void (*spoil)(Calls&)) {
  Calls calls;
  std::vector<uint8_t> before = calls.written();
  spoil(calls);
  check_throws<Error>(named, [&] { (calls.*function)(); });
  CHECK(calls.written() == before, "written although refused for ", named);
}

TEST(what_the_cache_refuses_is_else_taken) {
  for (Function function : {&Calls::write, &Calls::gather, &Calls::copy, &Calls::swap}) {
    Calls calls;
    std::vector<uint8_t> before = calls.written();
    (calls.*function)();
    CHECK(calls.written() != before, "a call did nothing");
  }
}

TEST(reshape_and_cache_refuses_by_name) {
  Function write = &Calls::write;
  refuses<Invalid>(write, "reshape_and_cache: k must have 3 axes",
                   [](Calls& c) { c.k = TensorView(); });
  refuses<Invalid>(write, "v must be float32", [](Calls& c) { c.v.dtype = dl_dtype(DType::f16); });
  refuses<Invalid>(write, "v must have num_tokens", [](Calls& c) { c.v.shape[0] = 2; });
  refuses<Invalid>(write, "v_cache must be on cpu",
                   [](Calls& c) { c.v_cache.device = {kDLCUDA, 0}; });
  refuses<Invalid>(write, "k_cache must have 5 axes",
                   [](Calls& c) { c.options.kv_layout = KvLayout::vllm; });
  refuses<Invalid>(write, "k_cache must have num_heads_kv",
                   [](Calls& c) { c.options.kv_layout = KvLayout::hnd; });
  refuses<Invalid>(write, "slot_mapping must be int64",
                   [](Calls& c) { c.slot_mapping.dtype = dl_dtype(DType::i32); });
  refuses<Invalid>(write, "slot_mapping must lie within [-1, 32), got 32 at index 1",
                   [](Calls& c) { c.slots[1] = 32; });
  refuses<Invalid>(write, "got -2 at index 0", [](Calls& c) { c.slots[0] = -2; });
  refuses<Invalid>(write, "k_scale belongs to a float8_e4m3fn cache",
                   [](Calls& c) { c.options.k_scale = 0.5; });
  refuses<Invalid>(write, "v_scale belongs to a float8_e4m3fn cache",
                   [](Calls& c) { c.options.v_scale = std::nan(""); });
  refuses<Invalid>(write, "k_scale belongs to a float8_e4m3fn cache",
                   [](Calls& c) { c.options.k_scales = &c.k_scales; });
  refuses<Invalid>(write, "v_scale belongs to a float8_e4m3fn cache",
                   [](Calls& c) { c.options.v_scales = &c.k_scales; });
  for (double scale : {0.0, -1.0, double{INFINITY}, std::nan("")}) {
    Calls calls;
    for (TensorView* cache : {&calls.k_cache, &calls.v_cache}) cache->dtype = dl_dtype(DType::e4m3);
    calls.options.v_scale = scale;
    check_throws<Invalid>("v_scale must be positive and finite", [&] { calls.write(); });
  }
  refuses<Invalid>(write, "cos, sin and positions must be given together, got 2", [](Calls& c) {
    c.options.cos = &c.cos;
    c.options.positions = &c.at;
  });
  refuses<Invalid>(write, "rope_interleaved must be False without cos",
                   [](Calls& c) { c.options.rope_interleaved = true; });
  refuses<Invalid>(write, "positions must lie within [0, 4), got 4 at index 1", [](Calls& c) {
    c.options.cos = &c.cos;
    c.options.sin = &c.sin;
    c.options.positions = &c.at;
    c.positions[1] = 4;
  });
}

TEST(gather_cache_refuses_by_name) {
  Function gather = &Calls::gather;
  refuses<Invalid>(gather, "gather_cache: v_out must be float32",
                   [](Calls& c) { c.v_out.dtype = dl_dtype(DType::bf16); });
  refuses<Invalid>(gather, "k_out must have head_dim", [](Calls& c) { c.k_out.shape[2] = 8; });
  refuses<Invalid>(gather, "k_cache must have 5 axes",
                   [](Calls& c) { c.kv_layout = KvLayout::vllm; });
  refuses<Invalid>(gather, "cu_seqlens must end within the rows of k_out, got 12 with 11",
                   [](Calls& c) { c.k_out.shape[0] = c.v_out.shape[0] = 11; });
  refuses<Invalid>(gather, "cu_seqlens must not decrease", [](Calls& c) { c.ends[2] = 9; });
  refuses<Invalid>(gather, "block_tables must name blocks in [0, 4), got 4 at (0, 1)",
                   [](Calls& c) { c.tables[1] = 4; });
  refuses<Invalid>(gather, "block_tables must have room", [](Calls& c) { c.ends[1] = 17; });
  refuses<Invalid>(&Calls::total, "cu_seqlens must be int32",
                   [](Calls& c) { c.cu_seqlens = view_of(c.slots); });
  refuses<Invalid>(&Calls::total, "cu_seqlens must not decrease", [](Calls& c) { c.ends[2] = -1; });
}

TEST(copies_of_blocks_are_refused_by_name) {
  Function copy = &Calls::copy, swap = &Calls::swap;
  refuses<Invalid>(copy, "v_caches must have one cache for each of k_caches (1), or none, got 2",
                   [](Calls& c) { c.v_caches.push_back(c.v_cache); });
  refuses<Invalid>(copy, "k_caches[1] must have shape, strides and dtype of k_caches[0]",
                   [](Calls& c) {
                     c.k_caches.push_back(c.k_cache);
                     c.k_caches[1].shape[0] = 3;
                     c.v_caches.clear();
                   });
  refuses<Invalid>(copy, "block_mapping must have shape (n, 2)",
                   [](Calls& c) { c.block_mapping = view_of(c.mapping); });
  refuses<Invalid>(copy, "must name source blocks in [0, 4), got -1 in pair 1",
                   [](Calls& c) { c.mapping[2] = -1; });
  refuses<Invalid>(copy, "must name each destination once", [](Calls& c) { c.mapping[3] = 1; });
  refuses<Invalid>(copy, "must not copy from a destination", [](Calls& c) { c.mapping[2] = 1; });
  refuses<Invalid>(swap, "dst must have one cache for each of src (1), got 0",
                   [](Calls& c) { c.dst.clear(); });
  refuses<Invalid>(swap, "must have blocks like those of src[0]",
                   [](Calls& c) { c.dst[0].dtype = dl_dtype(DType::i32); });
  refuses<Invalid>(swap, "must name destination blocks in [0, 5), got 5",
                   [](Calls& c) { c.mapping[1] = 5; });
  refuses<Invalid>(swap, "block_mapping must be on the host",
                   [](Calls& c) { c.block_mapping.device = {kDLCUDA, 0}; });
  refuses<Invalid>(swap, "must not share memory", [](Calls& c) { c.dst = {c.k_cache}; });
}

TEST(caches_of_no_tokens_blocks_or_layers_are_taken) {
  Calls calls;
  std::vector<uint8_t> before = calls.written();
  for (TensorView* rows : {&calls.k, &calls.v, &calls.slot_mapping, &calls.block_mapping})
    rows->shape[0] = 0;
  std::fill(calls.ends.begin(), calls.ends.end(), 0);
  calls.write();
  calls.gather();
  calls.copy();
  calls.swap();
  copy_blocks({}, {}, pairs_of(calls.mapping));
  swap_blocks({}, {}, pairs_of(calls.mapping));
  CHECK(calls.written() == before);
}

}  // namespace
}  // namespace cuattn::test
