// SPDX-License-Identifier: Apache-2.0
#include "src/attention/sm90_tile.h"

#include <algorithm>
#include <cmath>

namespace cuattn {
namespace {

// Share of a tile's rows that are real when `rows` rows are cut into tiles of `tile`.
double filled(int64_t rows, int32_t tile) {
  return static_cast<double>(rows) / (int64_t{ceil_div(rows, tile)} * tile);
}

// Sequences of as many rows and keys.
struct Alike {
  int32_t sequences;
  double rows, keys;
};

// Key tiles that a tile of `tokens` queries sees, on the mean over a sequence. Edges that masks cut
// count half.
double key_tiles_of(const AttentionRequest& r, const Alike& a, double tokens, int32_t n) {
  const double all = std::ceil(a.keys / n);
  if (r.mask == MaskKind::none) return all;
  tokens = std::min(tokens, a.rows);
  const double right = r.window_right == kUnlimited ? a.rows : r.window_right;
  if (r.window_left == kUnlimited) {  // the last query stands at the last key
    const double seen = std::max(a.keys - (a.rows - tokens) / 2 + right, 0.0);
    return std::min(all, seen / n + 0.5);
  }
  return std::min(all, (tokens + r.window_left + right) / n + 1);
}

// Microseconds that an H200 takes beyond its launch, by lines through what was measured at head_dim 64
// (docs/notes/20261201-small-tiles.md): rounds of one item a multiprocessor, each of key tiles and of
// an end that is worth some. Small tiles run three at a time: what counts is a third of what one takes.
// Of a ragged batch the host knows the longest sequence and the sum of all: the others share the rest.
double cost_of(const AttentionRequest& r, Tile tile, ScoreKind score, int32_t num_sms) {
  const bool is_small = sm90_ctas_per_sm(tile) > 1, is_masked = r.mask != MaskKind::none;
  // The score options cost small tiles more; of large ones 128 rows with them take as long as 192.
  const double step = !is_small ? 1.39 : score == ScoreKind::scored ? 0.37 : 0.303;
  const double end = is_small ? (is_masked ? 1.2 : 1.7) : (is_masked ? 2.2 : 1.2);
  const int32_t packed = packed_heads_of(r, tile.m, score);
  double items = 0, work = 0;  // both of one multiprocessor
  auto add = [&](const Alike& a) {
    const int32_t heads = r.num_heads_q / packed;
    const double share = std::ceil(a.rows * packed / tile.m) * a.sequences * heads / num_sms;
    const double tokens = static_cast<double>(tile.m) / packed;
    items += share;
    work += share * step * (key_tiles_of(r, a, tokens, tile.n) + end);
  };
  const Alike longest = {1, double{1} * r.seqlen_q, double{1} * r.seqlen_kv};
  if (!r.ragged) {
    add({r.batch, longest.rows, longest.keys});
  } else if (r.seqlen_q > 0 && r.batch > 0) {
    const bool is_there = r.batch > 1 && r.total_q > r.seqlen_q;  // else a bound that none reaches
    const int32_t others = is_there ? r.batch - 1 : r.batch;
    const double rows = static_cast<double>(r.total_q - (is_there ? r.seqlen_q : 0)) / others;
    if (is_there) add(longest);
    add({others, rows, r.paged ? longest.keys : longest.keys * rows / r.seqlen_q});
  }
  if (items == 0) return 0;
  // Under a mask who is idle draws a lighter one, so that the last round is mostly a shorter one.
  double rounds = is_masked ? (items + std::ceil(items)) / 2 : std::ceil(items);
  rounds = std::max(rounds, is_small ? 2.0 : 1.0);
  return rounds * work / items;
}

}  // namespace

int64_t items_of(const AttentionRequest& r, int32_t m, int32_t packed) {
  int64_t heads = r.num_heads_q / packed;
  int64_t items = ceil_div(int64_t{r.seqlen_q} * packed, m) * heads * r.batch;
  return r.ragged ? std::min(items, (r.total_q * packed / m + r.batch) * heads) : items;
}

int32_t packed_heads_of(const AttentionRequest& r, int32_t m, ScoreKind score) {
  if (r.has_functor) return std::max(r.functor.packed_heads, 1);
  const int32_t group = r.num_heads_kv > 0 ? r.num_heads_q / r.num_heads_kv : 1;
  // What a head has of its own, a tile has of one.
  const bool alike = score != ScoreKind::dropped && !r.has_slopes && !r.has_bias &&
                     !r.has_head_rows && !r.has_query_head_scales;
  const bool packs = group > 1 && m % group == 0 && alike &&
                     filled(r.seqlen_q, m) < 0.9 * filled(int64_t{r.seqlen_q} * group, m);
  return packs ? group : 1;
}

bool small_tile_pays(const AttentionRequest& r, Tile large, Tile small, ScoreKind score,
                     int32_t num_sms) {
  return cost_of(r, small, score, num_sms) < cost_of(r, large, score, num_sms);
}

}  // namespace cuattn
