// SPDX-License-Identifier: Apache-2.0
// What lists of blocks say to the rows of one unit: which tiles of keys they all skip, and in which
// the mask need not be asked. Next: flash_units.cpp.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/flash.h"

namespace cuattn::cpu {

// Rows of a unit, numbered query by query, the heads of the group inside, and the keys in use.
struct KeyRows {
  int64_t begin, end;  // end > begin
  int32_t first_head, group, keys;
};

// A KeyTileState for each kFlexTile keys; nullptr where there are no lists. Memory of the calling
// thread, until its next unit.
inline const uint8_t* find_tiles(const FlexLists& lists, int32_t b, const KeyRows& rows) {
  if (lists.starts == nullptr) return nullptr;
  thread_local std::vector<int64_t> seen;  // keys of each tile that a full block of a row shows
  thread_local std::vector<uint8_t> tiles;
  size_t count = (static_cast<size_t>(rows.keys) + kFlexTile - 1) / kFlexTile;
  seen.assign(count, 0);
  tiles.assign(count + 1, kTileHidden);  // one more: no empty vector, whose data may be nullptr
  auto block_of = [&](int64_t row) {
    return static_cast<int32_t>(row / rows.group / lists.query_block);
  };
  int32_t first = block_of(rows.begin), last = block_of(rows.end - 1);
  int32_t heads = lists.stride_head == 0 ? 1 : rows.group;
  for (int32_t head = 0; head < heads; ++head) {
    const int32_t* starts =
        lists.starts + b * lists.stride_batch + (rows.first_head + head) * lists.stride_head;
    for (int32_t i = starts[first]; i < starts[last + 1]; ++i) {
      int64_t from = int64_t{lists.entries[i] / 2} * lists.key_block;
      int64_t until = std::min<int64_t>(from + lists.key_block, rows.keys);
      for (int64_t tile = from / kFlexTile; tile * kFlexTile < until; ++tile) {
        tiles[tile] = kTileMasked;
        if (lists.entries[i] % 2 != 0) continue;
        seen[tile] += std::min(until, (tile + 1) * kFlexTile) - std::max(from, tile * kFlexTile);
      }
    }
  }
  int64_t lists_read = int64_t{heads} * (last - first + 1);
  for (size_t tile = 0; tile < count; ++tile) {
    int64_t keys = std::min<int64_t>(kFlexTile, rows.keys - int64_t(tile) * kFlexTile);
    if (tiles[tile] == kTileMasked && seen[tile] == lists_read * keys) tiles[tile] = kTileSeen;
  }
  return tiles.data();
}

}  // namespace cuattn::cpu
