// SPDX-License-Identifier: Apache-2.0
// copy_blocks, swap_blocks and HostMemory through the C++ header, on the CPU: every byte of every
// array against a model on the host, all layouts and dtypes, blocks that lie apart.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cache.h"
#include "test.h"

namespace cuattn::test {
namespace {

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

}  // namespace
}  // namespace cuattn::test
