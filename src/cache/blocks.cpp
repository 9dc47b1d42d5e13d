// SPDX-License-Identifier: Apache-2.0
// copy_blocks, swap_blocks and the host memory for them: caches as lists of blocks of bytes, and
// the checks of a block mapping. Next: cpu/cache.cpp.
#include <algorithm>
#include <utility>
#include <vector>

#include "cuattn/c_api.h"
#include "src/cache/cache.h"
#include "src/check/overlap.h"
#include "src/guarded.h"

namespace cuattn {
namespace {

constexpr size_t kHostUnit = 4096;  // a page

// One list of per-layer caches, as the caller gave it.
struct Caches {
  const char* name;
  std::vector<TensorView> views;
};

Caches read_list(const char* fn, const char* name, const DLTensor* const* list, int32_t count) {
  require_elements(fn, name, list, count);
  Caches caches{name, {}};
  for (int32_t i = 0; i < count; ++i) caches.views.push_back(view_of(fn, name, list[i]));
  return caches;
}

int64_t block_elements(const TensorView& cache) {
  int64_t elements = 1;
  for (int32_t axis = 1; axis < cache.ndim; ++axis) elements *= cache.shape[axis];
  return elements;
}

int64_t block_bytes_of(const TensorView& cache) {
  return block_elements(cache) * (cache.dtype.bits / 8);
}

int64_t stride_bytes_of(const TensorView& cache) {
  return stride_of(cache, 0) * (cache.dtype.bits / 8);
}

// Each block is row-major without gaps; blocks may lie apart, and start on any element.
void require_dense_blocks(const char* fn, const char* name, const TensorView& view, bool output) {
  require_strided(fn, name, view, output, true);
  if (view.size() == 0) return;
  CUATTN_REQUIRE(is_dense_from(view, 1), fn, ": ", name,
                 " must have contiguous blocks, got strides ", strides_text(view), " for shape ",
                 shape_text(view), "; make a contiguous copy");
  CUATTN_REQUIRE(view.shape[0] <= 1 || view.strides[0] >= block_elements(view), fn, ": ", name,
                 " must have blocks that do not overlap, got strides ", strides_text(view),
                 " for shape ", shape_text(view), "; make a contiguous copy");
}

// Every cache of a list, copied as bytes: blocks on the first axis, all alike.
void check_list(const char* fn, const Caches& caches, DLDevice device, const char* like,
                bool output) {
  const TensorView& first = caches.views[0];
  for (size_t i = 0; i < caches.views.size(); ++i) {
    const TensorView& view = caches.views[i];
    std::string name = concat(caches.name, "[", i, "]"), one = concat(caches.name, "[0]");
    CUATTN_REQUIRE(view.ndim >= 2 && view.ndim <= kMaxDims, fn, ": ", name,
                   " must have blocks on the first of 2 to ", kMaxDims, " axes, got shape ",
                   shape_text(view), "; pass a cache");
    bool whole = view.dtype.bits >= 8 && view.dtype.bits % 8 == 0 && view.dtype.lanes == 1;
    CUATTN_REQUIRE(whole, fn, ": ", name, " must hold whole bytes, got ", text(view.dtype),
                   "; view it as another type");
    require_device(fn, name.c_str(), view, device, like);
    bool alike = view.ndim == first.ndim && view.dtype.code == first.dtype.code &&
                 view.dtype.bits == first.dtype.bits && stride_of(view, 0) == stride_of(first, 0);
    for (int32_t axis = 0; alike && axis < view.ndim; ++axis)
      alike = view.shape[axis] == first.shape[axis];
    CUATTN_REQUIRE(alike, fn, ": ", name, " must have shape, strides and dtype of ", one, " ",
                   shape_text(first), " ", text(first.dtype), ", got ", shape_text(view), " ",
                   text(view.dtype), "; copy other caches by another call");
    require_dense_blocks(fn, name.c_str(), view, output);
  }
}

// Pairs (source, destination): blocks that exist, each destination once, and none that another pair
// reads: all pairs are copied at once, in no order.
void check_pairs(const char* fn, const int64_t* pairs, int64_t count, int64_t num_sources,
                 int64_t num_destinations, bool in_place) {
  std::vector<std::pair<int64_t, int64_t>> written;  // destination, index of the pair
  written.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    int64_t source = pairs[2 * i], destination = pairs[2 * i + 1];
    CUATTN_REQUIRE(source >= 0 && source < num_sources, fn,
                   ": block_mapping must name source blocks in [0, ", num_sources, "), got ",
                   source, " in pair ", i, "; a row is (source, destination)");
    CUATTN_REQUIRE(destination >= 0 && destination < num_destinations, fn,
                   ": block_mapping must name destination blocks in [0, ", num_destinations,
                   "), got ", destination, " in pair ", i, "; a row is (source, destination)");
    written.emplace_back(destination, i);
  }
  std::sort(written.begin(), written.end());
  for (size_t i = 1; i < written.size(); ++i) {
    CUATTN_REQUIRE(written[i].first != written[i - 1].first, fn,
                   ": block_mapping must name each destination once, got ", written[i].first,
                   " in pairs ", written[i - 1].second, " and ", written[i].second,
                   "; all pairs are copied at once");
  }
  if (!in_place) return;
  for (int64_t i = 0; i < count; ++i) {
    int64_t source = pairs[2 * i];
    auto found = std::lower_bound(written.begin(), written.end(), std::pair(source, int64_t{0}));
    bool overwritten = found != written.end() && found->first == source && found->second != i;
    CUATTN_REQUIRE(!overwritten, fn, ": block_mapping must not copy from a destination, got ",
                   source, " as source of pair ", i, " and destination of pair ",
                   overwritten ? found->second : 0,
                   "; all pairs are copied at once: make two calls");
  }
}

void read_mapping(const char* fn, const TensorView& mapping) {
  require_dtype(fn, "block_mapping", mapping, DType::i64);
  CUATTN_REQUIRE(mapping.ndim == 2 && mapping.shape[1] == 2, fn,
                 ": block_mapping must have shape (n, 2), got ", shape_text(mapping),
                 "; a row is (source, destination)");
  require_contiguous(fn, "block_mapping", mapping, true);
}

CacheList list_of(const Caches& caches, std::vector<void*>& pointers) {
  CacheList list{};
  if (caches.views.empty()) return list;
  for (const TensorView& view : caches.views) pointers.push_back(view.data);
  const TensorView& first = caches.views[0];
  list.data = pointers.data();
  list.count = static_cast<int32_t>(pointers.size());
  list.block_bytes = block_bytes_of(first);
  list.block_stride = stride_bytes_of(first);
  return list;
}

// A cache of the lists of a call, and the bytes [begin, end) in which its blocks lie.
struct Listed {
  uintptr_t begin, end;
  const Caches* list;
  size_t index;
  bool is_written;

  const TensorView& view() const { return list->views[index]; }
  std::string name() const { return concat(list->name, "[", index, "]"); }
};

bool any_overlap(std::vector<Listed>& caches) {
  std::sort(caches.begin(), caches.end(),
            [](const Listed& a, const Listed& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < caches.size(); ++i) {
    if (caches[i - 1].end > caches[i].begin) return true;
  }
  return false;
}

// Whether caches are interleaved, as the layers of one array [num_blocks, num_layers, ...] are: all
// have one stride, and their blocks fill different parts of it.
bool are_interleaved(const std::vector<Listed>& caches) {
  int64_t stride = stride_bytes_of(caches[0].view());
  std::vector<Listed> parts;  // of the first stride
  for (const Listed& cache : caches) {
    if (stride == 0 || stride_bytes_of(cache.view()) != stride) return false;
    uintptr_t begin = cache.begin % static_cast<uintptr_t>(stride);
    uintptr_t end = begin + static_cast<uintptr_t>(block_bytes_of(cache.view()));
    parts.push_back({begin, end, cache.list, cache.index, cache.is_written});
  }
  if (any_overlap(parts)) return false;
  return parts.back().end <= parts[0].begin + static_cast<uintptr_t>(stride);
}

// Every cache that is written lies apart from all others. `in_place`: `others` is written too, and
// a cache may be listed twice, for its copies write the same.
void check_memory(const char* fn, const Caches& written, const Caches& others,
                  const TensorView& mapping, bool in_place) {
  Footprint pairs("block_mapping", mapping);
  std::vector<Listed> caches;
  caches.reserve(written.views.size() + others.views.size());
  for (const Caches* list : {&written, &others}) {
    for (size_t i = 0; i < list->views.size(); ++i) {
      const TensorView& view = list->views[i];
      if (view.size() == 0) continue;
      auto begin = reinterpret_cast<uintptr_t>(view.data);
      int64_t bytes = (view.shape[0] - 1) * stride_bytes_of(view) + block_bytes_of(view);
      caches.push_back(
          {begin, begin + static_cast<uintptr_t>(bytes), list, i, in_place || list == &written});
      const Listed& cache = caches.back();
      if (cache.is_written && share_memory(pairs, {nullptr, view}))
        refuse_shared(fn, cache.name().c_str(), pairs.name);
    }
  }
  if (!any_overlap(caches) || are_interleaved(caches)) return;
  for (size_t i = 0; i < caches.size(); ++i) {
    for (size_t j = i + 1; j < caches.size() && caches[j].begin < caches[i].end; ++j) {
      const Listed *a = &caches[i], *b = &caches[j];
      if (!(a->is_written || b->is_written) || (in_place && is_same_view(a->view(), b->view())))
        continue;
      if (!share_memory({nullptr, a->view()}, {nullptr, b->view()})) continue;
      if (!a->is_written || (b->is_written && b->index < a->index)) std::swap(a, b);
      refuse_shared(fn, a->name().c_str(), b->name().c_str(),
                    in_place ? "list each cache once" : "use copy_blocks within one cache");
    }
  }
}

void copy_blocks(const Caches& k_caches, const Caches& v_caches, const TensorView& mapping,
                 Stream stream) {
  const char* fn = "copy_blocks";
  CUATTN_REQUIRE(v_caches.views.empty() || v_caches.views.size() == k_caches.views.size(), fn,
                 ": v_caches must have one cache for each of k_caches (", k_caches.views.size(),
                 "), or none, got ", v_caches.views.size(), "; pass the layers of both");
  read_mapping(fn, mapping);
  if (k_caches.views.empty()) return;
  DLDevice device = k_caches.views[0].device;
  require_known_device(fn, "k_caches[0]", device);
  check_list(fn, k_caches, device, "k_caches[0]", true);
  BlockCopyParams p{};
  p.num_blocks = k_caches.views[0].shape[0];
  if (!v_caches.views.empty()) {
    check_list(fn, v_caches, device, "k_caches[0]", true);
    require_extent(fn, "v_caches[0]", "num_blocks", v_caches.views[0].shape[0], p.num_blocks,
                   "k_caches[0]");
  }
  check_memory(fn, k_caches, v_caches, mapping, true);
  p.pairs = static_cast<const int64_t*>(mapping.data);
  p.num_pairs = mapping.shape[0];
  p.pairs_on_host = is_cpu(mapping.device);
  if (!p.pairs_on_host) require_device(fn, "block_mapping", mapping, device, "k_caches[0]");

  const Backend& backend = backend_of(fn, device);
  HostCopy<int64_t> pairs(backend, mapping.device, p.pairs, 2 * p.num_pairs, stream);
  if (pairs.data() != nullptr)
    check_pairs(fn, pairs.data(), p.num_pairs, p.num_blocks, p.num_blocks, true);
  std::vector<void*> k_pointers, v_pointers;
  p.k = list_of(k_caches, k_pointers);
  p.v = list_of(v_caches, v_pointers);
  if (p.num_pairs == 0 || p.num_blocks == 0) return;
  backend.copy_blocks(p, device.device_id, stream);
}

void swap_blocks(const Caches& src, const Caches& dst, const TensorView& mapping, Stream stream) {
  const char* fn = "swap_blocks";
  CUATTN_REQUIRE(src.views.size() == dst.views.size(), fn,
                 ": dst must have one cache for each of src (", src.views.size(), "), got ",
                 dst.views.size(), "; pass the same layers");
  read_mapping(fn, mapping);
  CUATTN_REQUIRE(is_cpu(mapping.device), fn, ": block_mapping must be on the host, got ",
                 text(mapping.device), "; copy it there first");
  if (src.views.empty()) return;
  DLDevice from = src.views[0].device, to = dst.views[0].device;
  require_known_device(fn, "src[0]", from);
  require_known_device(fn, "dst[0]", to);
  CUATTN_REQUIRE(is_cpu(from) || is_cpu(to) || same_device(from, to), fn,
                 ": dst must be on the device of src, or one of them on the host, got ", text(from),
                 " and ", text(to), "; go through the host");
  check_list(fn, src, from, "src[0]", false);
  check_list(fn, dst, to, "dst[0]", true);
  const TensorView &one = src.views[0], &other = dst.views[0];
  bool alike = one.ndim == other.ndim && one.dtype.code == other.dtype.code &&
               one.dtype.bits == other.dtype.bits;
  for (int32_t axis = 1; alike && axis < one.ndim; ++axis)
    alike = one.shape[axis] == other.shape[axis];
  CUATTN_REQUIRE(alike, fn, ": dst[0] must have blocks like those of src[0] ", shape_text(one), " ",
                 text(one.dtype), ", got ", shape_text(other), " ", text(other.dtype),
                 "; only the number of blocks may differ");
  check_memory(fn, dst, src, mapping, false);
  const int64_t* pairs = static_cast<const int64_t*>(mapping.data);
  check_pairs(fn, pairs, mapping.shape[0], one.shape[0], other.shape[0], false);
  if (mapping.shape[0] == 0 || block_bytes_of(one) == 0) return;

  DLDevice device = is_cpu(from) ? to : from;
  const Backend& backend = backend_of(fn, device);
  for (size_t i = 0; i < src.views.size(); ++i) {
    BlockSwapParams p{src.views[i].data,    dst.views[i].data,      block_bytes_of(one),
                      stride_bytes_of(one), stride_bytes_of(other), pairs,
                      mapping.shape[0]};
    backend.swap_blocks(p, device.device_id, stream);
  }
}

}  // namespace
}  // namespace cuattn

using namespace cuattn;

extern "C" {

cuattn_status cuattn_copy_blocks(const DLTensor* const* k_caches, int32_t num_k_caches,
                                 const DLTensor* const* v_caches, int32_t num_v_caches,
                                 const DLTensor* block_mapping, void* stream) {
  return guarded([&] {
    copy_blocks(read_list("copy_blocks", "k_caches", k_caches, num_k_caches),
                read_list("copy_blocks", "v_caches", v_caches, num_v_caches),
                view_of("copy_blocks", "block_mapping", block_mapping), stream);
  });
}

cuattn_status cuattn_swap_blocks(const DLTensor* const* src, int32_t num_src,
                                 const DLTensor* const* dst, int32_t num_dst,
                                 const DLTensor* block_mapping, void* stream) {
  return guarded([&] {
    swap_blocks(read_list("swap_blocks", "src", src, num_src),
                read_list("swap_blocks", "dst", dst, num_dst),
                view_of("swap_blocks", "block_mapping", block_mapping), stream);
  });
}

cuattn_status cuattn_host_alloc(size_t bytes, void** memory, int32_t* is_pinned) {
  return guarded([&] {
    require_given("pinned_empty", "memory", memory);
    require_given("pinned_empty", "is_pinned", is_pinned);
    *memory = nullptr;
    *is_pinned = 0;
    size_t size = (bytes + kHostUnit - 1) / kHostUnit * kHostUnit;
    if (size < bytes) fail<OutOfMemory>("pinned_empty: cannot have ", bytes, " bytes");
    if (size == 0) size = kHostUnit;
    if (const Backend* cuda = cuda_backend()) *memory = cuda->host_alloc(size);
    if (*memory != nullptr) {
      *is_pinned = 1;
      return;
    }
    *memory = cpu_backend().host_alloc(size);
    if (*memory == nullptr)
      fail<OutOfMemory>("pinned_empty: the host cannot give ", bytes, " bytes; ask for less");
  });
}

void cuattn_host_free(void* memory, int32_t is_pinned) {
  if (memory == nullptr) return;
  const Backend* cuda = cuda_backend();
  (is_pinned != 0 && cuda != nullptr ? *cuda : cpu_backend()).host_free(memory);
}

}  // extern "C"
