// SPDX-License-Identifier: Apache-2.0
// What float8.cuh adds to Hopper's primitives, against host models: wgmma of e4m3 by one-hot rows,
// keys in fours and values by columns as their boxes bring them, rows of values that become columns, and the
// columns that are kept.
// Compiled for 90a alone, skipped on other devices.
#include <string>
#include <utility>
#include <vector>

#include "cuattn/device/wgmma_float8_sm90.cuh"
#include "cuda/attention/sm90/float8_maps.cuh"
#include "sm90.cuh"
#include "suite.h"
#include "tma_tiles.cuh"

namespace cuattn::test {
namespace {

using namespace cuattn::device;  // NOLINT: as in test_device_sm90.cu

constexpr int kDepth = 128, kRows = 64;  // of the reduction: one panel; of a warpgroup

// The place of byte `column` of a row in a panel of 128 bytes.
CUATTN_HOST_DEVICE int byte_at(int row, int column) {
  return row * 128 + (((column >> 4) ^ (row & 7)) << 4) + column % 16;
}
CUATTN_HOST_DEVICE int hot(int row, int shift) { return (row * 5 + shift) % kDepth; }
// What B holds, in numbers that e4m3 has: a digit of k or n in base 16.
CUATTN_HOST_DEVICE int digit(int kind, int k, int n) {
  return (kind < 2 ? k : n) >> (kind % 2 * 4) & 15;
}

template <int kColumns, bool kFromRegisters>
__global__ void __launch_bounds__(128, 1) multiply_hot(int kind, float* out) {
  auto* a_tile = reinterpret_cast<uint8_t*>(aligned_smem());
  uint8_t* b_tile = a_tile + kRows * 128;
  auto bits = [](int value) { return from_float<E4m3>(static_cast<float>(value)).bits; };
  for (int i = threadIdx.x; i < kRows * 128; i += 128)
    a_tile[byte_at(i / 128, i % 128)] = bits(i % 128 == hot(i / 128, blockIdx.x));
  for (int i = threadIdx.x; i < kColumns * 128; i += 128)
    b_tile[byte_at(i / 128, i % 128)] = bits(digit(kind, i % 128, i / 128));
  async_proxy_fence();
  __syncthreads();
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, q = lane % 4;
  uint64_t a_desc = wgmma_descriptor(smem_address(a_tile), 0);
  uint64_t b_desc = wgmma_descriptor(smem_address(b_tile), 0);
  float d[kColumns / 2];
  for (float& value : d) value = 12345.0f;
#pragma unroll
  for (int step = 0; step < kDepth / 32; ++step) {
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
      int k = step * 32 + i / 2 * 16 + 4 * q, one = hot(row + i % 2 * 8, blockIdx.x);
      a[i] = pack2_e4m3(k == one, k + 1 == one) | uint32_t{pack2_e4m3(k + 2 == one, k + 3 == one)}
                                                      << 16;
    }
    pin(d);
    pin(a);
    wgmma_fence();
    if constexpr (kFromRegisters) {
      Wgmma<DType::e4m3, kColumns>::rs(d, a, advance(b_desc, step * 32), step > 0);
    } else {
      Wgmma<DType::e4m3, kColumns>::ss(d, advance(a_desc, step * 32), advance(b_desc, step * 32),
                                       step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(d);
    pin(a);
  }
  float* tile = out + int64_t{blockIdx.x} * kRows * kColumns;
  for (int i = 0; i < kColumns / 2; ++i)
    tile[(row + i / 2 % 2 * 8) * kColumns + i / 4 * 8 + 2 * q + i % 2] = d[i];
}

template <int kColumns, bool kFromRegisters>
void check_products() {
  constexpr int kBytes = (kRows + kColumns) * 128 + kAlignment;
  allow(multiply_hot<kColumns, kFromRegisters>, kBytes);
  for (int kind = 0; kind < 4; ++kind) {
    OnGpu<float> found(size_t{kDepth} * kRows * kColumns);
    multiply_hot<kColumns, kFromRegisters><<<kDepth, 128, kBytes>>>(kind, found.data());
    std::vector<float> values = found.host();
    for (size_t at = 0; at < values.size(); ++at) {
      int n = static_cast<int>(at % kColumns), row = static_cast<int>(at / kColumns % kRows);
      int shift = static_cast<int>(at / kColumns / kRows);
      int want = digit(kind, hot(row, shift), n);
      CHECK(values[at] == want, "N = ", kColumns, kFromRegisters ? " rs" : " ss", ": D(", row, ", ",
            n, ") is ", values[at], " instead of ", want);
    }
  }
}

CUDA_TEST(sm90_wgmma_multiplies_float8) {
  require_hopper();
  check_products<64, false>();
  check_products<64, true>();
  check_products<128, false>();
  check_products<128, true>();
}

// ---- K in fours, V by columns: a tile of 128 keys from key `start` of a head on

__global__ void load_float8(const __grid_constant__ Float8Maps maps, int start, int head, int batch,
                            bool values, int begin, int end, uint8_t* out) {
  __shared__ alignas(8) uint64_t full;
  auto* tile = reinterpret_cast<uint8_t*>(aligned_smem());
  uint32_t smem = smem_address(tile), barrier = smem_address(&full);
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(barrier, 128 * 128);
    if (values) {
      tma_load(smem, &maps.v, barrier, start, 0, head, batch, 0, kEvictNormal);
    } else {
      for (int half = 0; half < 2; ++half)
        tma_load(smem + half * 64 * 128, &maps.fours, barrier, 0, 2 * half, start / 4, head, batch,
                 kEvictNormal);
    }
  }
  __syncthreads();
  barrier_wait(barrier, 0);
  if (begin > 0 || end < 128) keep_columns<128, 1, 128 * 128>(smem, begin, end, 0);
  __syncthreads();
  for (int i = threadIdx.x; i < 128 * 128; i += 128) out[i] = tile[byte_at(i / 128, i % 128)];
}

CUDA_TEST(sm90_float8_maps_bring_keys_in_fours_and_values_by_columns) {
  require_hopper();
  constexpr int kKeys = 403, kPadded = 416, kHeads = 3, kDim = 96;
  Random random(case_seed("float8 maps"));
  std::vector<uint8_t> bytes(size_t{2} * kPadded * kHeads * kDim);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next());
  OnGpu<uint8_t> memory(bytes), out(size_t{128} * 128);
  AttentionParams p = dense_params(2, kKeys, kHeads, kHeads, kDim, kDim);
  p.dtype = DType::e4m3;
  p.q = p.k = p.v = memory.data();
  p.q_strides = p.k_strides = {int64_t{kPadded} * kHeads * kDim, kHeads * kDim, kDim};
  p.v_strides = {int64_t{kPadded} * kHeads * kDim, 1, int64_t{kDim} * kPadded};
  p.v_channel_stride = kPadded;
  Sm90Schedule s{};
  s.packed = 1;
  Float8Maps maps = make_float8_maps(p, s, {128, 128, 4, 12}, 128, false, false);
  constexpr int kBytes = 128 * 128 + kAlignment;
  allow(load_float8, kBytes);
  for (int start : {0, 16, 112, 272, 384}) {
    for (bool values : {false, true}) {
      int begin = values && start == 112 ? 7 : 0, end = values && start >= 112 ? 53 : 128;
      if (!values && start + 128 > kKeys) continue;  // the last tile comes as rows
      load_float8<<<1, 128, kBytes>>>(maps, start, 2, 1, values, begin, end, out.data());
      std::vector<uint8_t> found = out.host();
      for (int i = 0; i < 128 * 128; ++i) {
        int row = i / 128, column = i % 128, half = row / 64, pair = row % 64;
        int key = start + (values ? column : pair / 2 * 4 + half * 2 + pair % 2);
        int channel = values ? row : column;
        const Strides& strides = values ? p.v_strides : p.k_strides;
        int64_t at = strides.batch + key * strides.seq + 2 * strides.head +
                     channel * (values ? p.v_channel_stride : 1);
        bool exists =
            key < kKeys && channel < kDim && !(values && (column < begin || column >= end));
        int want = exists ? bytes[at] : 0;
        CHECK(found[i] == want, values ? "values" : "keys", " from ", start, ": (", row, ", ",
              column, ") is ", int{found[i]}, " instead of ", want);
      }
    }
  }
}

// ---- Rows of V that become columns

constexpr int kTurnedPanel = 256 * 128;

// A tile of `keys` keys by two warps, 32 rows after the other, as the producer's do: two stages in turn, and
// the second of two tiles.
template <int kChannels>
__global__ void turn_tile(const __grid_constant__ Float8Maps maps, int start, int head, int keys,
                          int end, uint8_t* out) {
  constexpr int kPanels = (kChannels + 127) / 128, kRaw = kPanels * kTurnedRows * 128;
  __shared__ alignas(8) uint64_t full;
  auto* tile = reinterpret_cast<uint8_t*>(aligned_smem());
  const uint32_t smem = smem_address(tile), raw = smem + 2 * kTurnedPanel;
  const uint32_t barrier = smem_address(&full);
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
  }
  for (int i = threadIdx.x; i < 2 * kTurnedPanel; i += 64) tile[i] = 0x55;
  __syncthreads();
  const RowTurner<kChannels> turner(raw, smem);
  for (int at = 0; at < keys; at += kTurnedRows) {
    const int stage = at / kTurnedRows % 2 * kRaw;
    if (threadIdx.x == 0) {
      barrier_arrive_expect(barrier, kRaw);
      for (int panel = 0; panel < kPanels; ++panel) {
        tma_load(raw + stage + panel * kTurnedRows * 128, &maps.v, barrier, panel * 128, start + at,
                 head, 1, 0, kEvictLast);
      }
    }
    barrier_wait(barrier, at / kTurnedRows & 1);
    if (end - at >= kTurnedRows) {
      turner.template turn<false>(stage, kTurnedPanel, at, end - at);
    } else {
      turner.template turn<true>(stage, kTurnedPanel, at, end - at);
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < 2 * kTurnedPanel; i += 64) out[i] = tile[byte_at(i / 128, i % 128)];
}

template <int kChannels>
void check_turned(int dim) {
  constexpr int kKeys = 203, kHeads = 3;
  Random random(case_seed("turned rows"));
  std::vector<uint8_t> bytes(size_t{2} * kKeys * kHeads * dim);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next());
  OnGpu<uint8_t> memory(bytes), out(size_t{2} * kTurnedPanel);
  AttentionParams p = dense_params(2, kKeys, kHeads, kHeads, dim, dim);
  p.dtype = DType::e4m3;
  p.q = p.k = p.v = memory.data();
  p.q_strides = p.k_strides = p.v_strides = {int64_t{kKeys} * kHeads * dim, kHeads * dim, dim};
  p.v_channel_stride = 1;
  Sm90Schedule s{};
  s.packed = 1;
  Float8Maps maps = make_float8_maps(p, s, {128, 128, 2, 12}, kChannels, false, true);
  constexpr int kBytes = 2 * (kTurnedPanel + 2 * kTurnedRows * 128) + kAlignment;
  allow(turn_tile<kChannels>, kBytes);
  for (int start : {0, 7, 100, 150}) {
    for (auto [keys, end] : std::vector<std::pair<int, int>>{
             {128, 128}, {128, 97}, {96, 96}, {96, 80}, {128, 53}, {96, 32}, {128, 1}, {96, 0}}) {
      turn_tile<kChannels><<<1, 64, kBytes>>>(maps, start, 2, keys, end, out.data());
      std::vector<uint8_t> found = out.host();
      for (int i = 0; i < 2 * kTurnedPanel; ++i) {
        const int channel = i / 128 - 256, place = i % 128, four = place % 4;
        const int row = place / 16 * 16 + place % 16 / 4 * 2 + four % 2 + four / 2 * 8;
        const bool exists = row < end && start + row < kKeys && channel < dim;
        const int64_t at = p.v_strides.batch + (start + row) * p.v_strides.seq + 2 * dim + channel;
        const bool is_turned = channel >= 0 && channel < kChannels && place < keys;
        const int want = !is_turned ? 0x55 : exists ? bytes[at] : 0;
        CHECK(found[i] == want, dim, " channels, ", keys, " keys from ", start, " to ", end, ": (",
              channel, ", ", place, ") is ", int{found[i]}, " instead of ", want);
      }
    }
  }
}

CUDA_TEST(sm90_float8_rows_become_columns) {
  require_hopper();
  check_turned<64>(64);
  check_turned<64>(48);
  check_turned<128>(128);
  check_turned<128>(112);
  check_turned<256>(256);
  check_turned<256>(144);
}

// ---- Columns that are kept of V, in panels of 128 keys: two groups clear a tile together

// What stands at byte `at` of a tile; never 0.
CUATTN_HOST_DEVICE uint8_t filled(int at) { return static_cast<uint8_t>(1 + at % 251); }

template <int kChannels, int kPanels>
__global__ void keep_panels(int begin, int end, bool at_once, uint8_t* out) {
  constexpr int kPanelBytes = kChannels * 128, kBytes = kPanels * kPanelBytes;
  auto* tile = reinterpret_cast<uint8_t*>(aligned_smem());
  for (int i = threadIdx.x; i < kBytes; i += 256) tile[i] = filled(i);
  __syncthreads();
  for (int turn = 0; turn < 2; ++turn) {
    int group = threadIdx.x / 128;
    if (at_once ? turn == 0 : turn == group)
      keep_columns<kChannels, kPanels, kPanelBytes>(smem_address(tile), begin, end, group);
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kBytes; i += 256) out[i] = tile[i];
}

template <int kChannels, int kPanels>
void check_panels(bool at_once) {
  constexpr int kKeys = kPanels * 128, kTileBytes = kChannels * kKeys;
  OnGpu<uint8_t> out(size_t{kTileBytes});
  allow(keep_panels<kChannels, kPanels>, kTileBytes + kAlignment);
  const std::pair<int, int> ranges[] = {
      {0, kKeys},         {7, kKeys}, {0, kKeys - 5}, {0, 128},
      {128, kKeys},       {100, 140}, {127, 129},     {kKeys - 40, kKeys - 33},
      {kKeys - 1, kKeys}, {0, 1},     {16, 16}};
  for (auto [begin, end] : ranges) {
    keep_panels<kChannels, kPanels>
        <<<1, 256, kTileBytes + kAlignment>>>(begin, end, at_once, out.data());
    std::vector<uint8_t> found = out.host();
    for (int i = 0; i < kTileBytes; ++i) {
      int channel = i / kKeys, key = i % kKeys;
      int at = key / 128 * kChannels * 128 + byte_at(channel, key % 128);
      int want = key >= begin && key < end ? filled(at) : 0;
      CHECK(found[at] == want, kChannels, " x ", kKeys, ", kept ", begin, " to ", end, ": (",
            channel, ", ", key, ") is ", int{found[at]}, " instead of ", want);
    }
  }
}

void check_columns(bool at_once) {
  require_hopper();
  check_panels<128, 2>(at_once);  // as of a tile of 192 keys, which no kernel has
  check_panels<64, 3>(at_once);
  check_panels<256, 1>(at_once);
}

CUDA_TEST(sm90_columns_are_kept_by_one_group_after_the_other) { check_columns(false); }

// As the kernels do: both write the same bytes, and neither waits for the other.
CUDA_TEST(sm90_columns_are_kept_by_groups_at_once) { check_columns(true); }

}  // namespace
}  // namespace cuattn::test
