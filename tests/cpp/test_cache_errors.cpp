// SPDX-License-Identifier: Apache-2.0
// What the cache operations refuse through the C++ header: the message, and that nothing is written.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "cache.h"
#include "test.h"

namespace cuattn::test {
namespace {

using Invalid = std::invalid_argument;

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
  refuses<Invalid>(write, "k_scale must be a number or an array, got 0.5 and an array",
                   [](Calls& c) {
                     for (TensorView* cache : {&c.k_cache, &c.v_cache})
                       cache->dtype = dl_dtype(DType::e4m3);
                     c.options.k_scale = 0.5;
                     c.options.k_scales = &c.k_scales;
                   });
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
