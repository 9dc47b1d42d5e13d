// SPDX-License-Identifier: Apache-2.0
// Each primitive of mma_sm90.cuh and wgmma_sm90.cuh against a host model: wgmma operands by one-hot
// rows; a ring of mbarriers with register reallocation and named barriers; stmatrix to TMA store.
// Boxes of the TMA as kernels load them: test_tensor_maps.cu. Compiled for 90a alone
// (CMakeLists.txt), skipped on other devices.
#include <algorithm>
#include <vector>

#include "cuattn/device/wgmma_sm90.cuh"
#include "cuda/host/tensor_maps.h"
#include "sm90.cuh"
#include "suite.h"

namespace cuattn::test {
namespace {

using namespace cuattn::device;  // NOLINT: the file tests exactly this namespace

// Rows of `columns` elements that follow one another; a box is 64 x 64.
TensorMap rows_map(const void* data, int rows, int columns) {
  return tensor_map(DType::bf16, data, {columns, rows, 1, 1, 1}, {columns, 0, 0, 0},
                    {64, 64, 1, 1, 1});
}

// ---- wgmma

enum class Source { shared, registers };  // of A

constexpr int kDepth = 128;     // of the reduction: two panels of a K-major operand
constexpr int kGroupRows = 64;  // rows of a warpgroup

constexpr int one_hot_bytes(int columns) {
  int b_panels = (columns + kPanelColumns - 1) / kPanelColumns;
  int n_major = b_panels * kDepth, k_major = kDepth / kPanelColumns * columns;  // rows of 128 bytes
  return tile_bytes(kGroupRows, kDepth / kPanelColumns) + 128 * std::max(n_major, k_major);
}

// The column of row `row` that holds A's one in block `shift`: every (row, k) has its turn.
CUATTN_HOST_DEVICE int hot_column(int row, int shift) { return (row * 5 + shift) % kDepth; }

// D = A B + D0 with one-hot rows of A, B(k, n) = k (show_k) or n, D0 = 1000 on odd blocks and
// overwritten garbage on even ones. Each block is one A; out: [kDepth, 64, kColumns].
template <DType kType, int kColumns, Source kSource, int kTransB, int kTransA>
__global__ void __launch_bounds__(128, 1) multiply_one_hot(bool show_k, float* out) {
  uint16_t* sA = aligned_smem();
  uint16_t* sB = sA + kGroupRows * kDepth;
  auto bits = [](int value) { return from_float<Element<kType>>(static_cast<float>(value)).bits; };
  for (int i = threadIdx.x; i < kGroupRows * kDepth; i += 128) {
    int row = i / kDepth, k = i % kDepth;
    sA[kTransA ? panel_at(k, row, kDepth) : panel_at(row, k, kGroupRows)] =
        bits(k == hot_column(row, blockIdx.x));
  }
  for (int i = threadIdx.x; i < kColumns * kDepth; i += 128) {
    int n = i / kDepth, k = i % kDepth;
    sB[kTransB ? panel_at(k, n, kDepth) : panel_at(n, k, kColumns)] = bits(show_k ? k : n);
  }
  async_proxy_fence();
  __syncthreads();

  int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
  uint64_t a_desc = wgmma_descriptor(smem_address(sA), 0);
  uint64_t b_desc = wgmma_descriptor(smem_address(sB), kTransB ? kDepth * 128 : 0);
  int accumulate = blockIdx.x & 1;
  float d[kColumns / 2];
  for (float& value : d) value = accumulate ? 1000.0f : 12345.0f;
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    uint64_t b =
        advance(b_desc, kTransB ? step * 16 * 128 : step / 4 * kColumns * 128 + step % 4 * 32);
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
      int k = step * 16 + column + i / 2 * 8, hot = hot_column(row + i % 2 * 8, blockIdx.x);
      a[i] = pack2<kType>(k == hot, k + 1 == hot);
    }
    pin(d);
    pin(a);
    wgmma_fence();
    if constexpr (kSource == Source::registers) {
      Wgmma<kType, kColumns>::template rs<kTransB>(d, a, b, step > 0 || accumulate);
    } else {
      uint64_t a_step =
          advance(a_desc, kTransA ? step * 16 * 128 : step / 4 * kGroupRows * 128 + step % 4 * 32);
      Wgmma<kType, kColumns>::template ss<kTransB, kTransA>(d, a_step, b, step > 0 || accumulate);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(d);
    pin(a);
  }
  float* tile = out + int64_t{blockIdx.x} * kGroupRows * kColumns;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i)
    tile[(row + i / 2 % 2 * 8) * kColumns + i / 4 * 8 + column + i % 2] = d[i];
}

template <DType kType, int kColumns, Source kSource, int kTransB, int kTransA = 0>
void check_wgmma() {
  constexpr int kBytes = one_hot_bytes(kColumns) + kAlignment;
  auto kernel = multiply_one_hot<kType, kColumns, kSource, kTransB, kTransA>;
  allow(kernel, kBytes);
  OnGpu<float> show_k(size_t{kDepth} * kGroupRows * kColumns), show_n(show_k.count);
  kernel<<<kDepth, 128, kBytes>>>(true, show_k.data());
  kernel<<<kDepth, 128, kBytes>>>(false, show_n.data());
  std::vector<float> ks = show_k.host(), ns = show_n.host();
  for (int shift = 0; shift < kDepth; ++shift)
    for (int row = 0; row < kGroupRows; ++row)
      for (int n = 0; n < kColumns; ++n) {
        size_t at = (size_t{1} * shift * kGroupRows + row) * kColumns + n;
        float base = shift % 2 ? 1000.0f : 0.0f;
        CHECK(ks[at] == base + hot_column(row, shift) && ns[at] == base + n, "N = ", kColumns,
              kSource == Source::shared ? " ss" : " rs", " transposed ", kTransA, kTransB, ": D(",
              row, ", ", n, ") is B(", ks[at] - base, ", ", ns[at] - base, ") instead of B(",
              hot_column(row, shift), ", ", n, ")");
      }
}

// Both products of attention: Q K^T (ss, K-major) and P V (rs, MN-major).
template <DType kType, int... kColumns>
void check_both_products() {
  (check_wgmma<kType, kColumns, Source::shared, 0>(), ...);
  (check_wgmma<kType, kColumns, Source::registers, 1>(), ...);
}

CUDA_TEST(sm90_wgmma_reads_bfloat16_panels_and_maps_accumulators) {
  require_hopper();
  check_both_products<DType::bf16, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256>();
}

CUDA_TEST(sm90_wgmma_reads_float16_panels_and_maps_accumulators) {
  require_hopper();
  check_both_products<DType::f16, 64, 176, 256>();
}

CUDA_TEST(sm90_wgmma_takes_either_operand_order_from_either_place) {
  require_hopper();
  check_wgmma<DType::bf16, 128, Source::shared, 1>();
  check_wgmma<DType::bf16, 80, Source::shared, 1>();
  check_wgmma<DType::bf16, 256, Source::shared, 1>();
  check_wgmma<DType::bf16, 128, Source::registers, 0>();
  check_wgmma<DType::f16, 80, Source::registers, 0>();
}

// Paged attention: K Q^T, then V^T P^T with V as it lies in the cache.
template <DType kType, int... kColumns>
void check_swapped_products() {
  (check_wgmma<kType, kColumns, Source::shared, 0, 0>(), ...);
  (check_wgmma<kType, kColumns, Source::shared, 0, 1>(), ...);
}

CUDA_TEST(sm90_wgmma_multiplies_few_columns_by_either_order_of_a) {
  require_hopper();
  check_swapped_products<DType::bf16, 8, 16, 32, 64>();
  check_swapped_products<DType::f16, 8, 32>();
}

// ---- a ring of tiles between a producer and two consumer warpgroups

constexpr int kStages = 3, kLoads = 17;  // not a multiple: the phases of the stages differ
constexpr int kHeld = 160;               // registers that a consumer keeps across the ring

// Warp 0 loads kLoads boxes of 64 x 64 into the ring. Each consumer thread adds up 16 words of
// every tile; the warpgroups take turns and log whose it was. sums: [2, kLoads, 128].
__global__ void __launch_bounds__(384, 1)
    run_ring(const __grid_constant__ TensorMap map, const float* gHeld, uint32_t* sums,
             int32_t* turns, float* held_sums) {
  constexpr uint32_t kBoxBytes = tile_bytes(64, 1);
  uint16_t* sTiles = aligned_smem();
  __shared__ alignas(8) uint64_t barriers[2 * kStages];
  __shared__ int turn;
  auto full = [&](int stage) { return smem_address(&barriers[stage]); };
  auto empty = [&](int stage) { return smem_address(&barriers[kStages + stage]); };
  if (threadIdx.x == 0) {
    turn = 0;
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), 8);  // one lane of each consumer warp
    }
    barrier_init_fence();
  }
  __syncthreads();
  int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  int stage = 0;
  if (group < 0) {
    registers_shrink<24>();
    if (threadIdx.x >= 32 || !elect_one()) return;
    for (uint32_t i = 0, parity = 1; i < kLoads; ++i) {
      barrier_wait(empty(stage), parity);
      barrier_arrive_expect(full(stage), kBoxBytes);
      tma_load(smem_address(sTiles) + stage * kBoxBytes, &map, full(stage), 0, i * 64, 0, 0, 0,
               kEvictFirst);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    return;
  }
  registers_grow<240>();
  float held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) held[i] = gHeld[i * 256 + group * 128 + thread];
  if (group == 1) named_barrier_arrive(1, 256);  // group 0 begins
#pragma unroll 1
  for (uint32_t i = 0, parity = 0; i < kLoads; ++i) {
    pin(held);
    named_barrier_sync(1 + group, 256);
    if (thread == 0) turns[turn++] = group;
    __threadfence_block();
    if (group == 0 || i + 1 < kLoads) named_barrier_arrive(2 - group, 256);
    barrier_wait(full(stage), parity);
    const volatile uint32_t* tile =
        reinterpret_cast<const uint32_t*>(sTiles) + stage * kBoxBytes / 4;
    uint32_t sum = 0;
    for (int word = thread; word < static_cast<int>(kBoxBytes) / 4; word += 128)
      sum += tile[word] * (word + 1);
    sums[(group * kLoads + i) * 128 + thread] = sum;
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(empty(stage));
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  float total = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) total += held[i] * (i % 7 + 1);
  held_sums[group * 128 + thread] = total;
}

CUDA_TEST(sm90_ring_delivers_every_tile_in_turns_and_keeps_the_registers) {
  require_hopper();
  Random random(case_seed("ring"));
  std::vector<uint16_t> data(kLoads * 64 * 64);
  for (uint16_t& value : data) value = static_cast<uint16_t>(random.next());
  std::vector<float> held(kHeld * 256);
  for (float& value : held) value = static_cast<float>(random.range(-1000, 1000));
  OnGpu<uint16_t> source(data);
  OnGpu<float> g_held(held), g_held_sums(size_t{256});
  OnGpu<uint32_t> g_sums(size_t{2 * kLoads * 128});
  OnGpu<int32_t> g_turns(size_t{2 * kLoads});
  constexpr int kBytes = kStages * tile_bytes(64, 1) + kAlignment;
  allow(run_ring, kBytes);
  run_ring<<<1, 384, kBytes>>>(rows_map(source.data(), kLoads * 64, 64), g_held.data(),
                               g_sums.data(), g_turns.data(), g_held_sums.data());
  std::vector<uint32_t> sums = g_sums.host();
  std::vector<int32_t> turns = g_turns.host();
  std::vector<float> held_sums = g_held_sums.host();
  for (int i = 0; i < 2 * kLoads; ++i)
    CHECK(turns[i] == i % 2, "turn ", i, " was taken by group ", turns[i]);
  for (int i = 0; i < kLoads; ++i) {
    std::vector<uint16_t> image(64 * 64);
    for (int at = 0; at < 64 * 64; ++at)
      image[panel_at(at / 64, at % 64, 64)] = data[i * 64 * 64 + at];
    for (int thread = 0; thread < 128; ++thread) {
      uint32_t want = 0;
      for (uint32_t word = thread; word < 64 * 32; word += 128)
        want += (image[2 * word] | uint32_t{image[2 * word + 1]} << 16) * (word + 1);
      for (int group = 0; group < 2; ++group)
        CHECK(sums[(group * kLoads + i) * 128 + thread] == want, "tile ", i, ", group ", group,
              ", thread ", thread);
    }
  }
  for (int thread = 0; thread < 256; ++thread) {
    float want = 0;  // integers below 2^24: exact in any order
    for (int i = 0; i < kHeld; ++i) want += held[i * 256 + thread] * static_cast<float>(i % 7 + 1);
    CHECK(held_sums[thread] == want, "registers of thread ", thread, " add up to ",
          held_sums[thread], " instead of ", want);
  }
}

// ---- the way out: accumulators to shared memory to global

// Element (row, column) of a 64 x 128 tile is row * 128 + column, given as accumulator fragments.
__global__ void store_fragments(const __grid_constant__ TensorMap map) {
  uint32_t tile = smem_address(aligned_smem());
  int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  int local = warp_row + lane % 16;  // the row whose address this lane gives
  auto pair = [&](int row_offset, int column) -> uint32_t {
    uint32_t low = (warp_row + lane / 4 + row_offset) * 128 + column + lane % 4 * 2;
    return low | (low + 1) << 16;
  };
  for (int j = 0; j < 8; ++j) {
    uint32_t chunk = (j % 4 * 2 + lane / 16) ^ (local & 7);
    stmatrix_x4(tile + (j / 4 * 64 + local) * 128 + chunk * 16, pair(0, 16 * j), pair(8, 16 * j),
                pair(0, 16 * j + 8), pair(8, 16 * j + 8));
  }
  async_proxy_fence();
  named_barrier_sync(8, 128);
  if (threadIdx.x == 0) {
    for (int panel = 0; panel < 2; ++panel)
      tma_store(&map, tile + panel * 64 * 128, panel * 64, 0, 0, 0, 0);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}

CUDA_TEST(sm90_stmatrix_and_tma_store_give_fragments_back_as_rows) {
  require_hopper();
  OnGpu<uint16_t> out(size_t{64 * 128});
  constexpr int kBytes = tile_bytes(64, 2) + kAlignment;
  store_fragments<<<1, 128, kBytes>>>(rows_map(out.data(), 64, 128));
  std::vector<uint16_t> seen = out.host();
  for (int i = 0; i < 64 * 128; ++i)
    CHECK(seen[i] == i, "row ", i / 128, " column ", i % 128, " holds (", seen[i] / 128, ", ",
          seen[i] % 128, ")");
}

__global__ void elect(uint32_t* out) { out[threadIdx.x] = elect_one(); }

CUDA_TEST(sm90_elect_one_names_one_lane_of_each_warp) {
  require_hopper();
  OnGpu<uint32_t> out(size_t{128});
  elect<<<1, 128>>>(out.data());
  std::vector<uint32_t> seen = out.host();
  for (int warp = 0; warp < 4; ++warp) {
    uint32_t elected = 0;
    for (int lane = 0; lane < 32; ++lane) elected += seen[warp * 32 + lane];
    CHECK(elected == 1, "warp ", warp, " elected ", elected, " lanes");
  }
}

// ---- rings and barriers

// Stage and parity of rings of as many stages, known at compile time and at run time, or packed.
template <int kCount>
__global__ void walk_rings(int count, int steps, int first_parity, int* out) {
  Ring<kCount> fixed(first_parity);
  Ring counted(first_parity, count);
  PackedRing<kCount> packed(first_parity);
  for (int step = 0; step < steps; ++step) {
    int* to = out + 6 * step;
    to[0] = fixed.stage(), to[1] = static_cast<int>(fixed.parity());
    to[2] = counted.stage(), to[3] = static_cast<int>(counted.parity());
    to[4] = packed.stage(), to[5] = static_cast<int>(packed.parity());
    fixed.next(), counted.next(), packed.next();
  }
}

CUDA_TEST(sm90_rings_of_any_length_go_round_alike) {
  require_hopper();
  constexpr int kSteps = 25;
  auto check = [&](int count, auto* kernel) {
    for (int first : {0, 1}) {
      OnGpu<int> out(size_t{6 * kSteps});
      kernel<<<1, 1>>>(count, kSteps, first, out.data());
      std::vector<int> seen = out.host();
      for (int step = 0; step < kSteps; ++step) {
        int want[] = {step % count, first ^ step / count % 2};
        for (int i = 0; i < 6; ++i)
          CHECK(seen[6 * step + i] == want[i % 2], count, " stages, step ", step, ": ",
                seen[6 * step + i]);
      }
    }
  };
  check(2, walk_rings<2>), check(3, walk_rings<3>), check(4, walk_rings<4>);
  check(6, walk_rings<6>);
}

// In round r warp r alone, and of it one lane, has the predicate; in every fifth round nobody. A
// barrier of the same name stands between the rounds.
constexpr int kAnyRounds = 40, kAnyThreads = 128;
__global__ void __launch_bounds__(kAnyThreads + 32) meet_for_any(int* seen) {
  if (threadIdx.x >= kAnyThreads) return;  // no part of the barrier
  for (int round = 0; round < kAnyRounds; ++round) {
    bool mine = round % 5 != 4 && threadIdx.x == round % 4 * 32 + round * 7 % 32;
    seen[round * kAnyThreads + threadIdx.x] = named_barrier_any(1, kAnyThreads, mine);
    if (round % 3 == 0) named_barrier_sync(1, kAnyThreads);
  }
}

CUDA_TEST(sm90_named_barrier_tells_all_what_one_thread_has) {
  require_hopper();
  OnGpu<int> out(size_t{kAnyRounds * kAnyThreads});
  meet_for_any<<<1, kAnyThreads + 32>>>(out.data());
  std::vector<int> seen = out.host();
  for (size_t i = 0; i < seen.size(); ++i) {
    int round = static_cast<int>(i / kAnyThreads);
    CHECK(seen[i] == (round % 5 != 4), "round ", round, " thread ", i % kAnyThreads);
  }
}

// ---- clusters

constexpr int kBlocks = 8, kPairs = 64;

// Every block reads the pairs of all blocks, those of its own included.
__global__ void __cluster_dims__(kBlocks) read_cluster(float* out) {
  __shared__ __align__(8) float2 pairs[kPairs];
  const float mine = static_cast<float>(blockIdx.x * 2 * kPairs + 2 * threadIdx.x);
  pairs[threadIdx.x] = {mine, mine + 1};
  cluster_sync();
  uint32_t address = smem_address(&pairs[threadIdx.x]);
  float* to = out + (blockIdx.x * kPairs + threadIdx.x) * 3 * kBlocks;
  for (uint32_t rank = 0; rank < kBlocks; ++rank) {
    float2 pair = load_cluster2(in_block(address, rank));
    to[3 * rank] = pair.x;
    to[3 * rank + 1] = pair.y;
    to[3 * rank + 2] = load_cluster(in_block(address, rank) + 4);
  }
  cluster_sync();
}

CUDA_TEST(sm90_blocks_of_a_cluster_read_what_the_others_wrote) {
  require_hopper();
  constexpr int kClusters = 3;  // ranks begin anew in each
  OnGpu<float> out(size_t{kClusters * kBlocks * kPairs * 3 * kBlocks});
  read_cluster<<<kClusters * kBlocks, kPairs>>>(out.data());
  std::vector<float> seen = out.host();
  for (size_t i = 0; i < seen.size(); ++i) {
    int word = i % 3, rank = i / 3 % kBlocks, thread = i / (3 * kBlocks) % kPairs;
    int cluster = static_cast<int>(i / (3 * kBlocks * kPairs)) / kBlocks;
    int block = cluster * kBlocks + rank;
    float want = static_cast<float>(block * 2 * kPairs + 2 * thread + (word > 0));
    CHECK(seen[i] == want, "block ", block, " pair ", thread, " word ", word, ": ", seen[i]);
  }
}

}  // namespace
}  // namespace cuattn::test
