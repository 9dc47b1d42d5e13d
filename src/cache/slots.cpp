// SPDX-License-Identifier: Apache-2.0
// Where the rows of reshape_and_cache and mla_write go: to the slots of slot_mapping, or to those
// that block tables and lengths tell of the newest tokens of sequences. Next: rows.cpp, which writes
// them; NewestTokens in params/cache.h.
#include <algorithm>

#include "cuattn/c_api.h"
#include "src/cache/cache.h"

namespace cuattn {
namespace {

int64_t num_seqs(const CacheWriteParams& p) {
  return p.newest.q_len > 0 ? p.num_tokens / p.newest.q_len : 0;
}

void read_newest(const char* fn, const cuattn_cache_options& o, DLDevice device, const char* like,
                 bool check_data, CacheWriteParams& p) {
  BlockTables tables =
      read_block_tables(fn, view_of(fn, "block_tables", o.block_tables), device, like, check_data);
  int64_t seqs = tables.num_seqs;
  CUATTN_REQUIRE(seqs > 0 ? p.num_tokens % seqs == 0 : p.num_tokens == 0, fn, ": ", like,
                 " must have as many rows of each of the ", seqs,
                 " sequences of block_tables, got ", p.num_tokens,
                 "; give each its q_len newest tokens, or pass slot_mapping");
  int64_t q_len = seqs > 0 ? std::max<int64_t>(p.num_tokens / seqs, 1) : 1;
  p.newest.context_lens = static_cast<const int32_t*>(
      read_vector(fn, "context_lens", view_of(fn, "context_lens", o.context_lens), DType::i32, seqs,
                  "num_seqs", device, like, check_data));
  p.newest.block_tables = tables.data;
  p.newest.block_tables_stride = tables.stride;
  p.newest.max_blocks = tables.max_blocks;
  p.newest.q_len = checked_extent(fn, like, "num_tokens / num_seqs", q_len);
}

void check_position(const char* fn, const CacheWriteParams& p, int64_t position, int64_t token) {
  CUATTN_REQUIRE(position >= 0 && position < p.rope.max_position, fn,
                 ": positions must lie within [0, ", p.rope.max_position, "), got ", position,
                 " at index ", token, "; cos and sin have that many rows");
}

// `newest`: that of p, where the host reads it.
void check_newest(const char* fn, const CacheWriteParams& p, const NewestTokens& newest,
                  const int64_t* positions) {
  int64_t capacity = int64_t{newest.max_blocks} * p.block_size;
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    int64_t seq = token / newest.q_len, length = newest.context_lens[seq];
    CUATTN_REQUIRE(length >= 0 && length <= capacity, fn, ": context_lens must be from 0 to ",
                   capacity, ", the tokens of block_tables, got ", length, " for sequence ", seq,
                   "; give the sequence more blocks");
    int64_t place = newest.place(token), column = place / p.block_size;
    if (place < 0) continue;
    CUATTN_REQUIRE(is_slot(p, newest.slot(token, p.block_size)), fn,
                   ": block_tables must hold block ids within [0, ", p.num_blocks, "), got ",
                   newest.block(seq, column), " at (", seq, ", ", column, "); new tokens go there");
    if (p.rope.cos == nullptr) continue;
    CUATTN_REQUIRE(positions != nullptr || place < p.rope.max_position, fn,
                   ": cos must have a row for each place, got ", p.rope.max_position, " for place ",
                   place, " of sequence ", seq, "; make it longer, or give positions");
    if (positions != nullptr) check_position(fn, p, positions[token], token);
  }
}

void check_mapping(const char* fn, const CacheWriteParams& p, const int64_t* slots,
                   const int64_t* positions) {
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    CUATTN_REQUIRE(slots[i] == -1 || is_slot(p, slots[i]), fn,
                   ": slot_mapping must lie within [-1, ", p.num_blocks * p.block_size, "), got ",
                   slots[i], " at index ", i, "; a slot is block * block_size + token, -1 skips");
    if (positions != nullptr && slots[i] != -1) check_position(fn, p, positions[i], i);
  }
}

}  // namespace

void read_slots(const char* fn, const DLTensor* slot_mapping, const cuattn_cache_options& o,
                DLDevice device, const char* like, bool check_data, CacheWriteParams& p) {
  int given = (o.block_tables != nullptr) + (o.context_lens != nullptr);
  CUATTN_REQUIRE(given == (slot_mapping == nullptr ? 2 : 0), fn,
                 ": slot_mapping must be given, or block_tables and context_lens without it, got ",
                 slot_mapping == nullptr ? "no slot_mapping" : "slot_mapping", " and ", given,
                 " of these; pass one of the two");
  if (slot_mapping == nullptr) return read_newest(fn, o, device, like, check_data, p);
  p.slot_mapping = static_cast<const int64_t*>(
      read_vector(fn, "slot_mapping", view_of(fn, "slot_mapping", slot_mapping), DType::i64,
                  p.num_tokens, "num_tokens", device, like, check_data));
}

void read_slot_memory(CallMemory& memory, const CacheWriteParams& p) {
  const NewestTokens& newest = p.newest;
  memory.reads({"slot_mapping", p.slot_mapping, 8, {{p.num_tokens, 1}}});
  memory.reads({"context_lens", newest.context_lens, 4, {{num_seqs(p), 1}}});
  memory.reads({"block_tables",
                newest.block_tables,
                4,
                {{num_seqs(p), newest.block_tables_stride}, {newest.max_blocks, 1}}});
  memory.reads({"positions", p.rope.positions, 8, {{p.num_tokens, 1}}});
}

void check_slots(const char* fn, const CacheWriteParams& p, DLDevice device, Stream stream) {
  if (p.num_tokens == 0) return;
  const Backend& backend = backend_of(fn, device);
  HostCopy<int64_t> positions(backend, device, p.rope.positions, p.num_tokens, stream);
  HostCopy<int64_t> slots(backend, device, p.slot_mapping, p.num_tokens, stream);
  if (slots.data() != nullptr) check_mapping(fn, p, slots.data(), positions.data());
  if (num_seqs(p) == 0) return;
  NewestTokens newest = p.newest;
  int64_t last = (num_seqs(p) - 1) * newest.block_tables_stride;
  int64_t span = newest.max_blocks > 0 ? last + newest.max_blocks : 0;
  HostCopy<int32_t> lens(backend, device, newest.context_lens, num_seqs(p), stream);
  HostCopy<int32_t> tables(backend, device, newest.block_tables, span, stream);
  newest.context_lens = lens.data();
  newest.block_tables = tables.data();
  bool all_read = lens.data() != nullptr && (span == 0 || tables.data() != nullptr);
  if (all_read) check_newest(fn, p, newest, positions.data());
}

}  // namespace cuattn
