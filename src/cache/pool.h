// SPDX-License-Identifier: Apache-2.0
// Blocks of a paged KV cache: reference counts, copy on write, sharing of prefixes, eviction. The
// meaning of each method stands at the function of its name in c_api.h. Sources of the ideas:
// PagedAttention, arXiv:2309.06180 (blocks, copy on write); RadixAttention, arXiv:2312.07104
// (prefixes found again, least recently used evicted).
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cuattn/c_api.h"

namespace cuattn {

class BlockPoolState {
 public:
  BlockPoolState(int64_t num_blocks, int64_t block_size);

  void allocate(int64_t count, int32_t* ids);
  void free(const int32_t* ids, int64_t count);
  void fork(const int32_t* ids, int64_t count);
  int64_t ref_count(int32_t id);
  int32_t make_writable(int32_t id);
  int64_t match_prefix(const int64_t* tokens, int64_t num_tokens, std::string_view salt,
                       int32_t* ids);
  void commit(const int32_t* ids, int64_t count, const int64_t* tokens, int64_t num_tokens,
              int32_t parent, std::string_view salt);
  cuattn_block_pool_stats stats();

 private:
  // What a committed block holds: `tokens`, after all that the content `parent` stands for, or for
  // the first of a sequence after `salt`. Contents are numbered in the order of their first commit
  // and never renumbered, so (parent, salt, tokens) is the whole chain from the begin of the
  // sequence. Note: a match compares all three. A collision of hashes costs time; were the hash
  // trusted, it would hand one user the keys and values of another.
  struct Block {
    int64_t references = 0;
    int32_t previous = kNone, next = kNone;  // in the list of free blocks
    int32_t next_in_bucket = kNone;
    bool cached = false;  // found by match_prefix; of blocks with one content only one is
    uint64_t content = kNothing, parent = kNothing, hash = 0;
    std::vector<int64_t> tokens;
    std::string salt;  // empty but in the first block of a salted sequence
  };

  static constexpr int32_t kNone = -1;
  static constexpr uint64_t kNothing = 0;  // no content; as a parent: the begin of a sequence

  Block& held(const char* function, int32_t id);
  void require_free(const char* function, int64_t count) const;
  static void require_tokens(const char* function, int64_t count);
  int32_t take();
  void reference(Block& block);
  void release(Block& block);
  void put_front(int32_t id);
  void put_back(int32_t id);
  void unlink(int32_t id);

  // What a block holds, before it is known whether the pool has it.
  struct Key {
    uint64_t parent;
    std::string_view salt;
    const int64_t* tokens;  // [block_size]
  };

  uint64_t hash_of(const Key& key) const;
  static bool holds(const Block& block, const Key& key);
  int32_t find(uint64_t hash, const Key& key) const;
  bool commit_one(int32_t id, const Key& key);
  void insert(int32_t id);
  void forget(int32_t id);

  std::mutex mutex_;
  std::vector<Block> blocks_;
  std::vector<int32_t> buckets_;  // the first block of each, a power of two of them
  int32_t first_free_ = kNone, last_free_ = kNone;  // handed out from the front
  uint64_t last_content_ = kNothing;
  uint64_t seed_;  // of the hashes
  cuattn_block_pool_stats stats_{};
};

}  // namespace cuattn
