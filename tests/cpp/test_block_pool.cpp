// SPDX-License-Identifier: Apache-2.0
// The block pool from C++: ownership, exceptions, eviction, prefixes, and many threads at once. The
// long random walk against a model is in tests/cache/test_block_pool.py.
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cuattn/block_pool.h"
#include "problem.h"
#include "test.h"

// Stands in for the C library's, which the pool asks for the seed of its hashes; seen by libcuattn
// also in a build that hides symbols.
static bool seed_is_zero = false;
static int seeds_asked = 0;

extern "C" [[gnu::visibility("default")]] ssize_t getrandom(void* buffer, size_t size,
                                                            unsigned flags) {
  ++seeds_asked;
  if (!seed_is_zero) return syscall(SYS_getrandom, buffer, size, flags);
  std::fill_n(static_cast<char*>(buffer), size, 0);
  return static_cast<ssize_t>(size);
}

namespace cuattn::test {
namespace {

using Ids = std::vector<int32_t>;
using Tokens = std::vector<int64_t>;

Tokens counted(int64_t n, int64_t first = 0) {
  Tokens tokens(n);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Ids matched(BlockPool& pool, const Tokens& tokens) {
  return pool.match_prefix(tokens.data(), tokens.size());
}

TEST(block_pool_hands_out_each_block_once) {
  BlockPool pool(10, 4);
  Ids a = pool.allocate(4), b = pool.allocate(6);
  Ids all = a;
  all.insert(all.end(), b.begin(), b.end());
  std::sort(all.begin(), all.end());
  for (int32_t id = 0; id < 10; ++id) CHECK(all[id] == id);
  check_throws<OutOfBlocks>("1 blocks must be free, got 0 of 10", [&] { pool.allocate(1); });
  CHECK(pool.allocate(0).empty());
  pool.free(a);
  CHECK(pool.stats().free_blocks == 4 && pool.stats().used_blocks == 6);
}

TEST(block_pool_refuses_and_changes_nothing) {
  BlockPool pool(4, 2);
  Ids ids = pool.allocate(2);
  check_throws<std::invalid_argument>("[0, 4), got 4", [&] { pool.free({ids[0], 4}); });
  check_throws<std::invalid_argument>("[0, 4), got -1", [&] { pool.fork({ids[0], -1}); });
  check_throws<std::invalid_argument>("which is free",
                                      [&] { pool.free({ids[0], ids[1], ids[0]}); });
  check_throws<std::invalid_argument>("n must be >= 0", [&] { pool.allocate(-1); });
  check_throws<std::invalid_argument>("num_blocks must lie", [] { BlockPool(0, 1); });
  check_throws<std::invalid_argument>("block_size must lie", [] { BlockPool(1, 0); });
  for (int32_t id : ids) CHECK(pool.ref_count(id) == 1);
  pool.free(ids);
  check_throws<std::invalid_argument>("which is free", [&] { pool.free(ids); });
  CHECK(pool.stats().free_blocks == 4);
  int64_t count = 0;
  CHECK(cuattn_block_pool_ref_count(nullptr, 0, &count) == CUATTN_INVALID_ARGUMENT);
}

TEST(block_pool_copies_a_shared_block_before_it_is_written) {
  BlockPool pool(3, 2);
  int32_t id = pool.allocate(1)[0];
  CHECK(pool.make_writable(id) == id);
  pool.fork({id});
  int32_t copy = pool.make_writable(id);
  CHECK(copy != id && pool.ref_count(copy) == 1 && pool.ref_count(id) == 1);
  CHECK(pool.stats().copies == 1 && pool.stats().shared_blocks == 0);
  pool.fork({id});
  pool.allocate(1);
  check_throws<OutOfBlocks>("make_writable", [&] { pool.make_writable(id); });
  CHECK(pool.ref_count(id) == 2);
}

TEST(block_pool_finds_prefixes_until_their_memory_is_needed) {
  BlockPool pool(6, 2);
  Tokens tokens = counted(7);
  Ids ids = pool.allocate(4);  // the fourth is half full
  pool.commit(ids, tokens.data(), tokens.size());
  CHECK(pool.stats().cached_blocks == 3);
  pool.free(ids);
  CHECK(pool.stats().free_blocks == 6 && pool.stats().evictable_blocks == 3);
  Ids again = matched(pool, tokens);
  CHECK((again == Ids{ids[0], ids[1], ids[2]}));
  pool.free(again);
  Tokens other = tokens;
  other[2] = 99;
  again = matched(pool, other);
  CHECK(again == Ids{ids[0]});
  pool.free(again);
  pool.allocate(4);  // three were empty; the end of the sequence goes first
  CHECK(pool.stats().evictions == 1);
  again = matched(pool, tokens);
  CHECK((again == Ids{ids[0], ids[1]}));
}

// The pool's own mixing of 64 bits, from src/cache/pool.cpp.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The hash of two tokens at the begin of a sequence, where the seed is zero.
uint64_t hash_of(const Tokens& tokens) {
  return mix(mix(mix(0) ^ static_cast<uint64_t>(tokens[0])) ^ static_cast<uint64_t>(tokens[1]));
}

TEST(block_pool_tells_tokens_with_the_same_hash_apart) {
  Tokens first{11, 12}, second{7, 0};  // solved for the last token:
  second[1] = static_cast<int64_t>(mix(mix(0) ^ 11) ^ 12 ^ mix(mix(0) ^ 7));
  CHECK(hash_of(first) == hash_of(second));  // else this test shows nothing
  int asked = seeds_asked;
  seed_is_zero = true;
  BlockPool pool(4, 2);
  seed_is_zero = false;
  CHECK(seeds_asked == asked + 1, "the pool has no seed, or not this one");
  Ids a = pool.allocate(1), b = pool.allocate(1);
  pool.commit(a, first.data(), 2);
  CHECK(matched(pool, second).empty());
  pool.commit(b, second.data(), 2);
  CHECK(matched(pool, first) == a && matched(pool, second) == b);
  pool.free(a);
  pool.make_writable(a[0]);  // leaves the bucket of both in order
  CHECK(matched(pool, first).empty() && matched(pool, second) == b);
}

TEST(block_pool_keeps_salts_apart) {
  BlockPool pool(4, 2);
  Tokens tokens = counted(4);
  Ids a = pool.allocate(2), b = pool.allocate(2);
  pool.commit(a, tokens.data(), 4, BlockPool::kNoParent, "a");
  CHECK(matched(pool, tokens).empty());
  CHECK(pool.match_prefix(tokens.data(), 4, "ab").empty());
  pool.commit({b[0]}, tokens.data(), 2);
  pool.commit({b[1]}, tokens.data() + 2, 2, b[0]);
  CHECK(matched(pool, tokens) == b && pool.match_prefix(tokens.data(), 4, "a") == a);
  check_throws<std::invalid_argument>("salt must not stand beside a parent",
                                      [&] { pool.commit({b[1]}, tokens.data(), 2, b[0], "a"); });
  cuattn_prefix_options options{};
  cuattn_block_pool* empty = nullptr;
  int64_t count = 0;
  CHECK(cuattn_block_pool_create(1, 1, &empty) == CUATTN_OK);
  CHECK(cuattn_block_pool_match_prefix(empty, nullptr, 0, nullptr, nullptr, &count) == CUATTN_OK);
  CHECK(cuattn_block_pool_match_prefix(empty, nullptr, 0, &options, nullptr, &count) ==
        CUATTN_INVALID_ARGUMENT);
  CHECK(std::string(cuattn_last_error()).find("struct_size 0") != std::string::npos);
  cuattn_prefix_options_init(&options, sizeof options);
  options.salt_bytes = 1;
  CHECK(cuattn_block_pool_match_prefix(empty, nullptr, 0, &options, nullptr, &count) ==
        CUATTN_INVALID_ARGUMENT);
  CHECK(std::string(cuattn_last_error()).find("got 1 at NULL") != std::string::npos);
  cuattn_block_pool_destroy(empty);
}

TEST(block_pool_serves_many_threads) {
  constexpr int kThreads = 8, kSteps = 4000;
  BlockPool pool(64, 2);
  std::vector<std::atomic<int>> owner(64);
  std::atomic<int> errors{0};
  std::vector<std::thread> threads;
  uint64_t seed = case_seed("block_pool_threads");
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Random random(seed + t);
      std::vector<Ids> own, shared;
      for (int step = 0; step < kSteps; ++step) {
        try {
          int what = random.range(0, 4);
          if (what == 0) {
            own.push_back(pool.allocate(random.range(1, 6)));
            for (int32_t id : own.back()) errors += owner[id].exchange(t + 1) != 0;
          } else if (what == 1 && !own.empty()) {
            for (int32_t id : own.back()) errors += owner[id].exchange(0) != t + 1;
            pool.free(own.back());
            own.pop_back();
          } else if (what == 2) {
            Tokens tokens = counted(8, random.range(0, 3));
            shared.push_back(matched(pool, tokens));
          } else if (what == 3 && !shared.empty()) {
            pool.free(shared.back());
            shared.pop_back();
          } else {
            Tokens tokens = counted(8, random.range(0, 3));
            Ids ids = pool.allocate(4);
            pool.commit(ids, tokens.data(), tokens.size());
            pool.free(ids);
          }
        } catch (const OutOfBlocks&) {
        }
      }
      for (Ids& ids : own) {
        for (int32_t id : ids) owner[id] = 0;
        pool.free(ids);
      }
      for (Ids& ids : shared) pool.free(ids);
    });
  }
  for (std::thread& thread : threads) thread.join();
  BlockPool::Stats stats = pool.stats();
  CHECK(errors == 0, errors.load(), " blocks had two owners");
  CHECK(stats.free_blocks == 64 && stats.used_blocks == 0 && stats.shared_blocks == 0);
  CHECK(stats.cached_blocks == stats.evictable_blocks);
  CHECK(pool.allocate(64).size() == 64 && pool.stats().cached_blocks == 0);
}

}  // namespace
}  // namespace cuattn::test
