// SPDX-License-Identifier: Apache-2.0
// The tensor maps of cuda/host/tensor_maps.h: a tile that the TMA loads by the coordinates of
// cuda/attention/sm90/forward.cuh, against a host model of it, element by element with what lies
// around it; and O on its way out, against memory that was poison. Maps of caches:
// test_page_maps.cu. Compiled for 90a alone, skipped on other devices.
#include <array>
#include <string>
#include <vector>

#include "cuattn/device/mma_sm90.cuh"
#include "cuda/attention/sm90/boxes.cuh"
#include "cuda/attention/sm90/host.cuh"
#include "cuda/attention/sm90/store.cuh"
#include "cuda/host/tensor_maps.h"
#include "suite.h"
#include "tma_tiles.cuh"

namespace cuattn::test {
namespace {

// ---- Q: heads of a group in one tile

struct QueryCase {
  int32_t batch, seqlen, heads, head_dim, panels, rows, packed;
  std::vector<int32_t> starts;  // ragged: of the sequences, and the rows in all
};

void check_queries(const QueryCase& c, bool heads_first) {
  const std::string name = "queries of " + std::to_string(c.head_dim) + " columns, " +
                           std::to_string(c.packed) + " heads a tile";
  bool ragged = !c.starts.empty();
  int32_t stored = ragged ? c.starts.back() : c.seqlen, batch = ragged ? 1 : c.batch;
  Layout layout(batch, stored, c.heads, c.head_dim, heads_first);
  std::vector<uint16_t> words = random_words(layout.elements, name);
  OnGpu<uint16_t> q(words);
  AttentionParams p = dense_params(c.batch, c.seqlen, c.heads, c.heads / c.packed, c.head_dim, 8);
  p.q = q.data() + layout.start;
  p.q_strides = layout.strides;
  int32_t cu_seqlens = 0;  // looked at for nullptr alone
  if (ragged) {
    p.cu_seqlens_q = &cu_seqlens;
    p.total_q = stored;
    p.q_strides.batch = 0;
  }
  int tokens = c.rows / c.packed;
  std::vector<Box> boxes;
  std::vector<std::array<int32_t, 3>> origins;  // batch, group, token
  for (int32_t b = 0; b < c.batch; ++b)
    for (int32_t group = 0; group < c.heads / c.packed; ++group)
      for (int32_t first = 0; first < c.seqlen; first += tokens) {
        int32_t token = (ragged ? c.starts[b] : 0) + first;
        origins.push_back({ragged ? 0 : b, group, token});
        for (int panel = 0; panel < c.panels; ++panel)
          boxes.push_back({panel * c.rows * 128, {panel * 64, 0, token, group, ragged ? 0 : b}});
      }
  Tiles tiles(origins.size(), c.rows, c.panels);
  launch_boxes(query_map(p, c.packed, tokens), boxes, c.panels, tiles);
  tiles.fetch(name);
  for (size_t i = 0; i < origins.size(); ++i) {
    auto [b, group, first] = origins[i];
    tiles.check(name, i, [&](int row, int column) -> uint16_t {
      int32_t token = first + row / c.packed, head = group * c.packed + row % c.packed;
      if (token >= stored || column >= c.head_dim) return 0;
      return words[layout.at(b, token, head, column)];
    });
  }
}

CUDA_TEST(sm90_query_maps_bring_heads_of_a_group_as_rows) {
  require_hopper();
  for (bool heads_first : {false, true}) {
    check_queries({2, 150, 3, 40, 1, 192, 1, {}}, heads_first);
    check_queries({2, 37, 8, 72, 2, 128, 4, {}}, heads_first);
    check_queries({1, 5, 64, 128, 2, 128, 64, {}}, heads_first);
    check_queries({3, 33, 16, 200, 4, 128, 8, {}}, heads_first);
    check_queries({1, 1, 1, 8, 1, 128, 1, {}}, heads_first);
    check_queries({3, 100, 4, 120, 2, 128, 1, {0, 37, 37, 140}}, heads_first);
    check_queries({2, 90, 6, 136, 3, 128, 2, {11, 80, 91}}, heads_first);
  }
}

// ---- K and V as rows

// A block loads a tile of the keys of one query head: grid (tiles, heads, batch).
template <int kRows, int kPanels>
__global__ void load_rows(const __grid_constant__ TensorMap map,
                          const __grid_constant__ AttentionParams p,
                          const __grid_constant__ Sm90Schedule s, uint16_t* out, int* late) {
  using KeyBox = RowBox<kRows, kPanels>;
  __shared__ alignas(8) uint64_t barrier;
  SharedTile tile(&barrier, KeyBox::kBytes / 2);
  tile.poison();
  if (threadIdx.x == 0) {
    Sm90Work w{};
    w.batch = blockIdx.z;
    w.head = blockIdx.y;
    w.keys = key_span(p, w.batch);
    const KeyBox box(p, Sm90Keys(p, s, w), s, 0, blockIdx.x * kRows, 0);
    barrier_arrive_expect(tile.full, KeyBox::kBytes);
    box.load(map, smem_address(tile.data), tile.full);
  }
  int64_t index = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  tile.take(0, out + index * (tile.elements + 2 * kGuard), late);
}

struct KeyCase {
  int32_t batch, seqlen, heads_q, heads_kv, columns;
  std::vector<int32_t> cu_seqlens;  // ragged
  int32_t total;                    // rows in memory of a ragged batch
};

template <int kRows, int kPanels>
void check_keys(const KeyCase& c, bool heads_first) {
  const std::string name = "keys of " + std::to_string(c.columns) + " columns, " +
                           std::to_string(kRows) + " rows a tile";
  bool ragged = !c.cu_seqlens.empty();
  int32_t stored = ragged ? c.total : c.seqlen;
  Layout layout(ragged ? 1 : c.batch, stored, c.heads_kv, c.columns, heads_first);
  std::vector<uint16_t> words = random_words(layout.elements, name);
  OnGpu<uint16_t> k(words);
  OnGpu<int32_t> cu_seqlens(c.cu_seqlens);
  AttentionParams p = dense_params(c.batch, c.seqlen, c.heads_q, c.heads_kv, c.columns, c.columns);
  p.k_strides = layout.strides;
  if (ragged) {
    p.cu_seqlens_kv = cu_seqlens.data();
    p.total_kv = stored;
    p.k_strides.batch = 0;
  }
  if (c.batch == 1 && !ragged) p.k_strides.batch = 99990001;  // means nothing
  if (c.heads_kv == 1) p.k_strides.head = 99990001;
  Sm90Schedule s = make_sm90_schedule(p, kWhole, {128, kRows, 2, 12});
  dim3 grid(ceil_div(c.seqlen, kRows), c.heads_q, c.batch);
  Tiles tiles(int64_t{grid.x} * grid.y * grid.z, kRows, kPanels);
  int smem_bytes = smem_bytes_of(tiles.elements);
  allow(load_rows<kRows, kPanels>, smem_bytes);
  load_rows<kRows, kPanels><<<grid, 128, smem_bytes>>>(
      key_map(p, k.data() + layout.start, p.k_strides, c.columns, kRows), p, s, tiles.memory.data(),
      tiles.late.data());
  tiles.fetch(name);
  for (int64_t index = 0; index < int64_t{grid.x} * grid.y * grid.z; ++index) {
    int64_t b = index / grid.x / grid.y, head = index / grid.x % grid.y / (c.heads_q / c.heads_kv);
    int64_t first = index % grid.x * kRows + (ragged ? c.cu_seqlens[b] : 0);
    tiles.check(name, index, [&](int row, int column) -> uint16_t {
      if (first + row >= stored || column >= c.columns) return 0;
      return words[layout.at(ragged ? 0 : b, first + row, head, column)];
    });
  }
}

CUDA_TEST(sm90_key_maps_bring_rows_and_zeros_past_the_tensor) {
  require_hopper();
  for (bool heads_first : {false, true}) {
    check_keys<128, 1>({2, 150, 6, 3, 40, {}, 0}, heads_first);
    check_keys<160, 2>({3, 170, 4, 2, 72, {0, 37, 37, 190}, 200}, heads_first);
    check_keys<80, 4>({2, 81, 2, 2, 200, {}, 0}, heads_first);
    check_keys<80, 4>({1, 79, 4, 1, 8, {}, 0}, heads_first);  // three panels outside
    check_keys<96, 3>({2, 300, 2, 1, 192, {5, 200, 201}, 201}, heads_first);
    check_keys<32, 1>({1, 1, 1, 1, 64, {}, 0}, heads_first);
  }
}

// What is the same in the cache of maps but for one number must not be taken for it.
CUDA_TEST(sm90_tensor_maps_of_one_base_are_told_apart) {
  require_hopper();
  constexpr int kRows = 64;
  std::vector<uint16_t> words = random_words(2 * kRows * 128, "one base");
  OnGpu<uint16_t> memory(words);
  for (int round = 0; round < 2; ++round)
    for (int64_t heads : {1, 2})
      for (int64_t head_stride : {64, 64 * kRows})
        for (DType dtype : {DType::bf16, DType::f16}) {
          Tiles tiles(1, kRows, 1);
          launch_boxes(tensor_map(dtype, memory.data(), {64, kRows, heads, 1, 1},
                                  {128, head_stride, 0, 0}, {64, kRows, 1, 1, 1}),
                       {{0, {0, 0, 1, 0, 0}}}, 1, tiles);
          tiles.fetch("one base");
          tiles.check("one base", 0, [&](int row, int column) -> uint16_t {
            return heads == 1 ? 0 : words[row * 128 + head_stride + column];
          });
        }
}

// ---- a bias

struct BiasCase {
  int32_t batch, seqlen_q, seqlen_kv, heads, tile_n;
  bool per_head, per_batch;
};

void check_bias(const BiasCase& c) {
  constexpr int kRows = 128;
  const std::string name =
      "bias of " + std::to_string(c.seqlen_q) + " x " + std::to_string(c.seqlen_kv) + " keys";
  int64_t row = (c.seqlen_kv + 7) / 8 * 8 + 8, head = c.seqlen_q * row + 8;
  int64_t start = 24, batch = c.heads * head + 16;
  std::vector<uint16_t> words = random_words(start + c.batch * batch, name);
  OnGpu<uint16_t> bias(words);
  AttentionParams p = dense_params(c.batch, c.seqlen_q, c.heads, c.heads, 64, 64);
  p.seqlen_kv = c.seqlen_kv;
  p.scores.bias = bias.data() + start;
  p.scores.bias_dtype = p.dtype;
  p.scores.bias_stride_kv = 1;
  p.scores.bias_stride_q = row;
  p.scores.bias_stride_head = c.per_head ? head : 0;
  p.scores.bias_stride_batch = c.per_batch ? batch : 0;
  CHECK(has_bias_map(p), name);
  Sm90Schedule s = make_sm90_schedule(p, kWhole, {kRows, c.tile_n, 2, 12});
  int panels = ceil_div(c.tile_n, 64);
  std::vector<Box> boxes;
  std::vector<std::array<int32_t, 4>> origins;  // batch, head, token, key
  for (int32_t b = 0; b < c.batch; ++b)
    for (int32_t h = 0; h < c.heads; ++h)
      for (int32_t token = 0; token < c.seqlen_q; token += kRows)
        for (int32_t key = 0; key < c.seqlen_kv; key += c.tile_n) {
          origins.push_back({b, h, token, key});
          for (int group = 0; group < kRows / 64; ++group)
            for (int panel = 0; panel < panels; ++panel)
              boxes.push_back({(panel * kRows + group * 64) * 128,
                               {key + panel * 64, token + group * 64, h * s.bias_heads,
                                b * s.bias_batches, 0}});
        }
  Tiles tiles(origins.size(), kRows, panels);
  launch_boxes(bias_map(p), boxes, kRows / 64 * panels, tiles);
  tiles.fetch(name);
  for (size_t i = 0; i < origins.size(); ++i) {
    auto [b, h, token, key] = origins[i];
    tiles.check(name, i, [&](int at_row, int column) -> uint16_t {
      if (token + at_row >= c.seqlen_q || key + column >= c.seqlen_kv) return 0;
      return words[start + b * p.scores.bias_stride_batch + h * p.scores.bias_stride_head +
                   (token + at_row) * row + key + column];
    });
  }
}

CUDA_TEST(sm90_bias_maps_bring_tiles_of_scores) {
  require_hopper();
  check_bias({2, 130, 200, 2, 128, true, true});
  check_bias({2, 64, 131, 3, 96, true, false});
  check_bias({2, 33, 65, 2, 80, false, true});
  check_bias({2, 1, 1, 2, 128, false, false});
}

// ---- O

CUATTN_HOST_DEVICE int output_value(int b, int token, int head, int column) {
  return (token * 31 + head * 17 + column * 7 + b * 5) % 201 - 100;  // exact in 16 bits
}

// What becomes of a box that reaches past the sequence: it is left out, or clipped by the map, or its
// rows leave one by one, as a functor's kernel stores them.
enum class Beyond { nothing, box, rows };

// Four warps store 64 rows of one head, from accumulators: grid (tiles, heads, batch).
template <DType kType, int kHeadDimV>
__global__ void store_output(const __grid_constant__ AttentionParams p,
                             const __grid_constant__ Sm90Maps maps, Beyond beyond) {
  constexpr int kRows = 64;
  using Store = StoreSm90<kType, ScoreKind::identity, kHeadDimV, kRows, true, true>;
  uint32_t tile = smem_address(aligned_smem());
  int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  Sm90Work w{};
  w.batch = blockIdx.z;
  w.head = blockIdx.y;
  w.queries = query_span(p, w.batch);
  int32_t first_row = blockIdx.x * kRows + warp_row;
  const bool reaches_past = first_row + 16 > w.queries.stored;
  if (beyond == Beyond::nothing && reaches_past) return;
  float out[Store::kOutCount];
#pragma unroll
  for (int i = 0; i < Store::kOutCount; ++i) {
    int32_t token = static_cast<int32_t>(w.queries.start) + first_row + lane / 4 + i / 2 % 2 * 8;
    out[i] =
        static_cast<float>(output_value(w.batch, token, w.head, i / 4 * 8 + lane % 4 * 2 + i % 2));
  }
  const typename Store::RowEnd end[2] = {{1.0f, 0.0f, true}, {1.0f, 0.0f, true}};
  if (beyond == Beyond::rows && reaches_past) {
    Sm90Schedule s{};
    s.packed = s.splits = 1;
    for (int half = 0; half < 2; ++half)
      Store::store_row(p, s, w, Sm90Row(p, s, w, first_row + half * 8 + lane / 4), half, out, 1.0f);
    return;
  }
  Store::store_boxes(p, maps, w, first_row, out, end, tile + warp_row * 128);
  if (lane == 0) tma_store_wait_read<0>();
}

struct OutputCase {
  int32_t batch, seqlen, heads, columns;
  int32_t begin;  // >= 0: one sequence of a ragged batch, whose first row it is
};

template <DType kType, int kHeadDimV>
void check_output(const OutputCase& c, bool heads_first, Beyond beyond) {
  const std::string name = "output of " + std::to_string(c.columns) + " columns";
  bool ragged = c.begin >= 0;
  int32_t stored = ragged ? c.begin + c.seqlen : c.seqlen;
  Layout layout(c.batch, stored, c.heads, c.columns, heads_first);
  std::vector<uint16_t> want(layout.elements, kPoison);
  OnGpu<uint16_t> target(want);
  OnGpu<int32_t> cu_seqlens(std::vector<int32_t>{c.begin, stored});
  AttentionParams p = dense_params(c.batch, c.seqlen, c.heads, c.heads, c.columns, c.columns);
  p.dtype = kType;
  p.out = target.data() + layout.start;
  p.out_strides = layout.strides;
  if (ragged) {
    p.cu_seqlens_q = cu_seqlens.data();
    p.total_q = stored;
    p.out_strides.batch = 0;
  }
  Sm90Maps maps{};
  maps.o = output_map(p);
  int smem_bytes = tile_bytes(64, ceil_div(kHeadDimV, 64)) + kAlignment;
  allow(store_output<kType, kHeadDimV>, smem_bytes);
  dim3 grid(ceil_div(c.seqlen, 64), c.heads, c.batch);
  store_output<kType, kHeadDimV><<<grid, 128, smem_bytes>>>(p, maps, beyond);
  std::vector<uint16_t> seen = target.host();
  int begin = stored - c.seqlen, written = c.seqlen;
  if (beyond == Beyond::nothing) written -= c.seqlen % 16;
  for (int b = 0; b < c.batch; ++b)
    for (int token = begin; token < begin + written; ++token)
      for (int head = 0; head < c.heads; ++head)
        for (int column = 0; column < c.columns; ++column) {
          float value = static_cast<float>(output_value(b, token, head, column));
          want[layout.at(b, token, head, column)] =
              kType == DType::f16 ? f16_bits(value) : bf16_bits(value);
        }
  for (size_t i = 0; i < want.size(); ++i)
    CHECK(seen[i] == want[i], name, ": element ", i, " of memory is ", seen[i], " instead of ",
          want[i]);
}

CUDA_TEST(sm90_output_maps_write_their_rows_and_nothing_beside_them) {
  require_hopper();
  for (bool heads_first : {false, true})
    for (Beyond beyond : {Beyond::nothing, Beyond::box, Beyond::rows}) {
      check_output<DType::bf16, 64>({2, 150, 3, 40, -1}, heads_first, beyond);
      check_output<DType::f16, 128>({2, 65, 2, 72, -1}, heads_first, beyond);
      check_output<DType::bf16, 192>({1, 16, 1, 192, -1}, heads_first, beyond);
      check_output<DType::bf16, 256>({2, 33, 2, 200, -1}, heads_first, beyond);
      check_output<DType::f16, 256>({1, 90, 2, 8, -1}, heads_first, beyond);  // 3 panels outside
      check_output<DType::bf16, 128>({1, 70, 2, 120, 37}, heads_first, beyond);
    }
}

}  // namespace
}  // namespace cuattn::test
