// SPDX-License-Identifier: Apache-2.0
// The operations on paged KV caches from C++: rows into blocks and out of them, blocks copied
// within caches and moved between them, and host memory for that. They write the caller's arrays,
// in the order of the stream, and allocate no device memory. Two may wait for the device:
// swap_blocks with host memory that is not pinned, and gather_cache_total. Names and meaning are
// those of the Python functions; layouts: docs/layouts.md.
//
//   cuattn::CacheOptions options;
//   options.kv_layout = cuattn::KvLayout::hnd;
//   cuattn::reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, options, stream);
//   cuattn::copy_blocks({k_cache}, {v_cache}, block_mapping, stream);
//
// They throw as attention() does; nothing was written then. Which block belongs to whom is the work
// of block_pool.h, attention over the blocks that of attention.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuattn/attention.h"
#include "cuattn/c_api.h"
#include "cuattn/params/pages.h"
#include "cuattn/tensor.h"

namespace cuattn {

// The options of reshape_and_cache; names, defaults and meaning are those of the Python function.
struct CacheOptions {
  KvLayout kv_layout = KvLayout::nhd;
  double k_scale = 1.0, v_scale = 1.0;  // of float8 caches: value = stored * scale
  const TensorView *k_scales = nullptr, *v_scales = nullptr;  // instead: float32 [num_heads_kv], or
                                                              // one element
  // Rotation of k: all three or none. With block_tables, positions may be left out.
  const TensorView *cos = nullptr, *sin = nullptr;  // float32 [max_position, rotary_dim / 2]
  const TensorView* positions = nullptr;            // int64 [num_tokens]
  bool rope_interleaved = false;
  // Instead of slot_mapping, which is TensorView{} then, for rows that are the newest of their
  // sequences, as many of each: int32 [num_seqs, max_blocks_per_seq], and lengths with these tokens,
  // int32 [num_seqs]. Of a sequence with fewer tokens than rows the last rows are written.
  const TensorView *block_tables = nullptr, *context_lens = nullptr;
};

namespace detail {

struct CCacheOptions {
  DLTensor k_scales, v_scales, cos, sin, positions, block_tables, context_lens;
  cuattn_cache_options c;

  explicit CCacheOptions(const CacheOptions& o) {
    cuattn_cache_options_init(&c, sizeof c);
    c.kv_layout = static_cast<int32_t>(o.kv_layout);
    c.rope_interleaved = o.rope_interleaved;
    c.has_k_scale = o.k_scale != 1.0;
    c.has_v_scale = o.v_scale != 1.0;
    c.k_scale = o.k_scale;
    c.v_scale = o.v_scale;
    c.k_scales = COptions::borrow(o.k_scales, k_scales);
    c.v_scales = COptions::borrow(o.v_scales, v_scales);
    c.cos = COptions::borrow(o.cos, cos);
    c.sin = COptions::borrow(o.sin, sin);
    c.positions = COptions::borrow(o.positions, positions);
    c.block_tables = COptions::borrow(o.block_tables, block_tables);
    c.context_lens = COptions::borrow(o.context_lens, context_lens);
  }
  CCacheOptions(const CCacheOptions&) = delete;
};

// A list of caches as the C ABI takes it; it points into the views.
class CList {
 public:
  explicit CList(const std::vector<TensorView>& views) {
    tensors_.reserve(views.size());
    for (const TensorView& view : views) tensors_.push_back(view.dl());
    for (const DLTensor& tensor : tensors_) pointers_.push_back(&tensor);
  }
  CList(const CList&) = delete;

  const DLTensor* const* data() const { return pointers_.data(); }
  int32_t count() const { return static_cast<int32_t>(pointers_.size()); }

 private:
  std::vector<DLTensor> tensors_;
  std::vector<const DLTensor*> pointers_;
};

}  // namespace detail

// Writes row i of k and v, [num_tokens, num_heads_kv, head_dim] (v: head_dim_v), into slot
// slot_mapping[i] of the caches: int64 [num_tokens], slot = block * block_size + token in the
// block, -1 skips the row. The caches are of k's dtype or float8_e4m3fn, for which uint8 may stand.
inline void reshape_and_cache(const TensorView& k, const TensorView& v, const TensorView& k_cache,
                              const TensorView& v_cache, const TensorView& slot_mapping,
                              const CacheOptions& options = {}, void* stream = nullptr) {
  detail::CCacheOptions c(options);
  DLTensor dk = k.dl(), dv = v.dl(), dkc = k_cache.dl(), dvc = v_cache.dl(), ds = slot_mapping.dl();
  const DLTensor* slots = slot_mapping.ndim > 0 ? &ds : nullptr;
  detail::check(cuattn_reshape_and_cache(&dk, &dv, &dkc, &dvc, slots, &c.c, stream));
}

// The reverse: the first tokens of each sequence, end to end, into k_out and v_out [num_tokens,
// num_heads_kv, head_dim] of the caches' dtype. block_tables int32 [num_seqs, max_blocks_per_seq],
// cu_seqlens int32 [num_seqs + 1]; rows from cu_seqlens[num_seqs] on are left as they are.
inline void gather_cache(const TensorView& k_cache, const TensorView& v_cache,
                         const TensorView& block_tables, const TensorView& cu_seqlens,
                         const TensorView& k_out, const TensorView& v_out,
                         KvLayout kv_layout = KvLayout::nhd, void* stream = nullptr) {
  DLTensor dk = k_cache.dl(), dv = v_cache.dl(), dt = block_tables.dl(), dc = cu_seqlens.dl(),
           dko = k_out.dl(), dvo = v_out.dl();
  detail::check(
      cuattn_gather_cache(&dk, &dv, &dt, &dc, &dko, &dvo, static_cast<int32_t>(kv_layout), stream));
}

// The rows that gather_cache writes, the last element of cu_seqlens. On CUDA it waits for the
// stream; where the host knows the lengths, it is not needed.
inline int64_t gather_cache_total(const TensorView& cu_seqlens, void* stream = nullptr) {
  DLTensor dc = cu_seqlens.dl();
  int64_t total = 0;
  detail::check(cuattn_gather_cache_total(&dc, stream, &total));
  return total;
}

// Copies whole blocks within each cache, one for each layer: block_mapping int64 [n, 2] (source,
// destination), on the host or on the device of the caches. Blocks lie on the first axis, whatever
// the layout; the caches of a list are alike, and v_caches may be empty. All pairs are copied at
// once: a destination occurs once, and never as the source of another pair.
inline void copy_blocks(const std::vector<TensorView>& k_caches,
                        const std::vector<TensorView>& v_caches, const TensorView& block_mapping,
                        void* stream = nullptr) {
  detail::CList k(k_caches), v(v_caches);
  DLTensor dm = block_mapping.dl();
  detail::check(cuattn_copy_blocks(k.data(), k.count(), v.data(), v.count(), &dm, stream));
}

// Copies whole blocks of src[i] into dst[i], within one device or between it and the host.
// block_mapping int64 [n, 2] (block of src, block of dst) is on the host. Host memory must live,
// and stay as it is, until the stream has passed; HostMemory lets the copies overlap with kernels.
inline void swap_blocks(const std::vector<TensorView>& src, const std::vector<TensorView>& dst,
                        const TensorView& block_mapping, void* stream = nullptr) {
  detail::CList from(src), to(dst);
  DLTensor dm = block_mapping.dl();
  detail::check(cuattn_swap_blocks(from.data(), from.count(), to.data(), to.count(), &dm, stream));
}

// Host memory for swap_blocks, of undefined contents: pinned where there is a CUDA device, else
// plain. It begins on a page, and is given back by the destructor.
class HostMemory {
 public:
  explicit HostMemory(size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    int32_t is_pinned = 0;
    detail::check(cuattn_host_alloc(bytes, &memory, &is_pinned));
    memory_ = {memory, Free{is_pinned}};
  }

  void* data() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }
  bool is_pinned() const { return memory_.get_deleter().is_pinned != 0; }

 private:
  struct Free {
    int32_t is_pinned;
    void operator()(void* memory) const { cuattn_host_free(memory, is_pinned); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t bytes_;
};

}  // namespace cuattn
