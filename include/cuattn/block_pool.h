// SPDX-License-Identifier: Apache-2.0
// The blocks of a paged KV cache from C++: reference counts, copy on write, sharing of prefixes,
// eviction. A thin owner of the C handle that throws; safe to use from several threads.
//
//   cuattn::BlockPool pool(num_blocks, 16);
//   std::vector<int32_t> ids = pool.match_prefix(tokens.data(), tokens.size());  // already cached
//   ... pool.allocate(n), write keys and values, pool.commit(ids, tokens.data(), tokens.size()),
//   pool.free(ids)
//
// A salt keeps apart what tokens alone do not tell apart: adapters, images, tenants. Sequences
// share blocks only where their salts are the same bytes.
//
// Throws std::invalid_argument for a foreign id, a block that is free (double free) or impossible
// numbers, and cuattn::OutOfBlocks; a call that throws has changed nothing. What each function
// means in detail stands at the function of its name in c_api.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "cuattn/attention.h"
#include "cuattn/c_api.h"

namespace cuattn {

class BlockPool {
 public:
  using Stats = cuattn_block_pool_stats;
  static constexpr int32_t kNoParent = -1;

  // block_size counts tokens.
  BlockPool(int64_t num_blocks, int64_t block_size) {
    cuattn_block_pool* pool = nullptr;
    detail::check(cuattn_block_pool_create(num_blocks, block_size, &pool));
    pool_.reset(pool);
    num_blocks_ = num_blocks;
    block_size_ = block_size;
  }

  // n free blocks with one reference each; all or, with OutOfBlocks, none.
  std::vector<int32_t> allocate(int64_t n) {
    std::vector<int32_t> ids(n < 0 ? 0 : n < num_blocks_ ? n : num_blocks_);
    detail::check(cuattn_block_pool_allocate(pool_.get(), n, ids.data()));
    return ids;
  }

  // Drops one reference of each block.
  void free(const std::vector<int32_t>& ids) {
    detail::check(cuattn_block_pool_free(pool_.get(), ids.data(), ids.size()));
  }

  // Adds one reference to each block.
  void fork(const std::vector<int32_t>& ids) {
    detail::check(cuattn_block_pool_fork(pool_.get(), ids.data(), ids.size()));
  }

  int64_t ref_count(int32_t id) const {
    int64_t count = 0;
    detail::check(cuattn_block_pool_ref_count(pool_.get(), id, &count));
    return count;
  }

  // The block to write to in place of `id`: another one if `id` is shared, into which the caller
  // copies the content of `id`.
  int32_t make_writable(int32_t id) {
    int32_t writable = id;
    detail::check(cuattn_block_pool_make_writable(pool_.get(), id, &writable));
    return writable;
  }

  // The cached blocks that hold the first tokens, block_size each, with one more reference.
  std::vector<int32_t> match_prefix(const int64_t* tokens, int64_t num_tokens,
                                    std::string_view salt = {}) {
    std::vector<int32_t> ids(num_tokens > 0 ? num_tokens / block_size_ : 0);
    int64_t count = 0;
    cuattn_prefix_options options = options_of(salt);
    detail::check(cuattn_block_pool_match_prefix(pool_.get(), tokens, num_tokens, &options,
                                                 ids.data(), &count));
    ids.resize(count);
    return ids;
  }

  // Lets the full blocks among `ids`, which hold `tokens` and follow `parent`, be matched: call it
  // once their keys and values are written. A salt belongs to the begin, where there is no parent.
  void commit(const std::vector<int32_t>& ids, const int64_t* tokens, int64_t num_tokens,
              int32_t parent = kNoParent, std::string_view salt = {}) {
    cuattn_prefix_options options = options_of(salt);
    detail::check(cuattn_block_pool_commit(pool_.get(), ids.data(), ids.size(), tokens, num_tokens,
                                           parent, &options));
  }

  Stats stats() const {
    Stats stats;
    detail::check(cuattn_block_pool_get_stats(pool_.get(), &stats));
    return stats;
  }

 private:
  static cuattn_prefix_options options_of(std::string_view salt) {
    cuattn_prefix_options options;
    cuattn_prefix_options_init(&options, sizeof options);
    options.salt = salt.data();
    options.salt_bytes = static_cast<int64_t>(salt.size());
    return options;
  }

  struct Destroy {
    void operator()(cuattn_block_pool* pool) const { cuattn_block_pool_destroy(pool); }
  };
  std::unique_ptr<cuattn_block_pool, Destroy> pool_;
  int64_t num_blocks_ = 0, block_size_ = 0;
};

}  // namespace cuattn
