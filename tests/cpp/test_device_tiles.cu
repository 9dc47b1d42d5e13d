// SPDX-License-Identifier: Apache-2.0
// Primitives of include/cuattn/device on tiles, against a host model: the fragment maps by one-hot
// operands, zero fill of cp.async, the score functor, the swizzle and the ranges of key tiles.
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "cuattn/device/dropout.cuh"
#include "cuattn/device/mask.cuh"
#include "cuattn/device/mma_sm90.cuh"
#include "gpu.h"
#include "test.h"

namespace cuattn::test {
namespace {

using namespace cuattn::device;  // NOLINT: the file tests exactly this namespace

constexpr float kInfinity = std::numeric_limits<float>::infinity();

__global__ void transpose(uint32_t* out) {
  uint32_t at = threadIdx.x / 4 * 8 + threadIdx.x % 4 * 2;  // element (row, column) holds its index
  out[threadIdx.x] = movmatrix_trans(at | (at + 1) << 16);
}

CUDA_TEST(device_movmatrix_transposes_an_8_x_8_matrix) {
  OnGpu<uint32_t> out(size_t{32});
  transpose<<<1, 32>>>(out.data());
  std::vector<uint32_t> seen = out.host();
  for (uint32_t lane = 0; lane < 32; ++lane) {
    uint32_t g = lane / 4, q = lane % 4;
    CHECK(seen[lane] == ((2 * q * 8 + g) | ((2 * q + 1) * 8 + g) << 16), "lane ", lane);
  }
}

// Four 8 x 8 matrices whose element (matrix, row, column) holds its own index.
__global__ void load_matrices(uint32_t* straight, uint32_t* transposed) {
  __shared__ alignas(16) uint16_t tile[4 * 64];
  for (int i = threadIdx.x; i < 4 * 64; i += 32) tile[i] = static_cast<uint16_t>(i);
  __syncwarp();
  uint32_t address = smem_address(tile + threadIdx.x * 8), r[4];
  ldmatrix_x4(r, address);
  for (int i = 0; i < 4; ++i) straight[threadIdx.x * 4 + i] = r[i];
  ldmatrix_x4_trans(r, address);
  for (int i = 0; i < 4; ++i) transposed[threadIdx.x * 4 + i] = r[i];
}

CUDA_TEST(device_ldmatrix_gives_each_lane_its_fragment) {
  OnGpu<uint32_t> straight(size_t{128}), transposed(size_t{128});
  load_matrices<<<1, 32>>>(straight.data(), transposed.data());
  std::vector<uint32_t> rows = straight.host(), columns = transposed.host();
  for (uint32_t lane = 0; lane < 32; ++lane)
    for (uint32_t matrix = 0; matrix < 4; ++matrix) {
      uint32_t g = lane / 4, q = lane % 4, base = matrix * 64;
      uint32_t row = (base + g * 8 + 2 * q) | (base + g * 8 + 2 * q + 1) << 16;
      uint32_t column = (base + 2 * q * 8 + g) | (base + (2 * q + 1) * 8 + g) << 16;
      CHECK(rows[lane * 4 + matrix] == row, "lane ", lane, " matrix ", matrix);
      CHECK(columns[lane * 4 + matrix] == column, "trans: lane ", lane, " matrix ", matrix);
    }
}

// C = A B + C for `count` problems of 16 x 16 by 16 x 8, operands laid out by the fragment map of
// mma_sm80.cuh.
template <DType kType>
__global__ void multiply(const float* gA, const float* gB, float* gC, int count) {
  int g = threadIdx.x / 4, q = threadIdx.x % 4;
  for (int i = 0; i < count; ++i, gA += 256, gB += 128, gC += 128) {
    uint32_t a[4];
    for (int r = 0; r < 4; ++r) {
      const float* from = gA + (g + 8 * (r & 1)) * 16 + 2 * q + 8 * (r >> 1);
      a[r] = pack2<kType>(from[0], from[1]);
    }
    const float* b = gB + 2 * q * 8 + g;
    float c[4];
    for (int r = 0; r < 4; ++r) c[r] = gC[(g + 8 * (r >> 1)) * 8 + 2 * q + (r & 1)];
    mma_m16n8k16<kType>(c, a, pack2<kType>(b[0], b[8]), pack2<kType>(b[64], b[72]));
    for (int r = 0; r < 4; ++r) gC[(g + 8 * (r >> 1)) * 8 + 2 * q + (r & 1)] = c[r];
  }
}

template <DType kType>
void check_mma() {
  // Problem (m, k): A has a single one there, so row m of C must become row k of B and every other
  // row stay.
  Random random(case_seed("mma"));
  std::vector<float> a(256 * 256, 0.0f), b(256 * 128), c(256 * 128);
  for (int i = 0; i < 256; ++i) a[i * 256 + i] = 1.0f;
  for (float& value : b) value = static_cast<float>(random.range(-128, 128));
  for (float& value : c) value = static_cast<float>(random.range(-1000, 1000));
  OnGpu<float> gA(a), gB(b), gC(c);
  multiply<kType><<<1, 32>>>(gA.data(), gB.data(), gC.data(), 256);
  std::vector<float> seen = gC.host();
  for (int i = 0; i < 256; ++i)
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 8; ++n) {
        float want = c[i * 128 + m * 8 + n] + (m == i / 16 ? b[i * 128 + i % 16 * 8 + n] : 0.0f);
        CHECK(seen[i * 128 + m * 8 + n] == want, "A one at (", i / 16, ", ", i % 16, "), C at (", m,
              ", ", n, ")");
      }
}

CUDA_TEST(device_mma_maps_float16_fragments) { check_mma<DType::f16>(); }
CUDA_TEST(device_mma_maps_bfloat16_fragments) { check_mma<DType::bf16>(); }

__global__ void copy_async(const uint4* in, uint4* out) {
  __shared__ alignas(16) uint4 tile[96];
  int i = threadIdx.x;
  for (int j = i; j < 96; j += 32) tile[j] = uint4{7, 7, 7, 7};
  __syncthreads();
  cp_async16(smem_address(tile + i), in + i);
  cp_async_commit();
  cp_async16(smem_address(tile + 32 + i), in + 32 + i, i % 2 == 0);
  cp_async_commit();
  cp_async_wait<1>();  // the first group is complete for this thread, the second may be under way
  out[i] = tile[i];
  cp_async_wait<0>();
  __syncthreads();
  for (int j = i; j < 96; j += 32) out[j] = tile[j];
}

CUDA_TEST(device_cp_async_copies_or_writes_zeros) {
  std::vector<uint32_t> source(64 * 4);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint32_t>(1000 + i);
  OnGpu<uint32_t> in(source), out(size_t{96 * 4});
  copy_async<<<1, 32>>>(reinterpret_cast<const uint4*>(in.data()),
                        reinterpret_cast<uint4*>(out.data()));
  std::vector<uint32_t> seen = out.host();
  for (uint32_t i = 0; i < 96 * 4; ++i) {
    uint32_t chunk = i / 4, want = chunk < 32       ? 1000 + i
                                   : chunk >= 64    ? 7
                                   : chunk % 2 == 0 ? 1000 + i
                                                    : 0;
    CHECK(seen[i] == want, "word ", i, " is ", seen[i], " instead of ", want);
  }
}

__global__ void copy_async8(const uint2* in, uint2* out) {
  __shared__ alignas(16) uint2 tile[32];
  tile[threadIdx.x] = {7, 7};
  __syncwarp();
  cp_async8(smem_address(tile + threadIdx.x), in + threadIdx.x, threadIdx.x % 3 != 0);
  cp_async_commit();
  cp_async_wait<0>();
  out[threadIdx.x] = tile[threadIdx.x];
}

CUDA_TEST(device_cp_async_of_8_bytes_copies_or_writes_zeros) {
  std::vector<uint32_t> source(64);
  for (uint32_t i = 0; i < 64; ++i) source[i] = 1000 + i;
  OnGpu<uint32_t> in(source), out(size_t{64});
  copy_async8<<<1, 32>>>(reinterpret_cast<const uint2*>(in.data()),
                         reinterpret_cast<uint2*>(out.data()));
  std::vector<uint32_t> seen = out.host();
  for (uint32_t i = 0; i < 64; ++i)
    CHECK(seen[i] == (i / 2 % 3 != 0 ? 1000 + i : 0), "word ", i, " is ", seen[i]);
}

template <DType kType>
__global__ void score(AttentionParams p, const float* dots, float* out) {
  ScoreMod<kType, ScoreKind::scored> mod(p, 1, 2, p.seqlen_q, p.seqlen_kv);
  ScoreMod<kType, ScoreKind::identity> identity(p, 1, 2, p.seqlen_q, p.seqlen_kv);
  int cells = p.seqlen_q * p.seqlen_kv;
  for (int i = threadIdx.x; i < cells; i += blockDim.x) {
    out[i] = mod(dots[i], i / p.seqlen_kv, i % p.seqlen_kv) * mod.to_log2;
    out[cells + i] = identity(dots[i], i / p.seqlen_kv, i % p.seqlen_kv) * identity.to_log2;
  }
}

CUDA_TEST(device_score_functor_caps_then_adds_alibi_then_bias) {
  constexpr int kQueries = 5, kKeys = 9, kHeads = 4, kCells = kQueries * kKeys;
  Random random(case_seed("score"));
  for (DType bias_type : {DType::f32, DType::bf16, DType::boolean}) {
    Array bias(bias_type, {2, kHeads, kQueries, kKeys});
    bias.for_each_offset([&](int64_t i) {
      bias.set(i, bias_type == DType::boolean ? i % 3 != 0 : random.normal());
    });
    std::vector<float> dots(kCells), slopes(2 * kHeads);
    for (float& dot : dots) dot = 20 * random.normal();
    for (float& slope : slopes) slope = random.normal();
    OnGpu<uint8_t> g_bias(bias.bytes());
    OnGpu<float> g_dots(dots), g_slopes(slopes), out(size_t{2 * kCells});
    AttentionParams p{};
    p.batch = 2, p.num_heads_q = kHeads, p.seqlen_q = kQueries, p.seqlen_kv = kKeys;
    p.scores.scale = 0.25f, p.scores.softcap = 3.0f,
    p.scores.inv_softcap = inverse_softcap(3.0f, 0.25f);
    p.scores.alibi_slopes = g_slopes.data(), p.scores.alibi_stride_batch = kHeads,
    p.scores.alibi_stride_head = 1;
    p.scores.bias = g_bias.data() + bias.guard_bytes(), p.scores.bias_dtype = bias_type;
    p.scores.bias_stride_batch = kHeads * kCells, p.scores.bias_stride_head = kCells,
    p.scores.bias_stride_q = kKeys, p.scores.bias_stride_kv = 1;
    score<DType::bf16><<<1, 32>>>(p, g_dots.data(), out.data());
    std::vector<float> seen = out.host();
    for (int i = 0; i < kCells; ++i) {
      int row = i / kKeys, key = i % kKeys;
      double want = 3 * std::tanh(0.25 * dots[i] / 3) -
                    slopes[kHeads + 2] * std::abs(row + kKeys - kQueries - key);
      float extra = bias.get((kHeads + 2) * kCells + i);
      if (bias_type != DType::boolean)
        want += extra;
      else if (extra == 0)
        want = -kInfinity;
      want *= 1.4426950408889634;
      CHECK(want == seen[i] || std::abs(want - seen[i]) < 2e-5, "cell ", i, ": ", seen[i],
            " instead of ", want);
      double plain = 0.25 * dots[i] * 1.4426950408889634;
      CHECK(std::abs(seen[kCells + i] - plain) < 1e-5 * std::max(1.0, std::abs(plain)),
            "identity, cell ", i);
    }
  }
}

template <int kRowBytes>
void check_swizzle() {
  std::set<uint32_t> offsets;
  constexpr uint32_t kChunks = kRowBytes / 16;
  for (uint32_t row = 0; row < 64; ++row)
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t at = swizzled<kRowBytes>(row, chunk);
      CHECK(at / kRowBytes == row && at % 16 == 0, "row ", row, " chunk ", chunk, " lands at ", at);
      CHECK(offsets.insert(at).second, "two chunks of ", kRowBytes, "-byte rows land at ", at);
    }
  for (uint32_t first = 0; first < 64; first += 8)
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t banks = 0;  // one bit per group of four banks
      for (uint32_t row = first; row < first + 8; ++row)
        banks |= 1u << (swizzled<kRowBytes>(row, chunk) / 16 % 8);
      CHECK(banks == 0xff, "ldmatrix of rows from ", first, ", chunk ", chunk, " of ", kRowBytes,
            " conflicts");
    }
}

// What a warp keeps of 16 rows and 32 keys from (row0, key0) on, then of 32 rows and 16 keys.
__global__ void draw_dropout(const __grid_constant__ AttentionParams p, int32_t b, int32_t head,
                             int32_t row0, int32_t key0, uint32_t* kept) {
  HeadDropout dropout(p, b, head);
  kept[threadIdx.x] = dropout.kept_of_rows(row0 + threadIdx.x / 4, key0);
  kept[32 + threadIdx.x] = dropout.kept_of_keys(row0, key0);
}

CUDA_TEST(device_dropout_keeps_what_the_rule_says_in_both_layouts) {
  AttentionParams p{};
  p.num_heads_q = 5;
  for (int32_t dropped : {1, 26, 128, 255}) {
    int32_t b = 3, head = 2, row0 = 1000 * dropped, key0 = 16 * dropped;
    p.dropout = {.seed = 0x123456789abcdefu + dropped,
                 .offset = 0xfffffff0u,
                 .dropped = dropped,
                 .first_row = 3u * dropped,
                 .first_key = 48,
                 .first_head = 7,
                 .num_heads = 9};
    OnGpu<uint32_t> kept(size_t{64});
    draw_dropout<<<1, 32>>>(p, b, head, row0, key0, kept.data());
    std::vector<uint32_t> seen = kept.host();
    for (int32_t lane = 0; lane < 32; ++lane)
      for (int32_t bit = 0; bit < 16; ++bit) {
        int32_t g = lane / 4, q = lane % 4, column = bit / 4 * 8 + 2 * q + bit % 2;
        int32_t across = g + bit / 2 % 2 * 8;
        bool of_rows = is_kept(p.dropout, 7 + b * 9 + head, row0 + across, key0 + column);
        bool of_keys = is_kept(p.dropout, 7 + b * 9 + head, row0 + column, key0 + across);
        CHECK((seen[lane] >> bit & 1) == of_rows, "lane ", lane, " bit ", bit);
        CHECK((seen[32 + lane] >> bit & 1) == of_keys, "transposed: lane ", lane, " bit ", bit);
      }
  }
}

TEST(swizzle_is_one_to_one_and_free_of_bank_conflicts) {
  check_swizzle<64>();
  check_swizzle<128>();
  check_swizzle<192>();
  check_swizzle<256>();
  check_swizzle<384>();
  check_swizzle<512>();
}

template <int kTileN>
void check_tile_range(int left, int right, int row_begin, int row_end, int queries, int keys) {
  TileRange range = tile_range<kTileN>(left, right, row_begin, row_end, queries, keys);
  auto sees = [&](int row, int key) {
    int64_t diagonal = static_cast<int64_t>(row) + keys - queries;
    return key < keys && (left < 0 || key >= diagonal - left) &&
           (right < 0 || key <= diagonal + right);
  };
  for (int tile = 0; tile <= keys / kTileN + 1; ++tile) {
    bool any = false, all = true;
    for (int row = row_begin; row < row_end; ++row)
      for (int key = tile * kTileN; key < (tile + 1) * kTileN; ++key) {
        any = any || sees(row, key);
        all = all && sees(row, key);
      }
    bool visited = tile >= range.begin && tile < range.end;
    bool unmasked = visited && tile >= range.full_begin && tile < range.full_end;
    CHECK(visited || !any, "tile ", tile, " is skipped: window ", left, ",", right, " rows ",
          row_begin, "..", row_end, " of ", queries, " keys ", keys);
    CHECK(!unmasked || all, "tile ", tile, " runs unmasked: window ", left, ",", right, " rows ",
          row_begin, "..", row_end, " of ", queries, " keys ", keys);
    CHECK(unmasked || !all || row_end <= row_begin, "tile ", tile, " is masked in vain");
  }
}

TEST(tile_ranges_cover_what_is_visible_and_unmask_only_full_tiles) {
  Random random(case_seed("tile_range"));
  for (int i = 0; i < 3000; ++i) {
    int queries = random.range(1, 200), keys = random.range(0, 200);
    int row_begin = random.range(0, queries),
        row_end = random.range(row_begin, std::min(queries, row_begin + 64));
    int left = random.chance(0.5) ? -1 : random.range(0, 150),
        right = random.chance(0.5) ? -1 : random.range(0, 100);
    if (i % 3 == 0) left = -1, right = 0;
    if (i % 2 == 0)
      check_tile_range<16>(left, right, row_begin, row_end, queries, keys);
    else
      check_tile_range<64>(left, right, row_begin, row_end, queries, keys);
  }
}

// Splits follow one another and are all of the range; those of a fixed length begin at multiples of it.
TEST(splits_of_a_range_are_its_tiles_in_order) {
  Random random(case_seed("split_of"));
  for (int i = 0; i < 3000; ++i) {
    int begin = random.range(0, 60), end = random.range(begin, 90), length = random.range(0, 12);
    int most = length > 0 ? 90 / length + 1 : random.range(1, 100), at = begin;
    for (int split = 0; split < most; ++split) {
      TileRange part = split_of({begin, end, 3, 40}, split, most, length);
      CHECK(part.full_begin == 3 && part.full_end == 40);
      if (part.begin >= part.end) continue;
      CHECK(part.begin == at, "split ", split, " of ", begin, "..", end);
      CHECK(length == 0 || (part.begin == begin || part.begin == split * length));
      CHECK(length == 0 || part.end == end || part.end == (split + 1) * length);
      CHECK(length > 0 || part.end - part.begin <= (end - begin) / most + 1);
      at = part.end;
    }
    CHECK(at == end, "the splits of ", begin, "..", end, " end at ", at);
  }
}

}  // namespace
}  // namespace cuattn::test
