// SPDX-License-Identifier: Apache-2.0
// The newest tokens of sequences: rows whose slots are told by block tables and lengths, instead of
// one by one. Next: rows.cpp, which writes them; NewestTokens in params/cache.h.
#include <algorithm>

#include "cuattn/c_api.h"
#include "src/cache/cache.h"

namespace cuattn {

void read_newest(const char* fn, const cuattn_cache_options& o, DLDevice device, const char* like,
                 bool check_data, CacheWriteParams& p) {
  BlockTables tables =
      read_block_tables(fn, view_of(fn, "block_tables", o.block_tables), device, like, check_data);
  int64_t num_seqs = tables.num_seqs;
  CUATTN_REQUIRE(num_seqs > 0 ? p.num_tokens % num_seqs == 0 : p.num_tokens == 0, fn, ": ", like,
                 " must have as many rows of each of the ", num_seqs,
                 " sequences of block_tables, got ", p.num_tokens,
                 "; give each its q_len newest tokens, or pass slot_mapping");
  p.newest = {static_cast<const int32_t*>(
                  read_vector(fn, "context_lens", view_of(fn, "context_lens", o.context_lens),
                              DType::i32, num_seqs, "num_seqs", device, like, check_data)),
              tables.data, tables.stride, tables.max_blocks,
              checked_extent(fn, like, "num_tokens / num_seqs",
                             num_seqs > 0 ? std::max<int64_t>(p.num_tokens / num_seqs, 1) : 1)};
}

void check_newest(const char* fn, const CacheWriteParams& p, DLDevice device,
                  const int64_t* positions, Stream stream) {
  if (num_seqs(p) == 0) return;
  const Backend& backend = backend_of(fn, device);
  NewestTokens newest = p.newest;
  int64_t span = (num_seqs(p) - 1) * newest.block_tables_stride + newest.max_blocks;
  HostCopy<int32_t> lens(backend, device, newest.context_lens, num_seqs(p), stream);
  HostCopy<int32_t> tables(backend, device, newest.block_tables, span, stream);
  if (lens.data() == nullptr || tables.data() == nullptr) return;
  newest.context_lens = lens.data();
  newest.block_tables = tables.data();
  int64_t capacity = int64_t{newest.max_blocks} * p.block_size;
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    int64_t seq = token / newest.q_len, length = newest.context_lens[seq];
    CUATTN_REQUIRE(length >= 0 && length <= capacity, fn, ": context_lens must be from 0 to ",
                   capacity, ", the tokens of block_tables, got ", length, " for sequence ", seq,
                   "; give the sequence more blocks");
    int64_t place = newest.place(token);
    if (place < 0) continue;
    CUATTN_REQUIRE(is_slot(p, newest.slot(token, p.block_size)), fn,
                   ": block_tables must hold block ids within [0, ", p.num_blocks, "), got ",
                   newest.block(seq, place / p.block_size), " at (", seq, ", ",
                   place / p.block_size, "); new tokens go there");
    if (p.rope.cos == nullptr) continue;
    int64_t position = positions != nullptr ? positions[token] : place;
    CUATTN_REQUIRE(position >= 0 && position < p.rope.max_position, fn,
                   ": positions must lie within [0, ", p.rope.max_position, "), got ", position,
                   " at index ", token, "; cos and sin have that many rows");
  }
}

}  // namespace cuattn
