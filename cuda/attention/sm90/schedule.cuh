// SPDX-License-Identifier: Apache-2.0
// Who computes what in forward.cuh: work items, their order, and the parts of split keys.
// Persistent CTAs walk the items in a fixed order, or draw them from a counter where their sizes
// differ (causal, windows, ragged batches).
#pragma once

#include "cuattn/device/mask.cuh"
#include "cuattn/device/mma_sm90.cuh"
#include "cuattn/device/overlap.cuh"
#include "cuattn/tiles.h"
#include "cuda/attention/sm90/functor.cuh"

namespace cuattn {

// The order of work. Where all items weigh the same, head after head: who reads the same K and V
// reads them at the same time. Else sections of heads whose K and V fit in L2 together; inside a
// section the heaviest query tiles of all heads first, so that what comes last is light.
struct Sm90Schedule {
  int32_t tiles;          // query tiles of a sequence, the longest one of a ragged batch
  int32_t heads;          // that have tiles: num_heads_q, or num_heads_kv when rows are packed
  int32_t packed;         // query heads that share a tile: row = token * packed + head in group
  int32_t section_heads;  // (batch, head) pairs of a section; heads of one sequence if ragged
  int32_t splits;         // parts of the keys, each a work item of its own
  int32_t split_tiles;    // key tiles of a split that begins at a fixed place, or more, so that
  int32_t most_splits;    // a sequence has so many at most; 0: even shares
  int32_t total;          // work items, at most
  int32_t* counter;       // items drawn beyond the first of each CTA; nullptr: a fixed order
  bool stores_wide;       // O in float32: a part of split keys, or an out of that dtype
  bool stores_boxes;      // O through the TMA, 16 rows of a head at a time
  bool clears;            // what lies behind the last key of a sequence is not zeros
  bool stages_bias;       // a bias comes through the TMA
  int32_t bias_heads, bias_batches;  // 0: there is one for all
  int32_t page_rows;                 // keys in blocks: rows of a box
  device::Divisor block_size;
  float* part_out;  // [splits, heads, rows, head_dim_v], splits > 1
  float* part_lse;  // [splits, heads, rows]
  float zero;       // 0, which the compiler does not know

  // Key tiles of each part of `keys`, where they begin at fixed places; 0: even shares. A sequence's
  // own number of keys decides, not where it begins in a packed array.
  template <int kN>
  __device__ __forceinline__ int32_t fixed_tiles(int32_t keys) const {
    if (split_tiles == 0) return 0;
    return max(split_tiles, device::ceil_div(device::ceil_div(keys, kN), most_splits));
  }
};

// A work item: rows [row0, row0 + m) of one head (or of a group of heads, packed) against the key
// tiles `range`.
struct Sm90Work {
  enum Kind : int32_t { kFull, kEmpty, kNone };  // kEmpty: rows without keys; kNone: the end
  int32_t batch, head, row0, split;
  Span queries, keys;
  device::TileRange range;  // of lists: places (functor.cuh); what is full are tiles
  Kind kind;
  int32_t list;  // its last entry
};

// The keys of a work item: `used` rows from row `start` of the tensor on.
struct Sm90Keys {
  int32_t used, start, batch, head;
  __device__ Sm90Keys(const AttentionParams& p, const Sm90Schedule& s, const Sm90Work& w)
      : used(w.keys.used),
        start(static_cast<int32_t>(w.keys.start)),
        batch(w.batch),
        head(s.packed > 1 ? w.head : w.head / (p.num_heads_q / p.num_heads_kv)) {}
};

// Where the items of a ragged batch lie: 32 sequences at a time, one a lane. Items are asked for in
// growing order.
struct Sm90Cursor {
  int32_t batch = -32;   // of lane 0
  int32_t end = 0;       // items of all sequences up to those at hand
  int32_t begin, count;  // items in front of this lane's sequence, and its own

  // Moves to the sequence of `item`; -1: there are no so many items. `item` is then within it.
  template <int kM>
  __device__ __forceinline__ int32_t find(const AttentionParams& p, const Sm90Schedule& s,
                                          int32_t& item, int32_t& tiles) {
    int32_t lane = threadIdx.x % 32;
    while (item >= end) {
      batch += 32;
      if (batch >= p.batch) return -1;
      int32_t b = batch + lane;
      count = b < p.batch ? device::ceil_div(query_span(p, b).stored * s.packed, kM) * s.heads : 0;
      int32_t sum = count;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        int32_t left = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += left;
      }
      begin = end + sum - count;
      end += __shfl_sync(0xffffffffu, sum, 31);
    }
    int owner = __ffs(__ballot_sync(0xffffffffu, item < begin + count)) - 1;
    item -= __shfl_sync(0xffffffffu, begin, owner);
    tiles = __shfl_sync(0xffffffffu, count, owner) / s.heads;
    return batch + owner;
  }
};

// The part of a range that `count` rows see by their row ranges, the first one's at `first`. A warp
// together: its lanes share the rows out.
template <int kN>
__device__ __forceinline__ device::TileRange within_rows(device::TileRange range,
                                                         const RowRanges& rows, int64_t first,
                                                         int32_t count) {
  constexpr int32_t kMost = 0x7fffffff;
  int32_t begin = kMost, end = 0, last_begin = 0, first_end = kMost;
  for (int32_t row = threadIdx.x % 32; row < count; row += 32) {
    int64_t at = first + row * rows.strides.seq;
    int32_t row_begin = rows.begin[at], row_end = rows.end[at];
    if (row_begin < row_end) begin = min(begin, row_begin), end = max(end, row_end);
    last_begin = max(last_begin, row_begin);
    first_end = min(first_end, row_end);
  }
  begin = __reduce_min_sync(0xffffffffu, begin);
  end = __reduce_max_sync(0xffffffffu, end);
  last_begin = __reduce_max_sync(0xffffffffu, last_begin);
  first_end = __reduce_min_sync(0xffffffffu, first_end);
  if (end <= begin) return {0, 0, 0, 0};
  int32_t full_begin = last_begin / kN + (last_begin % kN > 0);  // any number may stand there
  return {max(range.begin, begin / kN), min(range.end, (end - 1) / kN + 1),
          max(range.full_begin, full_begin), min(range.full_end, first_end / kN)};
}

// Writes work item `item` to shared memory, part by part (a thread of the producer has few
// registers). A warp together; `item` grows from call to call. Tiles of keys begin at rows of the
// tensor that are multiples of kAlign.
template <int kM, int kN, MaskKind kMask, int kAlign, class Functor>
__device__ __forceinline__ Sm90Work::Kind find_sm90_work(const AttentionParams& p,
                                                         const Sm90Schedule& s, Sm90Cursor& cursor,
                                                         int32_t item, uint32_t smem) {
  auto put = [&](size_t offset, const auto& part) {  // by the lane that tells the others
    if (threadIdx.x % 32 == 0) device::store_shared(smem + static_cast<uint32_t>(offset), part);
  };
  int32_t list = 0;
  auto put_kind = [&](Sm90Work::Kind kind) {
    put(offsetof(Sm90Work, kind), int2{kind, list});
    return kind;
  };
  auto put_end = [&] {  // names a sequence that exists: consumers read its score options first
    put(offsetof(Sm90Work, batch), int4{0, 0, 0, 0});
    return put_kind(Sm90Work::kNone);
  };
  int32_t batch = -1, tiles = s.tiles, heads = p.batch * s.heads, split = item % s.splits;
  if (item >= s.total) return put_end();
  item /= s.splits;
  if (!Functor::kLists && p.cu_seqlens_q != nullptr) {  // blocks count from a sequence's start
    batch = cursor.find<kM>(p, s, item, tiles);
    if (batch < 0) return put_end();
    heads = s.heads;
  }
  int32_t per_section = s.section_heads * tiles;
  int32_t first = item / per_section * s.section_heads, within = item % per_section;
  int32_t width = min(s.section_heads, heads - first);
  int32_t head = first + within % width, tile = within / width;
  if (kMask != MaskKind::none) tile = tiles - 1 - tile;
  if (batch < 0) {
    batch = head / s.heads;
    head %= s.heads;
  }
  int32_t row0 = tile * kM;
  put(offsetof(Sm90Work, batch), int4{batch, head, row0, split});
  Span queries = query_span(p, batch), keys = key_span(p, batch);
  put(offsetof(Sm90Work, queries), queries);
  put(offsetof(Sm90Work, keys), keys);
  const int32_t packed = packed_heads<Functor>(s.packed);
  int32_t token0 = row0 / packed, token1 = min((row0 + kM - 1) / packed + 1, queries.used);
  constexpr bool kLeft = kMask == MaskKind::window || kMask == MaskKind::rows;
  device::TileRange range = device::tile_range<kN>(
      kLeft ? p.mask.left : static_cast<int32_t>(kUnlimited),
      kMask == MaskKind::none ? static_cast<int32_t>(kUnlimited) : p.mask.right, token0, token1,
      queries.used, keys.used, static_cast<int32_t>(keys.start % kAlign));
  if constexpr (kMask == MaskKind::rows) {
    int64_t first = p.rows.first(batch, head, queries.start + token0);
    range = within_rows<kN>(range, p.rows, first, token1 - token0);
  }
  if constexpr (Functor::kLists) list = list_places<Functor, kN>(range, p, batch, head, token0);
  if (s.splits > 1) range = device::split_of(range, split, s.splits, s.fixed_tiles<kN>(keys.used));
  put(offsetof(Sm90Work, range), range);
  return put_kind(range.begin >= range.end ? Sm90Work::kEmpty : Sm90Work::kFull);
}

// One warp: finds the next work item. Note: it is drawn when the last one is nearly loaded, not
// sooner: who is at work on a heavy tile must not hold another one back from an idle CTA.
template <class Kernel>
__device__ __forceinline__ void schedule_sm90_work(const AttentionParams& p, const Sm90Schedule& s,
                                                   const typename Kernel::Shared& shared) {
  if (s.splits > 1) device::release_next_kernel();  // the merge, which waits for all parts
  device::Ring<2> slot(1);
  Sm90Cursor cursor;
  int32_t item = blockIdx.x;
  uint32_t parity = 0;
  // Without items no CTA draws: the kernel must not end before the counter is cleared all the same. (A
  // wait behind the last item instead costs the kernels of e4m3 a register too many.)
  if (s.counter != nullptr && blockIdx.x == 0) device::wait_for_previous_kernel();
  while (true) {
    device::barrier_wait(shared.work_empty(slot.stage()), slot.parity());
    Sm90Work::Kind kind =
        find_sm90_work<Kernel::kTile.m, Kernel::kTile.n, Kernel::kMask, Kernel::kKeyAlign,
                       typename Kernel::Asked>(p, s, cursor, item, shared.work(slot.stage()));
    if (threadIdx.x % 32 == 0) device::barrier_arrive(shared.work_full(slot.stage()));
    if (kind == Sm90Work::kNone) break;
    slot.next();
    device::barrier_wait(shared.wanted(), parity);
    parity ^= 1;
    item += gridDim.x;
    if (s.counter != nullptr) {
      device::wait_for_previous_kernel();  // until the counter is zero
      if (threadIdx.x % 32 == 0) item = atomicAdd(s.counter, 1) + gridDim.x;
      item = __shfl_sync(0xffffffffu, item, 0);
    }
  }
}

// Leaves of the keys those in the range of a row; one past the last is as the last. Not for the end
// of the work, which has no rows.
__device__ __forceinline__ void limit_to_row(KeyRange& keys, const AttentionParams& p,
                                             const Sm90Work& w, int32_t token) {
  int32_t stored = min(token, w.queries.used - 1);
  keys = p.rows.limit(keys, w.batch, w.head, w.queries.start + stored);
}

// Where row `row` of a tile is written, or nowhere. `packs`: rows of a group may share the tile.
struct Sm90Row {
  int32_t token, head;
  bool stored;
  __device__ Sm90Row(const AttentionParams& p, const Sm90Schedule& s, const Sm90Work& w,
                     int32_t row, bool packs = true)
      : token(row), head(w.head) {
    if (packs && s.packed > 1) {
      token = row / s.packed;
      head = w.head * s.packed + row % s.packed;
    }
    stored = token < w.queries.stored;
  }
  __device__ int64_t out(const AttentionParams& p, const Sm90Work& w) const {
    return w.batch * p.out_strides.batch + (w.queries.start + token) * p.out_strides.seq +
           head * p.out_strides.head;
  }
  __device__ float* lse(const AttentionParams& p, const Sm90Work& w) const {
    return p.lse + w.batch * p.lse_strides.batch + head * p.lse_strides.head +
           (w.queries.start + token) * p.lse_strides.seq;
  }
  // Its row in the workspace, of this part of the keys: rows of all sequences follow one another.
  __device__ int64_t part(const AttentionParams& p, const Sm90Work& w) const {
    int64_t first = p.cu_seqlens_q ? w.queries.start : w.batch * int64_t{p.seqlen_q};
    return (int64_t{w.split} * p.num_heads_q + head) * p.total_q + first + token;
  }
  // Where it goes in float32: to the workspace, or to an out of that dtype.
  __device__ float* wide(const AttentionParams& p, const Sm90Schedule& s, const Sm90Work& w) const {
    if (s.splits > 1) return s.part_out + part(p, w) * p.head_dim_v;
    return static_cast<float*>(p.out) + out(p, w);
  }
};

}  // namespace cuattn
