// SPDX-License-Identifier: Apache-2.0
// What the cache operations share: caches with their tables, and data of the device on the host.
#pragma once

#include <vector>

#include "cuattn/c_api.h"
#include "cuattn/params/cache.h"
#include "cuattn/plan.h"
#include "src/cache/checks.h"
#include "src/check/overlap.h"

namespace cuattn {

// Caches and tables of a call; where the rows lie, and how many, is the caller's to say.
// `check_data` false: no data pointer is looked at, for explain(). Caches that start on elements
// may have any head_dim.
CacheGatherParams read_pages(const char* function, CacheNames names, const TensorView& k_cache,
                             const TensorView& v_cache, const TensorView& block_tables,
                             KvLayout layout, DType dtype, DLDevice device, const char* like,
                             bool check_data, Starts starts = Starts::on_16_bytes);

// Throws where a table has no room for a sequence or names a block that is not there, or a sequence
// is longer than padded_len. Other faults of the lengths are left to check().
void check_pages(const char* function, const CacheGatherParams& params, DLDevice device,
                 Stream stream);

// What reshape_and_cache and mla_write share, into params whose num_tokens (and k) are filled, on the
// device of the argument `like`. First where the rows go, slot_mapping or what the options have in
// its place (slots.cpp), then the rotation of k, from cos, sin and positions.
void read_slots(const char* function, const DLTensor* slot_mapping,
                const cuattn_cache_options& options, DLDevice device, const char* like,
                bool check_data, CacheWriteParams& params);
void read_rope(const char* function, const cuattn_cache_options& options, DLDevice device,
               const char* like, bool check_data, CacheWriteParams& params);
// What both read besides, and the check of what lies there, where the host has it.
void read_slot_memory(CallMemory& memory, const CacheWriteParams& params);
void check_slots(const char* function, const CacheWriteParams& params, DLDevice device,
                 Stream stream);

// The memory of one cache of a call.
inline Footprint cache_footprint(const char* name, const CacheSide& side, int64_t num_blocks,
                                 int32_t num_heads, int32_t block_size, DType dtype) {
  const CacheStrides& strides = side.strides;
  return {name,
          side.cache,
          itemsize(dtype),
          {{num_blocks, strides.block},
           {num_heads, strides.head},
           {block_size, strides.token},
           {side.head_dim / side.run, side.run_stride},
           {side.run, 1}}};
}

inline Footprint cache_footprint(const char* name, const CacheSide& side,
                                 const CacheGatherParams& p) {
  return cache_footprint(name, side, p.pages.num_blocks, p.num_heads, p.pages.block_size, p.dtype);
}

inline Footprint tables_footprint(const CacheGatherParams& p) {
  return {"block_tables",
          p.pages.block_tables,
          sizeof(int32_t),
          {{p.num_seqs, p.pages.block_tables_stride}, {p.max_blocks, 1}}};
}

// What an array holds, as the host sees it: itself on the CPU; on CUDA a copy, made only where the
// checks are on, else nothing.
template <class T>
class HostCopy {
 public:
  HostCopy(const Backend& backend, DLDevice device, const T* data, int64_t count, Stream stream)
      : data_(is_cpu(device) ? data : nullptr) {
    if (is_cpu(device) || data == nullptr || count == 0 || !checks_device_data()) return;
    copy_.resize(static_cast<size_t>(count));
    if (backend.read_back(copy_.data(), data, copy_.size() * sizeof(T), device.device_id, stream))
      data_ = copy_.data();
  }
  const T* data() const { return data_; }  // nullptr where nothing was read

 private:
  const T* data_;
  std::vector<T> copy_;
};

}  // namespace cuattn
