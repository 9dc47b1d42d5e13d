// SPDX-License-Identifier: Apache-2.0
// Tensors of odd sizes with gaps between their rows, and tiles that the TMA loads from them: a
// kernel copies out what came to shared memory and what lies around it, and the host compares each
// element. Next: test_tensor_maps.cu, test_page_maps.cu.
#pragma once

#include <string>
#include <vector>

#include "cuattn/schedule.h"
#include "sm90.cuh"

namespace cuattn::test {
namespace {  // each test file has its own kernels

using namespace cuattn::device;  // NOLINT: as in test_device_sm90.cu

// ---- tensors

// Strides of [batch, tokens, heads, columns]: rows that are not next to each other, the first one
// 48 bytes past a boundary of 256.
struct Layout {
  int64_t start = 24, elements = 0;
  Strides strides = {};

  Layout(int64_t batch, int64_t tokens, int64_t heads, int64_t columns, bool heads_first) {
    Strides& s = strides;
    int64_t row = columns + 8;
    if (heads_first) {
      s.seq = row;
      s.head = tokens * row + 16;
      s.batch = heads * s.head + 8;
    } else {
      s.head = row;
      s.seq = heads * row + 16;
      s.batch = tokens * s.seq + 8;
    }
    elements = start + batch * s.batch + 24;
  }
  int64_t at(int64_t b, int64_t token, int64_t head, int64_t column) const {
    return start + b * strides.batch + token * strides.seq + head * strides.head + column;
  }
};

// Random words: the TMA moves NaN like any other.
std::vector<uint16_t> random_words(int64_t count, const std::string& name) {
  Random random(case_seed(name));
  std::vector<uint16_t> words(count);
  for (uint16_t& word : words) word = static_cast<uint16_t>(random.next());
  return words;
}

AttentionParams dense_params(int32_t batch, int32_t seqlen, int32_t heads_q, int32_t heads_kv,
                             int32_t head_dim, int32_t head_dim_v) {
  AttentionParams p{};
  p.dtype = DType::bf16;
  p.batch = batch;
  p.num_heads_q = heads_q;
  p.num_heads_kv = heads_kv;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  p.seqlen_q = p.seqlen_kv = seqlen;
  p.total_q = p.total_kv = int64_t{batch} * seqlen;
  return p;
}

// Neither splits nor packed heads.
constexpr AttentionSchedule kWhole{{}, 1, 0, 0, 1, 0, false, nullptr};

// ---- tiles in shared memory

constexpr int kGuard = 512;  // elements before and behind a tile: kAlignment bytes
constexpr uint16_t kPoison = 0xeeee;
constexpr int smem_bytes_of(int elements) { return 2 * (elements + 2 * kGuard) + kAlignment; }

// True when the phase ended within two seconds: a wrong count of bytes fails, and does not hang.
__device__ bool phase_ends(uint32_t barrier, uint32_t parity) {
  auto clock = [] {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  };
  uint32_t done = 0;
  for (uint64_t begin = clock(); done == 0 && clock() - begin < 2'000'000'000;) {
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
  return done != 0;
}

// A tile between guards. All threads of a block call its functions.
struct SharedTile {
  uint16_t* data;
  int elements;
  uint32_t full;  // the barrier that counts its bytes

  __device__ SharedTile(uint64_t* barrier, int elements)
      : data(aligned_smem() + kGuard), elements(elements), full(smem_address(barrier)) {
    if (threadIdx.x == 0) {
      barrier_init(full, 1);
      barrier_init_fence();
    }
  }
  __device__ void poison() {
    for (int i = static_cast<int>(threadIdx.x) - kGuard; i < elements + kGuard; i += blockDim.x)
      data[i] = kPoison;
    async_proxy_fence();
    __syncthreads();
  }
  // Copies what came in the phase of `parity` to `out`, guards included; false: it never ended.
  __device__ bool take(uint32_t parity, uint16_t* out, int* late) {
    if (__syncthreads_or(!phase_ends(full, parity))) {
      if (threadIdx.x == 0) *late = 1;
      return false;
    }
    for (int i = static_cast<int>(threadIdx.x) - kGuard; i < elements + kGuard; i += blockDim.x)
      out[kGuard + i] = data[i];
    __syncthreads();
    return true;
  }
};

// What a launch gives back: tiles with their guards.
struct Tiles {
  int rows, panels, elements;
  OnGpu<uint16_t> memory;
  OnGpu<int> late;
  std::vector<uint16_t> seen;

  Tiles(int64_t count, int rows, int panels)
      : rows(rows),
        panels(panels),
        elements(panels * rows * kPanelColumns),
        memory(std::vector<uint16_t>(count * (elements + 2 * kGuard), kPoison)),
        late(std::vector<int>{0}) {}

  void fetch(const std::string& name) {
    seen = memory.host();
    CHECK(late.host()[0] == 0, name, ": the bytes that a barrier waits for did not come");
  }
  // `element(row, column)`: what the tile must hold.
  template <class Element>
  void check(const std::string& name, int64_t index, Element element) {
    const uint16_t* tile = &seen[index * (elements + 2 * kGuard) + kGuard];
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < panels * kPanelColumns; ++column) {
        uint16_t want = element(row, column), got = tile[panel_at(row, column, rows)];
        CHECK(got == want, name, ": tile ", index, " row ", row, " column ", column, " is ", got,
              " instead of ", want);
      }
    for (int i = 0; i < kGuard; ++i)
      CHECK(tile[-1 - i] == kPoison && tile[elements + i] == kPoison, name, ": tile ", index,
            " wrote beside itself");
  }
};

// ---- boxes by coordinates

struct Box {  // `to`: bytes into the tile
  int32_t to, at[5];
};

// A block loads one tile, which is `count` boxes.
__global__ void load_boxes(const __grid_constant__ TensorMap map, const Box* boxes, int count,
                           int elements, uint16_t* out, int* late) {
  __shared__ alignas(8) uint64_t barrier;
  SharedTile tile(&barrier, elements);
  tile.poison();
  if (threadIdx.x == 0) {
    barrier_arrive_expect(tile.full, 2 * elements);
    for (int i = 0; i < count; ++i) {
      const Box& box = boxes[blockIdx.x * count + i];
      tma_load(smem_address(tile.data) + box.to, &map, tile.full, box.at[0], box.at[1], box.at[2],
               box.at[3], box.at[4], kEvictNormal);
    }
  }
  tile.take(0, out + int64_t{blockIdx.x} * (elements + 2 * kGuard), late);
}

void launch_boxes(const TensorMap& map, const std::vector<Box>& boxes, int count, Tiles& tiles) {
  OnGpu<Box> g_boxes(boxes);
  int smem_bytes = smem_bytes_of(tiles.elements);
  allow(load_boxes, smem_bytes);
  load_boxes<<<static_cast<unsigned>(boxes.size() / count), 128, smem_bytes>>>(
      map, g_boxes.data(), count, tiles.elements, tiles.memory.data(), tiles.late.data());
  CUDA_OK(cudaDeviceSynchronize());  // before g_boxes is freed
}

}  // namespace
}  // namespace cuattn::test
