// SPDX-License-Identifier: Apache-2.0
// The tiles of the sm90 backward passes, with their shared-memory arithmetic, and how the workspace
// holds what the queries pass leaves for the keys pass. Read by cuda/backward/sm90/ and
// src/attention/backward_plan.cpp.
#pragma once

#include "cuattn/params/backward.h"
#include "cuattn/tiles.h"

namespace cuattn {

// ---- The state of query rows: two planes of floats [num_heads_q, pitch], lse in base 2 (+inf where
// a row takes no part, so that P is 0), then Delta. The rows of a sequence begin at a multiple of
// kRowPad, where a bulk copy may begin, and the queries pass fills whole tiles of that many.
constexpr int32_t kRowPad = 128;

// Where sequence b begins, whose first row is row `first` of all (dense: b * seqlen_q). Sequences do
// not meet, whatever their lengths.
CUATTN_HOST_DEVICE int64_t sm90_row_place(int64_t first, int32_t b) {
  return (first / kRowPad + b) * kRowPad;
}
// Rows of a plane and head; a tile that begins among them ends among them.
CUATTN_HOST_DEVICE int64_t sm90_row_pitch(int64_t total_q, int32_t batch) {
  return (total_q / kRowPad + batch + 3) * kRowPad;
}
// A head has the states and, fused, the sums of dq, `columns` of each row. Behind those of all heads
// stands a float for each head and sequence where dsinks is made, and then what dslopes or dbias sum.
CUATTN_HOST_DEVICE int64_t sm90_floats_of_head(const AttentionParams& f, int32_t columns) {
  return (2 + columns) * sm90_row_pitch(f.total_q, f.batch);
}

// ---- Scores. plain: a scale alone. smooth: besides a softcap or ALiBi, made of whole fragments in
// the tiles of plain. general: anything, a score at a time. dropped: plain, with dropout. biased:
// plain, with a bias that the TMA brings; the only form that makes dbias. ordered and
// ordered_heads: plain, in a fused pass that sums dQ in the order of the keys; the second takes all
// query heads of a tile of rows before the next tile.
enum class ScoreForm : int32_t { plain, smooth, general, dropped, biased, ordered, ordered_heads };
constexpr bool sm90_is_ordered(ScoreForm form) {
  return form == ScoreForm::ordered || form == ScoreForm::ordered_heads;
}

// The compiled head sizes that have the biased form.
constexpr bool sm90_has_biased(HeadDims d) { return d.qk == d.v && (d.qk == 64 || d.qk == 128); }

CUATTN_HOST_DEVICE ScoreForm sm90_score_form(const AttentionParams& f) {
  const ScoreParams& s = f.scores;
  if (f.dropout.is_on()) return ScoreForm::dropped;
  if (!s.scored()) return ScoreForm::plain;
  bool caps = s.softcap > 0.0f, leans = s.has_slopes;
  // Within these the scale divides a slope, a large number hides a score, and a float16 tanh needs
  // no series (device/math.cuh).
  bool is_usual = s.scale > 0x1p-40f && s.scale < 0x1p40f && (!caps || s.softcap > 0x1p-30f) &&
                  s.softcap <= (f.dtype == DType::f16 ? 256.0f : 0x1p40f);
  if (s.has_bias) {
    int32_t dim = f.head_dim > f.head_dim_v ? f.head_dim : f.head_dim_v;
    bool has_size = dim <= 64 || (dim > 96 && dim <= 128);  // of the next that is compiled
    return has_size && !caps && !leans && has_bias_map(f) ? ScoreForm::biased : ScoreForm::general;
  }
  return is_usual && caps != leans ? ScoreForm::smooth : ScoreForm::general;
}

// ---- Tiles. m query rows, n keys, stages of what streams. 12 warps: a group of producers, two
// groups of consumers.

constexpr int32_t kSm90BackwardSmallBytes = 512;  // barriers; and up to 1023 align the panels

constexpr int32_t sm90_row_bytes(int32_t head_dim) { return (head_dim + 63) / 64 * 128; }

// What dropout keeps of a tile.
constexpr int32_t sm90_kept_bytes(int32_t rows, int32_t columns, ScoreForm form) {
  return form == ScoreForm::dropped ? sm90_kept_bytes(rows, columns) : 0;
}

// A bias comes a tile at a time.
constexpr int32_t sm90_bias_bytes(int32_t rows, int32_t keys, ScoreForm form) {
  return form == ScoreForm::biased ? rows * keys * 2 : 0;
}

// Queries pass: m rows of Q and dO stay, tiles of n keys come: `stages` of K, and of V as many or,
// where there is no room, one.
constexpr Tile sm90_queries_tile(HeadDims d, ScoreForm form) {
  bool general = form == ScoreForm::general || form == ScoreForm::biased;
  if (d.qk <= 64) return {128, 128, 3, 12};
  if (d.qk <= 96) return {128, general ? 64 : 96, 3, 12};
  if (d.v <= 128) return {128, general ? 64 : 80, 2, 12};
  return {128, 64, 2, 12};
}
constexpr int32_t sm90_queries_v_stages(HeadDims d, Tile tile) {
  return d.v > 192 ? 1 : tile.stages;
}
constexpr int32_t sm90_queries_smem_bytes(HeadDims d, Tile tile, ScoreForm form) {
  int32_t qk = sm90_row_bytes(d.qk), v = sm90_row_bytes(d.v);
  int32_t v_stages = sm90_queries_v_stages(d, tile);
  return tile.m * (qk + v) + tile.n * (tile.stages * qk + v_stages * v) +
         v_stages * sm90_kept_bytes(tile.m, tile.n, form) +
         tile.stages * sm90_bias_bytes(tile.m, tile.n, form) + kSm90BackwardSmallBytes + 1024;
}

// Keys pass: n keys of K and V stay, m rows of Q and dO come with 8 bytes of state each. Up to 128
// columns a group of consumers owns 64 keys; beyond, both own the same 64, one of them dV, the other
// dK, and P goes from the first to the second through shared memory, twice 16 bits.
constexpr bool sm90_keys_are_paired(HeadDims d) { return d.qk > 128; }

constexpr Tile sm90_keys_tile(HeadDims d, ScoreForm form) {
  bool general = form == ScoreForm::general, dropped = form == ScoreForm::dropped;
  if (form == ScoreForm::biased) return {64, 128, 3, 12};
  if (d.qk <= 64) return {general || dropped ? 64 : 128, 128, 3, 12};
  if (d.qk <= 96) return {64, 128, 4, 12};
  if (d.qk <= 128) return {general ? 48 : 64, 128, 4, 12};
  if (d.qk <= 192) return {64, 64, 3, 12};
  return {48, 64, 3, 12};
}
constexpr int32_t sm90_keys_smem_bytes(HeadDims d, Tile tile, ScoreForm form) {
  int32_t row = sm90_row_bytes(d.qk) + sm90_row_bytes(d.v);
  int32_t crossing = sm90_keys_are_paired(d) ? 2 * tile.m * tile.n * 2 : 0;
  return tile.n * row + tile.stages * tile.m * (row + 8) + crossing +
         tile.stages * sm90_kept_bytes(tile.n, tile.m, form) +
         tile.stages * sm90_bias_bytes(tile.m, tile.n, form) + kSm90BackwardSmallBytes + 1024;
}

// Fused pass, of up to 128 columns without a window, row ranges and general scores: as the keys pass with a
// group of 64 keys each, and dx crosses between the groups, in two buffers of m * n * 16 bits. dQ is
// summed in float32 in the workspace, behind the states: [num_heads_q, pitch, columns]. With an order
// dx crosses in one buffer, and parts of dQ, [m, columns] of float32, go through two others to the sums;
// behind these stand counters: the ticket that comes next, kOrderPad apart the parts that each
// kOrderRows rows have got.
constexpr int32_t kOrderRows = 64, kOrderPad = 32;
constexpr bool sm90_has_fused(HeadDims d, MaskKind mask, ScoreForm form) {
  return (mask == MaskKind::none || mask == MaskKind::causal) && form != ScoreForm::general &&
         d.qk == d.v && d.qk <= 128 && (form != ScoreForm::biased || d.qk == 128);
}
// Whether it stores a tile of dQ that has all its keys at once: 96 columns beside dropout leave no
// registers.
constexpr bool sm90_stores_dq(HeadDims d, ScoreForm form) {
  return d.qk != 96 || form != ScoreForm::dropped;
}
constexpr Tile sm90_fused_tile(HeadDims d, ScoreForm form) {
  bool holds_more = form == ScoreForm::biased || (sm90_is_ordered(form) && d.qk != 96);
  return {d.qk <= 64 ? 128 : 64, 128, holds_more ? 2 : 3, 12};
}
constexpr int32_t sm90_part_bytes(HeadDims d, Tile tile, ScoreForm form) {
  return sm90_is_ordered(form) ? tile.m * d.qk * 4 : 0;
}
constexpr int32_t sm90_fused_smem_bytes(HeadDims d, Tile tile, ScoreForm form) {
  int32_t row = sm90_row_bytes(d.qk) + sm90_row_bytes(d.v);
  return tile.n * row + tile.stages * tile.m * (row + 8) +
         (sm90_is_ordered(form) ? 1 : 2) * tile.m * tile.n * 2 +
         2 * sm90_part_bytes(d, tile, form) + tile.stages * sm90_kept_bytes(tile.n, tile.m, form) +
         tile.stages * sm90_bias_bytes(tile.m, tile.n, form) + kSm90BackwardSmallBytes + 1024;
}
CUATTN_HOST_DEVICE int64_t sm90_order_words_of_head(const AttentionParams& f) {
  return kOrderPad + sm90_row_pitch(f.total_q, f.batch) / kOrderRows;
}

// Bias pass: a CTA owns m rows and n keys of dbias; Q and K of what is summed there come in a stage,
// dO and V in the next one.
constexpr Tile sm90_bias_tile(HeadDims d) { return {128, 128, d.qk <= 64 ? 5 : 3, 12}; }
constexpr int32_t sm90_bias_smem_bytes(HeadDims d, Tile tile) {
  return tile.stages * (tile.m + tile.n) * sm90_row_bytes(d.qk) + tile.m * tile.n * 2 +
         kSm90BackwardSmallBytes + 1024;
}
// Parts of its sums, by shapes alone.
CUATTN_HOST_DEVICE int32_t sm90_bias_parts(const BackwardParams& p) {
  return bias_parts(p, 128, 256);
}

}  // namespace cuattn
