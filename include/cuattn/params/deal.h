// SPDX-License-Identifier: Apache-2.0
// How the keys of a paged call are dealt to thread blocks: units of rows, tiles of keys, splits or
// a deal, and where the partial result of each lies. Arithmetic that CPU and CUDA share. Next:
// cpu/paged.cpp (all of it in plain loops).
#pragma once

#include "cuattn/params/rows.h"

namespace cuattn {

// Thread blocks of a cluster at most: as many as every device of compute capability 9.0 runs
// together.
constexpr int32_t kPagedMaxCluster = 8;
// Keys that are weighed by themselves where a result must not depend on who else has them.
constexpr int32_t kPagedPartKeys = 128;

// The rows of one kv head of one sequence are q_len * group queries: row = query * group + head in
// the group. `rows` of them make a row group; (sequence, kv head, row group) is a unit, the work
// that shares keys. The keys of a unit are read in tiles of `tile` and cut into splits in one of
// three ways:
//   num_splits >= 1, split_keys == 0: evenly, whole tiles each
//   num_splits >= 1, split_keys > 0: at multiples of split_keys (batch invariant, and V2);
//                                    num_splits is what the longest context needs
//   num_splits == 0: by a deal. All tiles of all units stand in `tracks` rows, and each of
//                    num_workers thread blocks takes the next `tiles_per_worker` of its row.
// A split is one thread block's, or a cluster's.
struct PagedWork {
  const int32_t* context_lens;  // [num_seqs], tokens in the cache with the newest; clamped. Of rows
                                // nullptr, too: all have `capacity`
  int32_t num_seqs, q_len;
  int32_t num_heads_kv, group;  // query heads of a kv head
  int32_t capacity;             // tokens that a row of block_tables can name
  MaskParams mask;

  int32_t rows, row_groups;  // rows of a unit at most, and row groups of a kv head
  int32_t tile;              // keys; split_keys is a multiple of it
  int32_t num_splits, split_keys;
  int32_t cluster;  // thread blocks that share a split and merge what they find; 1: none
  bool in_parts;    // parts of kPagedPartKeys keys are weighed one by one (batch invariant)
  int32_t num_workers, tracks;
  const int32_t* deal;  // see PagedDeal; nullptr when num_splits >= 1
};

// A deal is one int32 array, made on the device by paged_deal once a step and shared by all layers
// of the step; Python's paged_plan returns it. The head groups (kv head * row_groups + row group)
// are dealt to `tracks`, which divides them, neighbours to the same track. The tiles of a track
// stand in one row: sequence after sequence, within a sequence head group after head group. Every
// row is cut alike: worker w takes the tiles_per_worker next to each other at place w / tracks of
// track w % tracks. So workers side by side read the same tokens of several heads at a time, which
// lie together in memory. Two sequences of 3 and 5 tiles, 4 head groups, 2 tracks, 6 workers:
//
//   track 0 | s0 g0 | s0 g1 |   s1 g0   |   s1 g1   |   16 tiles in a row
//   worker    0 0 0   0 0 0   2 2 2 2 2   2 4 4 4 4     6 tiles each, the last takes what is left
//   track 1 | s0 g2 | s0 g3 |   s1 g2   |   s1 g3   |
//   worker    1 1 1   1 1 1   3 3 3 3 3   3 5 5 5 5
//
// Workers 2 and 4 share the unit (s1, g1): each writes a partial result, and a combine merges them.
// A worker shares two units at most, its first and its last, so its partial slots are 2 w and
// 2 w + 1.
//   [0] tiles of all sequences   [1] tiles_per_worker   [2] tile   [3] num_workers   [4] tracks
//   [5 + 4 w ..]  where worker w begins: head group, sequence, tile within the sequence, and how
//                 many tiles it takes (0: nothing to do)
//   [5 + 4 num_workers + b]  the tiles of one head group before sequence b, for b = 0 .. num_seqs
struct PagedDeal {
  static constexpr int32_t kTiles = 0, kTilesPerWorker = 1, kTile = 2, kNumWorkers = 3, kTracks = 4,
                           kHeader = 5;
  static constexpr int32_t kWorkerHead = 0, kWorkerSeq = 1, kWorkerTile = 2, kWorkerCount = 3,
                           kWorkerFields = 4;

  static CUATTN_HOST_DEVICE int64_t worker(int64_t w) { return kHeader + kWorkerFields * w; }
  static CUATTN_HOST_DEVICE int64_t first_tile(const PagedWork& w, int64_t b) {
    return worker(w.num_workers) + b;
  }
  static CUATTN_HOST_DEVICE int64_t size(const PagedWork& w) {
    return first_tile(w, w.num_seqs) + 1;
  }
};

// What a context length says, within what a table can name; and that of sequence b.
CUATTN_HOST_DEVICE int32_t context_of_length(const PagedWork& w, int32_t length) {
  return length < 0 ? 0 : length < w.capacity ? length : w.capacity;
}
CUATTN_HOST_DEVICE int32_t context_of(const PagedWork& w, int32_t b) {
  return w.context_lens == nullptr ? w.capacity : context_of_length(w, w.context_lens[b]);
}

// The keys [begin, end) that some query of a sequence sees. begin is a multiple of the tile; the
// first key that is seen is `low`.
struct PagedSpan {
  int32_t context, begin, end, low;
};

CUATTN_HOST_DEVICE PagedSpan paged_span_of_context(const PagedWork& w, int32_t context) {
  int32_t low = w.mask.visible(0, w.q_len, context).begin;
  int32_t end = w.mask.visible(w.q_len - 1, w.q_len, context).end;
  int32_t begin = low < end ? low : end;
  return {context, begin == 0 ? 0 : begin / w.tile * w.tile, end, low};
}
CUATTN_HOST_DEVICE PagedSpan paged_span(const PagedWork& w, int32_t b) {
  return paged_span_of_context(w, context_of(w, b));
}

// At least one, so that a sequence without keys is somebody's work too.
CUATTN_HOST_DEVICE int32_t paged_tiles(const PagedWork& w, const PagedSpan& span) {
  int32_t keys = span.end - span.begin;
  return keys <= w.tile ? 1 : (keys - 1) / w.tile + 1;
}

CUATTN_HOST_DEVICE int32_t head_groups(const PagedWork& w) { return w.num_heads_kv * w.row_groups; }
CUATTN_HOST_DEVICE int32_t track_heads(const PagedWork& w) { return head_groups(w) / w.tracks; }

// Thread blocks that share the keys of a call: workers of a deal, or splits of units.
CUATTN_HOST_DEVICE int64_t num_key_tasks(const PagedWork& w) {
  if (w.num_splits == 0) return w.num_workers;
  return int64_t{w.num_seqs} * w.num_splits * head_groups(w);
}

// Without a deal: which split of which unit task `index` of num_key_tasks is. Heads fastest: blocks
// that run together read neighbours in memory.
struct PagedItem {
  int32_t b, head_group, split;
};

CUATTN_HOST_DEVICE PagedItem paged_item(const PagedWork& w, uint32_t index) {
  int32_t head_group = index % head_groups(w), rest = index / head_groups(w);
  return {rest / w.num_splits, head_group, rest % w.num_splits};
}

// Without a deal: the splits first .. first + count - 1 of num_splits have work; count >= 1. Split
// s covers keys [max(span.begin, begin_of(s)), min(span.end, begin_of(s + 1))).
struct PagedSplits {
  int32_t first, count;
  int32_t origin, keys;
  CUATTN_HOST_DEVICE int64_t begin_of(int32_t s) const { return origin + int64_t{s} * keys; }
};

CUATTN_HOST_DEVICE PagedSplits paged_splits(const PagedWork& w, const PagedSpan& span) {
  PagedSplits splits{0, 1, 0, w.split_keys};
  if (w.num_splits == 1) return {0, 1, span.begin, span.end - span.begin};
  if (w.split_keys == 0) {
    int32_t tiles = paged_tiles(w, span);
    splits.origin = span.begin;
    splits.keys = ((tiles - 1) / w.num_splits + 1) * w.tile;
  }
  splits.first = (span.begin - splits.origin) / splits.keys;
  if (span.end > span.begin) {
    splits.count = (span.end - 1 - splits.origin) / splits.keys + 1 - splits.first;
  }
  return splits;
}

// In a cluster: of keys [begin, end) of a split, those of thread block `rank`. Parts lie at
// multiples of their length, or the tiles are shared evenly.
CUATTN_HOST_DEVICE KeyRange paged_part(const PagedWork& w, int32_t rank, int32_t begin,
                                       int32_t end) {
  int64_t first = begin, keys = kPagedPartKeys;
  if (w.in_parts) {
    first -= begin % (kPagedMaxCluster * kPagedPartKeys);
  } else {
    int32_t tiles = end - begin <= w.tile ? 1 : (end - begin - 1) / w.tile + 1;
    keys = int64_t{(tiles - 1) / w.cluster + 1} * w.tile;
  }
  first += rank * keys;
  int64_t last = first + keys;
  return {static_cast<int32_t>(first < begin ? begin
                               : first < end ? first
                                             : end),
          static_cast<int32_t>(last < begin ? begin
                               : last < end ? last
                                            : end)};
}

// The slots of a unit's partial results, in key order; count == 1: none, the output was written.
struct PagedSlots {
  int32_t count;
  int64_t first, second;  // slot of part 0, slot of part 1
  int32_t step;           // between slots of parts from 1 on
  CUATTN_HOST_DEVICE int64_t slot(int32_t part) const {
    return part == 0 ? first : second + int64_t{part - 1} * step;
  }
};

CUATTN_HOST_DEVICE int64_t num_paged_slots(const PagedWork& w) {
  if (w.num_splits == 0) return int64_t{2} * w.num_workers;
  return w.num_splits == 1 ? 0 : int64_t{w.num_seqs} * head_groups(w) * w.num_splits;
}

// head_group = kv head * row_groups + row group.
CUATTN_HOST_DEVICE PagedSlots paged_slots(const PagedWork& w, int32_t b, int32_t head_group) {
  if (w.num_splits != 0) {
    PagedSplits splits = paged_splits(w, paged_span(w, b));
    int64_t first = (int64_t{b} * head_groups(w) + head_group) * w.num_splits + splits.first;
    return {splits.count, first, first + 1, 1};
  }
  int32_t heads = track_heads(w), track = head_group / heads, places = w.num_workers / w.tracks;
  int64_t before = w.deal[PagedDeal::first_tile(w, b)];
  int64_t tiles = w.deal[PagedDeal::first_tile(w, b + 1)] - before;
  int64_t begin = before * heads + head_group % heads * tiles, end = begin + tiles;
  int64_t step = w.deal[PagedDeal::kTilesPerWorker];
  step = step < 1 ? 1 : step;
  int64_t first = begin / step, last = (end - 1) / step;  // places of the track
  // Whatever the array holds, no slot lies outside the buffers.
  first = first < 0 ? 0 : first < places ? first : places - 1;
  last = last < first ? first : last < places ? last : places - 1;
  return {static_cast<int32_t>(last - first + 1),
          2 * (first * w.tracks + track) + (begin > first * step ? 1 : 0),
          2 * ((first + 1) * w.tracks + track), 2 * w.tracks};
}

// How many tiles a worker takes when head groups have `tiles` together and `longest` at most. A
// single tile each would make more partial results than it saves time.
CUATTN_HOST_DEVICE int64_t tiles_per_worker(const PagedWork& w, int64_t tiles, int64_t longest) {
  int64_t total = tiles * track_heads(w), places = w.num_workers / w.tracks;
  int64_t even = total == 0 ? 1 : (total - 1) / places + 1;
  even = even < 2 ? 2 : even;
  if (longest == 0 || tiles != longest * w.num_seqs) return even;
  // All sequences are equally long: workers that end where units end cost less than the last bit of
  // balance, if the step is a multiple or a divisor of a unit within a sixteenth.
  int64_t step =
      even >= longest ? ((even - 1) / longest + 1) * longest : longest / (longest / even);
  bool ends_with_units = step % longest == 0 || longest % step == 0;
  return ends_with_units && step >= even && step - even <= even / 16 ? step : even;
}

// Where a worker begins, and how many tiles it takes. `first_tile`: as in the deal.
struct PagedStart {
  int32_t head_group, b, tile, count;
};

CUATTN_HOST_DEVICE PagedStart worker_start(const PagedWork& w, const int32_t* first_tile,
                                           int64_t step, int64_t worker) {
  int64_t heads = track_heads(w), total = first_tile[w.num_seqs] * heads;
  int64_t at = worker / w.tracks * step;
  if (at >= total) return {0, 0, 0, 0};
  int32_t low = 0, high = w.num_seqs;  // first_tile[low] <= at / heads < first_tile[high]
  while (high - low > 1) {
    int32_t middle = low + (high - low) / 2;
    if (first_tile[middle] <= at / heads) {
      low = middle;
    } else {
      high = middle;
    }
  }
  int64_t within = at - first_tile[low] * heads, tiles = first_tile[low + 1] - first_tile[low];
  return {static_cast<int32_t>(worker % w.tracks * heads + within / tiles), low,
          static_cast<int32_t>(within % tiles),
          static_cast<int32_t>(total - at < step ? total - at : step)};
}

// What worker w does for the unit it is at: tiles [tile, tile + count) of sequence b.
struct PagedTask {
  int32_t head_group, b, tile, count;
  int64_t slot;  // -1: the whole unit, the output is written
  PagedSpan span;
};

// Walks the tasks of one worker, as the deal has them: `next` until it says no.
struct PagedWalk {
  int32_t head_group, b, tile, left;
  int64_t slot;

  PagedWalk() = default;
  CUATTN_HOST_DEVICE PagedWalk(const PagedWork& w, int32_t worker) {
    const int32_t* entry = w.deal + PagedDeal::worker(worker);
    head_group = entry[PagedDeal::kWorkerHead];
    b = entry[PagedDeal::kWorkerSeq];
    tile = entry[PagedDeal::kWorkerTile];
    left = entry[PagedDeal::kWorkerCount];
    slot = int64_t{2} * worker;
    // Whatever the array holds, nothing is written outside the outputs.
    if (head_group < 0 || head_group >= head_groups(w) || b < 0 || b >= w.num_seqs || tile < 0)
      left = 0;
  }

  CUATTN_HOST_DEVICE bool next(const PagedWork& w, PagedTask& task) {
    if (left <= 0 || b >= w.num_seqs) return false;
    PagedSpan span = paged_span(w, b);
    int32_t tiles = paged_tiles(w, span);
    int32_t count = tiles - tile < left ? tiles - tile : left;
    if (count <= 0) return false;
    task = {head_group, b, tile, count, count == tiles ? -1 : slot, span};
    slot |= 1;  // a second unit in part is the worker's last
    left -= count;
    tile = 0;
    if (++head_group % track_heads(w) == 0) {  // on to the next sequence of the track
      head_group -= track_heads(w);
      ++b;
    }
    return true;
  }
};

}  // namespace cuattn
