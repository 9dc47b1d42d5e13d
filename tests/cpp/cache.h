// SPDX-License-Identifier: Apache-2.0
// Arrays of the cache operations, shared by their CPU tests: views, places of bytes, random content,
// and rows and blocks that lie apart.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cuattn/kv_cache.h"
#include "paged.h"
#include "test.h"

namespace cuattn::test {

inline const DLDevice kHost{kDLCPU, 0};
inline constexpr KvLayout kLayouts[] = {KvLayout::nhd, KvLayout::hnd, KvLayout::vllm};

inline TensorView view_of(Array& array) { return array.view(array.data(), kHost); }
inline TensorView view_of(std::vector<int64_t>& numbers) {
  return {numbers.data(), DType::i64, {static_cast<int64_t>(numbers.size())}};
}
inline TensorView pairs_of(std::vector<int64_t>& numbers) {
  return {numbers.data(), DType::i64, {static_cast<int64_t>(numbers.size() / 2), 2}};
}

// Where an element stands in the bytes of an array, guard bands included.
inline size_t byte_of(const Array& array, int64_t offset) {
  return array.guard_bytes() + static_cast<size_t>(offset * bytes_of(array.dtype()));
}

inline void fill_normal(Random& random, Array& array) {
  array.for_each_offset([&](int64_t i) { array.set(i, random.normal()); });
}

inline void fill_bytes(Random& random, Array& array) {
  array.for_each_offset([&](int64_t i) {
    for (int b = 0; b < bytes_of(array.dtype()); ++b)
      array.bytes()[byte_of(array, i) + b] = static_cast<uint8_t>(random.range(0, 255));
  });
}

// [tokens, heads, dim] with gaps of NaN between rows and between heads.
inline Array rows_apart(DType dtype, int64_t tokens, int64_t heads, int64_t dim) {
  return Array(dtype, {tokens, heads, dim}, {heads * (dim + 8) + 24, dim + 8, 1});
}

// A cache with a block's gap after each block, as where K and V share an allocation.
inline Array cache_apart(DType dtype, KvLayout layout, bool is_k, int64_t blocks,
                         int64_t block_size, int64_t heads, int64_t dim) {
  Array dense = paged_cache(dtype, layout, is_k, blocks, block_size, heads, dim);
  std::vector<int64_t> strides = dense.strides();
  strides[0] *= 2;
  return Array(dtype, dense.shape(), strides);
}

inline std::vector<int64_t> shuffled(Random& random, int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) order[i] = i;
  for (int64_t i = count - 1; i > 0; --i)
    std::swap(order[i], order[random.range(0, static_cast<int>(i))]);
  return order;
}

}  // namespace cuattn::test
