// SPDX-License-Identifier: Apache-2.0
// The tensor maps of paged caches: tiles of chunked prefill (cuda/attention/sm90/launch.cuh) and of
// decode (cuda/paged/sm90/decode.cuh), whose boxes a block table names, as test_tensor_maps.cu does
// it. Compiled for 90a alone, skipped on other devices.
#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <vector>

#include "cuattn/error.h"  // attention.h leaves its exceptions out under CUATTN_INTERNAL
#include "cuda/attention/sm90/boxes.cuh"
#include "cuda/attention/sm90/host.cuh"
#include "cuda/paged/sm90/decode.cuh"
#include "problem.h"
#include "suite.h"
#include "tma_tiles.cuh"

namespace cuattn::test {
namespace {

// ---- K and V in blocks: chunked prefill

// A block walks over the keys of one query head, last tile first, as load_tiles does: grid (heads,
// batch), a warp for each loader.
template <int kRows, int kPanels>
__global__ void load_pages(const __grid_constant__ TensorMap map,
                           const __grid_constant__ AttentionParams p,
                           const __grid_constant__ Sm90Schedule s, int32_t most_tiles,
                           uint16_t* out, int* late) {
  using KeyBox = PageBox<kRows, kPanels>;
  using Ids = BlockIds<kRows>;
  __shared__ alignas(8) uint64_t barrier;
  __shared__ alignas(16) char sIds[kPageLoaders * Ids::kBytes];
  SharedTile tile(&barrier, KeyBox::kBytes / 2);
  int loader = threadIdx.x / 32;
  const Ids ids{smem_address(sIds) + loader * Ids::kBytes};
  Sm90Work w{};
  w.batch = blockIdx.y;
  w.head = blockIdx.x;
  w.keys = key_span(p, w.batch);
  const Sm90Keys keys(p, s, w);
  const int last = ceil_div(keys.used, kRows) - 1;
  for (int t = last; t > last - Ids::kAhead; --t) ids.ask(p, keys, s, t, 0);
  uint32_t parity = 0;
  for (int t = last; t >= 0; --t, parity ^= 1) {
    ids.ask(p, keys, s, t - Ids::kAhead, 0);
    ids.await();
    tile.poison();
    const KeyBox box(p, keys, s, ids.slot(t), t * kRows, loader);
    if (threadIdx.x == 0) barrier_arrive_expect(tile.full, KeyBox::kBytes);
    __syncwarp();
    box.load(map, smem_address(tile.data), tile.full);
    int64_t index = (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * most_tiles + t;
    if (!tile.take(parity, out + index * (tile.elements + 2 * kGuard), late)) return;
  }
}

// Caches [blocks, 2, ...] of K and V side by side, and tables with junk behind the sequences.
struct PagedMemory {
  int32_t blocks, block_size, columns_in_table;
  Layout layout;
  std::vector<uint16_t> words;
  std::vector<int32_t> tables;

  PagedMemory(const std::vector<int32_t>& lengths, int32_t block_size, int32_t heads,
              int32_t columns, bool hnd, const std::string& name)
      : blocks(5),
        block_size(block_size),
        columns_in_table(ceil_div(*std::max_element(lengths.begin(), lengths.end()), block_size) +
                         1),
        layout(2 * blocks, block_size, heads, columns, hnd) {
    layout.strides.batch *= 2;
    words = random_words(layout.elements, name);
    Random random(case_seed(name + ", tables"));
    for (int32_t length : lengths)
      for (int32_t i = 0; i < columns_in_table; ++i) {
        bool used = i * block_size < length;
        tables.push_back(used ? random.range(0, blocks - 1)
                              : random.pick<int32_t>({-1, blocks, 0x7fffffff}));
      }
    tables[0] = 0x7ffffff0;         // read as the last block
    tables[columns_in_table] = -7;  // read as the first
  }
  int32_t block(int64_t b, int32_t token) const {
    return std::clamp(tables[b * columns_in_table + token / block_size], 0, blocks - 1);
  }
};

template <int kRows, int kPanels>
void check_pages(const std::vector<int32_t>& lengths, int32_t block_size, int32_t columns,
                 bool hnd) {
  const std::string name = "blocks of " + std::to_string(block_size) + ", " +
                           std::to_string(columns) + " columns, " + std::to_string(kRows) +
                           " rows a tile";
  constexpr int32_t kHeads = 2, kGroup = 2;
  PagedMemory paged(lengths, block_size, kHeads, columns, hnd, name);
  OnGpu<uint16_t> cache(paged.words);
  OnGpu<int32_t> tables(paged.tables), used(lengths);
  int32_t batch = static_cast<int32_t>(lengths.size());
  int32_t longest = *std::max_element(lengths.begin(), lengths.end());
  AttentionParams p = dense_params(batch, longest, kHeads * kGroup, kHeads, columns, columns);
  p.k_strides = paged.layout.strides;
  p.seqused_kv = used.data();
  p.pages = {paged.blocks, block_size, tables.data(), paged.columns_in_table};
  Sm90Schedule s = make_sm90_schedule(p, kWhole, {128, kRows, 2, 12});
  int32_t most_tiles = ceil_div(longest, kRows);
  Tiles tiles(int64_t{batch} * kHeads * kGroup * most_tiles, kRows, kPanels);
  int smem_bytes = smem_bytes_of(tiles.elements);
  allow(load_pages<kRows, kPanels>, smem_bytes);
  load_pages<kRows, kPanels><<<dim3(kHeads * kGroup, batch), 32 * kPageLoaders, smem_bytes>>>(
      page_map(p, cache.data() + paged.layout.start, p.k_strides, columns, s.page_rows), p, s,
      most_tiles, tiles.memory.data(), tiles.late.data());
  tiles.fetch(name);
  for (int64_t b = 0; b < batch; ++b)
    for (int head = 0; head < kHeads * kGroup; ++head)
      for (int32_t t = 0; t * kRows < lengths[b]; ++t)
        tiles.check(name, (b * kHeads * kGroup + head) * most_tiles + t,
                    [&](int row, int column) -> uint16_t {
                      // A run that begins behind the last key is zeros.
                      int32_t token = t * kRows + row, run = token - row % s.page_rows;
                      if (run >= lengths[b] || column >= columns) return 0;
                      return paged.words[paged.layout.at(paged.block(b, run), token % block_size,
                                                         head / kGroup, column)];
                    });
}

CUDA_TEST(sm90_page_maps_bring_the_blocks_that_a_table_names) {
  require_hopper();
  for (bool hnd : {false, true}) {
    check_pages<128, 1>({130, 17, 0, 600}, 16, 64, hnd);
    check_pages<160, 2>({200, 48, 700}, 48, 72, hnd);
    check_pages<128, 2>({700, 1}, 256, 128, hnd);
    check_pages<80, 4>({81, 333}, 80, 200, hnd);
    check_pages<96, 3>({500, 95}, 64, 136, hnd);
  }
}

// ---- K and V in blocks: decode

// A tile of 64 keys, box by box, as the copy warp of cuda/paged/sm90/decode.cuh asks for them.
// Without a table a block is a sequence of `capacity` tokens.
void check_decode(const std::vector<int32_t>& lengths, int32_t block_size, int32_t columns,
                  int panels, bool hnd, bool has_table) {
  constexpr int kRows = 64;
  constexpr int32_t kHeads = 3;
  const std::string name = "decode, blocks of " + std::to_string(block_size) + ", " +
                           std::to_string(columns) + " columns";
  PagedMemory paged(lengths, block_size, kHeads, columns, hnd, name);
  OnGpu<uint16_t> cache(paged.words);
  PagedParams p{};
  p.dtype = p.kv_dtype = DType::f16;
  p.head_dim = columns;
  p.pages.block_size = block_size;
  p.pages.num_blocks = paged.blocks;
  p.pages.block_tables = has_table ? lengths.data() : nullptr;  // the boxes name the blocks
  p.work.capacity = has_table ? 0 : block_size;
  p.work.num_heads_kv = kHeads;
  const Strides& strides = paged.layout.strides;
  CacheStrides cache_strides = {strides.batch, strides.head, strides.seq};
  const int32_t piece = std::gcd(block_size, kRows);
  std::vector<Box> boxes;
  std::vector<std::array<int32_t, 3>> origins;  // sequence, head, first key
  for (int32_t b = 0; b < static_cast<int32_t>(lengths.size()); ++b)
    for (int32_t head = 0; head < kHeads; ++head)
      for (int32_t first = 0; first < lengths[b]; first += kRows) {
        origins.push_back({b, head, first});
        for (int32_t row = 0; row < kRows; row += piece)
          for (int32_t panel = 0; panel < panels; ++panel) {
            int32_t token = first + row, block = token < lengths[b] ? paged.block(b, token) : -1;
            boxes.push_back({panel * kRows * 128 + row * 128,
                             {panel * 64, token % block_size, head, block, 0}});
          }
      }
  Tiles tiles(origins.size(), kRows, panels);
  launch_boxes(paged_cache_map(p, cache.data() + paged.layout.start, cache_strides, piece), boxes,
               kRows / piece * panels, tiles);
  tiles.fetch(name);
  for (size_t i = 0; i < origins.size(); ++i) {
    auto [b, head, first] = origins[i];
    tiles.check(name, i, [&](int row, int column) -> uint16_t {
      int32_t token = first + row, run = token - row % piece;
      if (run >= lengths[b] || column >= columns) return 0;
      return paged.words[paged.layout.at(paged.block(b, run), token % block_size, head, column)];
    });
  }
}

CUDA_TEST(sm90_decode_maps_bring_pieces_of_blocks) {
  require_hopper();
  for (bool hnd : {false, true})
    for (bool has_table : {true, false}) {
      check_decode({130, 1, 64}, 8, 64, 1, hnd, has_table);
      check_decode({130, 65}, 16, 128, 2, hnd, has_table);
      check_decode({200, 24}, 24, 72, 2, hnd, has_table);
      check_decode({100, 333}, 128, 256, 4, hnd, has_table);
      check_decode({90, 41}, 40, 8, 1, hnd, has_table);
    }
}

// ---- who has which keys

// The thread blocks of a cluster share the keys of a split, in order, and parts lie at multiples of
// their length.
TEST(blocks_of_a_cluster_share_the_keys_of_a_split) {
  Random random(7);
  for (int draw = 0; draw < 20000; ++draw) {
    PagedWork w{};
    w.tile = 64;
    w.in_parts = draw % 2 == 0;
    w.cluster = w.in_parts ? 8 : random.range(2, 8);
    int split = w.in_parts ? kPagedMaxCluster * kPagedPartKeys : 4096;
    int base = random.range(0, 9) * split, begin = base + random.range(0, split / 64 - 1) * 64;
    int end = std::max(begin, base + random.range(0, split)) - (draw % 7 == 0 ? 64 : 0);
    int at = begin;
    for (int rank = 0; rank < w.cluster; ++rank) {
      KeyRange part = paged_part(w, rank, begin, end);
      if (end <= begin) {
        CHECK(part.begin >= part.end, begin, " ", end);
        continue;
      }
      CHECK(part.begin <= part.end && part.end <= end, begin, " ", end, " rank ", rank);
      if (part.begin == part.end) continue;
      CHECK(part.begin == at && part.begin % 64 == 0, begin, " ", end, " rank ", rank);
      CHECK(!w.in_parts || part.begin / kPagedPartKeys == base / kPagedPartKeys + rank);
      at = part.end;
    }
    CHECK(end <= begin || at == end, begin, " ", end, " cluster ", w.cluster);
  }
}

}  // namespace
}  // namespace cuattn::test
