// SPDX-License-Identifier: Apache-2.0
// The kernel of paged/apart.cu that parts a packed batch, on batches without single queries, of
// nothing else, with empty sequences, and longer than a thread block; prints how many sequences the
// decode kernel or the other one would see wrongly. test_emulator.py compiles it.
#include <cstdio>
#include <vector>

#include "cuda/paged/apart.cu.cpp"  // as translated

using namespace cuattn;

namespace {

uint32_t next(uint32_t& seed) { return (seed = seed * 1664525u + 1013904223u) >> 16; }

// Of `singles` in 8 sequences, one query each; the others have none, or up to 5.
int wrong_in(int32_t num_seqs, uint32_t singles, uint32_t seed) {
  std::vector<int32_t> starts{3}, lens;  // the first rows are nobody's
  for (int32_t b = 0; b < num_seqs; ++b) {
    uint32_t others[] = {0, 2, 5, 3};
    uint32_t queries = next(seed) % 8 < singles ? 1 : others[next(seed) % 4];
    starts.push_back(starts.back() + static_cast<int32_t>(queries));
    lens.push_back(static_cast<int32_t>(next(seed) % 3 * 100));
  }
  size_t count = lens.size();
  std::vector<int32_t> decode_starts(count + 1, -9), decode_lens(count, -9);
  std::vector<int32_t> other_queries(count, -9), other_lens(count, -9);
  launch_decodes_apart({starts.data(), lens.data(), num_seqs, decode_starts.data(),
                        decode_lens.data(), other_queries.data(), other_lens.data()},
                       nullptr);
  int wrong = 0;
  for (int32_t b = 0; b < num_seqs; ++b) {
    int32_t queries = starts[b + 1] - starts[b];
    bool is_single = queries == 1;
    Span seen = make_span(decode_starts.data(), nullptr, b, 1, starts.back());
    bool found = seen.stored == 1 && seen.start == starts[b];
    bool right =
        (is_single ? found : seen.stored == 0) && decode_lens[b] == (is_single ? lens[b] : 0) &&
        other_queries[b] == (is_single ? 0 : queries) && other_lens[b] == (is_single ? 0 : lens[b]);
    wrong += !right;
  }
  return wrong;
}

}  // namespace

int main() {
  int wrong = 0;
  try {
    launch_decodes_apart({}, nullptr);  // nobody
    uint32_t seed = 0;
    for (int32_t num_seqs : {1, 2, 31, 33, 1024, 1025, 2100}) {
      for (uint32_t singles : {0, 1, 4, 7, 8}) wrong += wrong_in(num_seqs, singles, ++seed);
    }
  } catch (const std::exception& error) {
    std::printf("error %s\n", error.what());
    return 0;
  }
  std::printf("wrong %d\n", wrong);
}
