// SPDX-License-Identifier: Apache-2.0
// The block pool and its functions in the C ABI.
//
// One doubly linked list holds all blocks without a reference: those that hold nothing worth
// keeping at the front, cached ones at the back in the order of their last use. allocate takes from
// the front, so what is evicted is what was unused the longest.
//
//   front [ empty | empty | cached, old | ... | cached, new ] back
#include "src/cache/pool.h"

#include <sys/random.h>

#include <algorithm>
#include <chrono>

#include "src/guarded.h"
#include "src/options.h"

namespace cuattn {
namespace {

constexpr const char* kWayOut = "; free or swap out a sequence, or make a larger pool";

// A bijection of 64 bits in which every bit of the result depends on every bit of x (the finaliser
// of splitmix64).
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Secret and its own for each pool: whoever can send prompts must not be able to choose ones that
// share a bucket, which would make every look-up walk over all of them.
uint64_t random_seed() {
  uint64_t seed = 0;
  if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != sizeof(seed)) {  // early at boot, or barred
    seed = mix(std::chrono::steady_clock::now().time_since_epoch().count() ^
               reinterpret_cast<uintptr_t>(&seed));
  }
  return seed;
}

}  // namespace

BlockPoolState::BlockPoolState(int64_t num_blocks, int64_t block_size) : seed_(random_seed()) {
  CUATTN_REQUIRE(num_blocks >= 1 && num_blocks <= INT32_MAX,
                 "BlockPool: num_blocks must lie within [1, 2147483647], got ", num_blocks,
                 "; ids are int32");
  CUATTN_REQUIRE(block_size >= 1 && block_size <= INT32_MAX,
                 "BlockPool: block_size must lie within [1, 2147483647], got ", block_size,
                 "; it counts tokens");
  size_t num_buckets = 1;
  while (num_buckets < static_cast<size_t>(num_blocks)) num_buckets *= 2;
  buckets_.assign(num_buckets, kNone);
  blocks_.resize(num_blocks);
  for (int32_t id = 0; id < num_blocks; ++id) put_back(id);
  stats_.num_blocks = stats_.free_blocks = num_blocks;
  stats_.block_size = block_size;
}

// ---- Checks

// A block that somebody holds.
BlockPoolState::Block& BlockPoolState::held(const char* function, int32_t id) {
  CUATTN_REQUIRE(id >= 0 && id < stats_.num_blocks, "BlockPool.", function,
                 ": ids must lie within [0, ", stats_.num_blocks, "), got ", id,
                 "; pass what allocate, fork or match_prefix gave");
  CUATTN_REQUIRE(blocks_[id].references > 0, "BlockPool.", function,
                 ": each block must be held by a reference, got block ", id,
                 ", which is free; drop each reference once");
  return blocks_[id];
}

void BlockPoolState::require_free(const char* function, int64_t count) const {
  if (count > stats_.free_blocks) {
    fail<OutOfBlocks>("BlockPool.", function, ": ", count, " blocks must be free, got ",
                      stats_.free_blocks, " of ", stats_.num_blocks, kWayOut);
  }
}

void BlockPoolState::require_tokens(const char* function, int64_t count) {
  CUATTN_REQUIRE(count >= 0, "BlockPool.", function, ": num_tokens must be >= 0, got ", count,
                 "; it counts tokens");
}

// ---- The list of free blocks

void BlockPoolState::put_front(int32_t id) {
  blocks_[id].previous = kNone;
  blocks_[id].next = first_free_;
  (first_free_ == kNone ? last_free_ : blocks_[first_free_].previous) = id;
  first_free_ = id;
}

void BlockPoolState::put_back(int32_t id) {
  blocks_[id].previous = last_free_;
  blocks_[id].next = kNone;
  (last_free_ == kNone ? first_free_ : blocks_[last_free_].next) = id;
  last_free_ = id;
}

void BlockPoolState::unlink(int32_t id) {
  Block& block = blocks_[id];
  (block.previous == kNone ? first_free_ : blocks_[block.previous].next) = block.next;
  (block.next == kNone ? last_free_ : blocks_[block.next].previous) = block.previous;
  block.previous = block.next = kNone;
}

// ---- References

void BlockPoolState::reference(Block& block) {
  if (++block.references == 2) ++stats_.shared_blocks;
}

void BlockPoolState::release(Block& block) {
  if (--block.references == 1) --stats_.shared_blocks;
}

// The first free block, evicted if it was cached, with one reference.
int32_t BlockPoolState::take() {
  int32_t id = first_free_;
  unlink(id);
  --stats_.free_blocks;
  ++stats_.used_blocks;
  if (blocks_[id].cached) {
    ++stats_.evictions;
    --stats_.evictable_blocks;
    forget(id);
  }
  blocks_[id].references = 1;
  return id;
}

void BlockPoolState::allocate(int64_t count, int32_t* ids) {
  std::lock_guard<std::mutex> lock(mutex_);
  CUATTN_REQUIRE(count >= 0, "BlockPool.allocate: n must be >= 0, got ", count,
                 "; it counts blocks");
  require_free("allocate", count);
  for (int64_t i = 0; i < count; ++i) ids[i] = take();
}

void BlockPoolState::fork(const int32_t* ids, int64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < count; ++i) held("fork", ids[i]);
  for (int64_t i = 0; i < count; ++i) reference(blocks_[ids[i]]);
}

void BlockPoolState::free(const int32_t* ids, int64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t dropped = 0;
  try {
    for (; dropped < count; ++dropped) release(held("free", ids[dropped]));
  } catch (...) {
    while (dropped > 0) reference(blocks_[ids[--dropped]]);
    throw;
  }
  // From the last to the first: the begin of a sequence serves more others than its end.
  for (int64_t i = count - 1; i >= 0; --i) {
    int32_t id = ids[i];
    Block& block = blocks_[id];
    // Note: an id that stands twice in `ids` is put into the list once.
    bool listed = block.previous != kNone || block.next != kNone || first_free_ == id;
    if (block.references > 0 || listed) continue;
    ++stats_.free_blocks;
    --stats_.used_blocks;
    if (block.cached) {
      ++stats_.evictable_blocks;
      put_back(id);
    } else {
      forget(id);
      put_front(id);
    }
  }
}

int64_t BlockPoolState::ref_count(int32_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  CUATTN_REQUIRE(id >= 0 && id < stats_.num_blocks, "BlockPool.ref_count: id must lie within [0, ",
                 stats_.num_blocks, "), got ", id, "; pass a block of this pool");
  return blocks_[id].references;
}

int32_t BlockPoolState::make_writable(int32_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  Block& block = held("make_writable", id);
  if (block.references == 1) {
    forget(id);
    return id;
  }
  require_free("make_writable", 1);
  release(block);
  ++stats_.copies;
  return take();
}

// ---- Prefixes

// Chained: the content of the block before stands for all that came earlier.
uint64_t BlockPoolState::hash_of(const Key& key) const {
  uint64_t hash = mix(seed_ ^ key.parent);
  for (unsigned char byte : key.salt) hash = mix(hash ^ byte);
  for (int64_t i = 0; i < stats_.block_size; ++i) {
    hash = mix(hash ^ static_cast<uint64_t>(key.tokens[i]));
  }
  return hash;
}

bool BlockPoolState::holds(const Block& block, const Key& key) {
  return block.parent == key.parent && block.salt == key.salt &&
         std::equal(block.tokens.begin(), block.tokens.end(), key.tokens);
}

// The cached block of this content, or kNone.
int32_t BlockPoolState::find(uint64_t hash, const Key& key) const {
  int32_t id = buckets_[hash & (buckets_.size() - 1)];
  while (id != kNone && !holds(blocks_[id], key)) id = blocks_[id].next_in_bucket;
  return id;
}

void BlockPoolState::insert(int32_t id) {
  Block& block = blocks_[id];
  int32_t& bucket = buckets_[block.hash & (buckets_.size() - 1)];
  block.next_in_bucket = bucket;
  bucket = id;
  block.cached = true;
  ++stats_.cached_blocks;
}

// The block holds nothing known from here on.
void BlockPoolState::forget(int32_t id) {
  Block& block = blocks_[id];
  block.content = block.parent = kNothing;
  if (!block.cached) return;
  int32_t* link = &buckets_[block.hash & (buckets_.size() - 1)];
  while (*link != id) link = &blocks_[*link].next_in_bucket;
  *link = block.next_in_bucket;
  block.cached = false;
  --stats_.cached_blocks;
}

int64_t BlockPoolState::match_prefix(const int64_t* tokens, int64_t num_tokens,
                                     std::string_view salt, int32_t* ids) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_tokens("match_prefix", num_tokens);
  int64_t size = stats_.block_size, count = 0;
  if (num_tokens >= size) require_given("BlockPool.match_prefix", "ids", ids);
  Key key{kNothing, salt, tokens};
  for (; (count + 1) * size <= num_tokens; ++count) {
    int32_t id = find(hash_of(key), key);
    if (id == kNone) break;
    Block& block = blocks_[id];
    if (block.references == 0) {
      unlink(id);
      --stats_.free_blocks;
      --stats_.evictable_blocks;
      ++stats_.used_blocks;
    }
    reference(block);
    key = {block.content, {}, key.tokens + size};
    ids[count] = id;
  }
  stats_.queried_tokens += num_tokens;
  stats_.matched_tokens += count * size;
  return count;
}

void BlockPoolState::commit(const int32_t* ids, int64_t count, const int64_t* tokens,
                            int64_t num_tokens, int32_t parent_id, std::string_view salt) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_tokens("commit", num_tokens);
  int64_t size = stats_.block_size, full = num_tokens / size;
  CUATTN_REQUIRE(full <= count, "BlockPool.commit: tokens must fit ids, got ", num_tokens,
                 " tokens for ", count, " blocks of ", size, "; pass all blocks that hold them");
  Key key{kNothing, salt, tokens};
  if (parent_id != kNone) {
    key.parent = held("commit", parent_id).content;
    CUATTN_REQUIRE(key.parent != kNothing, "BlockPool.commit: parent must be committed, got block ",
                   parent_id, "; commit a sequence from its begin");
    CUATTN_REQUIRE(salt.empty(),
                   "BlockPool.commit: salt must not stand beside a parent, got "
                   "block ",
                   parent_id, "; the sequence of the parent has its own");
  }
  for (int64_t i = 0; i < count; ++i) held("commit", ids[i]);
  std::vector<int32_t> made;  // what to take back should a later block be refused
  made.reserve(full);
  try {
    for (int64_t i = 0; i < full; ++i) {
      if (commit_one(ids[i], key)) made.push_back(ids[i]);
      key = {blocks_[ids[i]].content, {}, key.tokens + size};
    }
  } catch (...) {
    for (int32_t id : made) forget(id);
    throw;
  }
}

// Whether the block has gained a content, which it had not before.
bool BlockPoolState::commit_one(int32_t id, const Key& key) {
  Block& block = blocks_[id];
  if (block.content != kNothing) {
    CUATTN_REQUIRE(holds(block, key),
                   "BlockPool.commit: a committed block must keep its tokens, got others "
                   "for block ",
                   id, "; call make_writable before it is written anew");
    return false;
  }
  block.tokens.assign(key.tokens, key.tokens + stats_.block_size);
  block.salt = key.salt;
  block.parent = key.parent;
  block.hash = hash_of(key);
  int32_t known = find(block.hash, key);
  block.content = known == kNone ? ++last_content_ : blocks_[known].content;
  if (known == kNone) insert(id);
  return true;
}

cuattn_block_pool_stats BlockPoolState::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace cuattn

using namespace cuattn;

struct cuattn_block_pool {
  BlockPoolState state;
};

static BlockPoolState& state_of(cuattn_block_pool* pool) {
  CUATTN_REQUIRE(pool != nullptr, "BlockPool: pool must not be NULL; create one first");
  return pool->state;
}

static std::string_view salt_of(const char* function, const cuattn_prefix_options* options) {
  if (options == nullptr) return {};
  cuattn_prefix_options room;
  const cuattn_prefix_options& o = known_options(function, options, room);
  CUATTN_REQUIRE(o.salt_bytes >= 0 && (o.salt != nullptr || o.salt_bytes == 0), function,
                 ": salt must be salt_bytes >= 0 bytes, got ", o.salt_bytes,
                 o.salt == nullptr ? " at NULL" : "", "; give both or neither");
  return {static_cast<const char*>(o.salt), static_cast<size_t>(o.salt_bytes)};
}

extern "C" {

void cuattn_prefix_options_init(cuattn_prefix_options* options, size_t struct_size) {
  init_options("BlockPool", options, struct_size);
}

cuattn_status cuattn_block_pool_create(int64_t num_blocks, int64_t block_size,
                                       cuattn_block_pool** pool) {
  return guarded([&] {
    require_given("BlockPool", "pool", pool);
    *pool = new cuattn_block_pool{{num_blocks, block_size}};
  });
}

void cuattn_block_pool_destroy(cuattn_block_pool* pool) { delete pool; }

cuattn_status cuattn_block_pool_allocate(cuattn_block_pool* pool, int64_t count, int32_t* ids) {
  return guarded([&] {
    if (count > 0) require_given("BlockPool.allocate", "ids", ids);
    state_of(pool).allocate(count, ids);
  });
}

cuattn_status cuattn_block_pool_free(cuattn_block_pool* pool, const int32_t* ids, int64_t count) {
  return guarded([&] {
    require_elements("BlockPool.free", "ids", ids, count);
    state_of(pool).free(ids, count);
  });
}

cuattn_status cuattn_block_pool_fork(cuattn_block_pool* pool, const int32_t* ids, int64_t count) {
  return guarded([&] {
    require_elements("BlockPool.fork", "ids", ids, count);
    state_of(pool).fork(ids, count);
  });
}

cuattn_status cuattn_block_pool_ref_count(cuattn_block_pool* pool, int32_t id, int64_t* count) {
  return guarded([&] {
    require_given("BlockPool.ref_count", "count", count);
    *count = state_of(pool).ref_count(id);
  });
}

cuattn_status cuattn_block_pool_make_writable(cuattn_block_pool* pool, int32_t id,
                                              int32_t* writable) {
  return guarded([&] {
    require_given("BlockPool.make_writable", "writable", writable);
    *writable = state_of(pool).make_writable(id);
  });
}

cuattn_status cuattn_block_pool_match_prefix(cuattn_block_pool* pool, const int64_t* tokens,
                                             int64_t num_tokens,
                                             const cuattn_prefix_options* options, int32_t* ids,
                                             int64_t* num_ids) {
  return guarded([&] {
    const char* fn = "BlockPool.match_prefix";
    if (num_tokens > 0) require_given(fn, "tokens", tokens);
    require_given(fn, "num_ids", num_ids);
    std::string_view salt = salt_of(fn, options);
    *num_ids = state_of(pool).match_prefix(tokens, num_tokens, salt, ids);
  });
}

cuattn_status cuattn_block_pool_commit(cuattn_block_pool* pool, const int32_t* ids, int64_t count,
                                       const int64_t* tokens, int64_t num_tokens, int32_t parent,
                                       const cuattn_prefix_options* options) {
  return guarded([&] {
    const char* fn = "BlockPool.commit";
    require_elements(fn, "ids", ids, count);
    if (num_tokens > 0) require_given(fn, "tokens", tokens);
    std::string_view salt = salt_of(fn, options);
    state_of(pool).commit(ids, count, tokens, num_tokens, parent, salt);
  });
}

cuattn_status cuattn_block_pool_get_stats(cuattn_block_pool* pool, cuattn_block_pool_stats* stats) {
  return guarded([&] {
    require_given("BlockPool.stats", "stats", stats);
    *stats = state_of(pool).stats();
  });
}

}  // extern "C"
