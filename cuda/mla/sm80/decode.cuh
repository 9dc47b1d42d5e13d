// SPDX-License-Identifier: Apache-2.0
// mla_decode on mma.sync tensor cores (sm_80 and later), 16-bit latents of up to 512 columns and 64
// of rope, or packed ones (packed.cuh). The columns are spread over the warps, for S = Q K^T as for
// O = P V:
//
//   warp w   S_w [rows x keys] = Q[:, own] K[:, own]^T      own: 512 / warps columns of the latent,
//            S = sum of all S_w, by way of shared memory         and 16 of rope for warps 0 to 3
//            softmax(S), the same in every warp
//            O[:, own] += P K[:, own]
//
// So each byte of the cache is copied, read as key and read as value by one warp, through stages of
// its own; a tile of keys costs one barrier of the block. Tasks: device/paged/tasks.cuh. Next:
// paged/combine.cu.
#pragma once

#include "cuattn/device/mma_sm80.cuh"
#include "cuattn/device/paged/tasks.cuh"
#include "cuattn/tiles.h"
#include "cuda/host/launch.h"
#include "cuda/mla/sm80/packed.cuh"

namespace cuattn {

// kPacked: the cache has packed latents.
template <DType kType, int kLatent, int kTileRows, bool kPacked>
struct MlaSm80 {
  // 1. Types and sizes
  static constexpr Tile kTile = mla_sm80_tile(kTileRows).tile;
  static constexpr int kRows = kTile.m, kKeys = kTile.n, kStages = kTile.stages;
  static constexpr int kWarps = kTile.warps, kThreads = kWarps * 32;
  static constexpr int kColumns = kLatent / kWarps;  // of a warp
  static constexpr int kRopeWarps = kMlaSm80Rope / 16;
  static constexpr int kRowBlocks = kRows / 16;    // m16
  static constexpr int kSteps = kColumns / 16;     // k16 of S; one more for rope
  static constexpr int kKeyBlocks = kKeys / 8;     // n8 of S
  static constexpr int kKeySteps = kKeys / 16;     // k16 of O
  static constexpr int kOutBlocks = kColumns / 8;  // n8 of O
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kLatentBytes = kKeys * kRowBytes, kRopeBytes = kKeys * 32;
  static constexpr int kStageBytes = kLatentBytes + kRopeBytes;
  using Packed = PackedTile<kKeys, kColumns>;
  static_assert(!kPacked || (kType == DType::bf16 && kLatent == PackedLatent::kLatent));
  static_assert(kTileRows == kRows && kRowBlocks <= 2 && kWarps >= kRopeWarps && kKeys <= 32 &&
                kStages == 2);

  // 2. Shared storage: stages [warp][stage][latent | rope], then S of the warps in the order of the
  // fragments, twice, so that one is written while the other is read.
  using Fragment = float[4];
  static constexpr int kFragments = kRowBlocks * kKeyBlocks;
  static constexpr int kStagesBytes = kWarps * kStages * kStageBytes;
  static constexpr int kPartialBytes = kWarps * kFragments * 32 * 16;
  static constexpr int kSmemBytes = kStagesBytes + 2 * kPartialBytes;

  const int lane, warp;
  const uint32_t stages, partials;  // stages: of this warp
  int buffer = 0;                   // of the partials

  __device__ explicit MlaSm80(const char* smem)
      : lane(__shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32)),
        warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
        stages(device::smem_address(smem) + threadIdx.x / 32 * kStages * kStageBytes),
        partials(device::smem_address(smem) + kStagesBytes) {}

  // A rope row has two chunks of 16 bytes; XOR: eight rows fall into different banks.
  static __device__ __forceinline__ uint32_t rope_at(int row, int chunk) {
    return kLatentBytes + row * 32 + ((chunk ^ (row >> 2 & 1)) << 4);
  }

  // 3. Roles: every warp copies and computes its own columns.

  // Where the key of this lane lies, in elements (packed: its latent in bytes): lane i has key i of a
  // tile.
  struct Places {
    int64_t latent, rope;
    bool valid;
  };
  __device__ __forceinline__ Places find_keys(const PagedParams& p, const device::KeyTask& task,
                                              int32_t key0) const {
    int32_t key = key0 + lane % kKeys;
    LatentPlace place{};
    if (key >= task.low && key < task.end) place = latent_place(p, task.b, key);
    int64_t latent = place.at(p.k_strides);
    return {latent, kPacked ? latent / 2 : place.at(p.latent.strides), place.exists};
  }
  // Bit i: key i of a tile.
  static __device__ __forceinline__ uint32_t present(const Places& places) {
    return __ballot_sync(0xffffffffu, places.valid);
  }

  // Copies the own columns of a tile; keys that are not there become zero.
  __device__ __forceinline__ void fill(const PagedParams& p, const Places& places,
                                       int stage) const {
    uint32_t to = stages + stage * kStageBytes;
    if constexpr (kPacked) {
      Packed::copy(p.k_cache, places.latent, places.valid, warp * kColumns, lane, to);
    } else {
      fill_latents(p, places, to);
    }
    fill_rope(p, places, to);
  }

  __device__ __forceinline__ void fill_latents(const PagedParams& p, const Places& places,
                                               uint32_t to) const {
    constexpr int kChunks = kColumns / 8, kPassRows = 32 / kChunks;
    int32_t chunk = lane % kChunks, column = warp * kColumns + chunk * 8;
    const uint16_t* from = static_cast<const uint16_t*>(p.k_cache) + column;
#pragma unroll
    for (int pass = 0; pass < kKeys / kPassRows; ++pass) {
      int row = pass * kPassRows + lane / kChunks;
      int64_t at = __shfl_sync(0xffffffffu, places.latent, row);
      bool valid = __shfl_sync(0xffffffffu, places.valid, row) && column < p.head_dim;
      device::cp_async16(to + device::swizzled<kRowBytes>(row, chunk),
                         valid ? from + at : p.k_cache, valid);
    }
  }

  __device__ __forceinline__ void fill_rope(const PagedParams& p, const Places& places,
                                            uint32_t to) const {
    if (warp >= kRopeWarps) return;
    int32_t column = warp * 16 + lane % 2 * 8;
    const uint16_t* from = static_cast<const uint16_t*>(p.latent.rope_cache) + column;
#pragma unroll
    for (int pass = 0; pass < kKeys / 16; ++pass) {
      int row = pass * 16 + lane / 2;
      int64_t at = __shfl_sync(0xffffffffu, places.rope, row);
      bool valid = __shfl_sync(0xffffffffu, places.valid, row) && column < p.latent.rope_dim;
      device::cp_async16(to + rope_at(row, lane % 2), valid ? from + at : p.k_cache, valid);
    }
  }

  // Rows 16 m + g and 16 m + g + 8 of a lane 4 g + q are rows 0 and 1 of its block m.
  struct State {
    uint32_t q[kRowBlocks][kSteps + 1][4];  // the A operand; the last step is rope
    device::RowScore<kType> score[kRowBlocks][2];
    float out[kRowBlocks][kOutBlocks][4];
    float maximum[kRowBlocks][2];  // base 2, the same in all lanes of a row
    float sum[kRowBlocks][2];      // this lane's share
    int32_t full_begin, full_end;  // every query sees these keys
  };

  __device__ __forceinline__ device::UnitRow row_of(const PagedParams& p,
                                                    const device::KeyTask& task, int block,
                                                    int half) const {
    return device::unit_row(p, task.b, 0, task.row0, 16 * block + 8 * half + lane / 4);
  }

  // Two columns of a row of q, as bits.
  static __device__ __forceinline__ uint32_t load_pair(const void* q, int64_t row, int32_t column,
                                                       bool valid) {
    const uint16_t* from = static_cast<const uint16_t*>(q) + row + column;
    return valid ? *reinterpret_cast<const uint32_t*>(from) : 0;
  }

  __device__ __forceinline__ void begin_task(const PagedParams& p, const device::KeyTask& task,
                                             State& state) const {
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        device::UnitRow row = row_of(p, task, m, half);
        int64_t at = row_offset(p, p.q_strides, task.b, row.place, row.head);
        int64_t rope_row = row_offset(p, p.latent.q_strides, task.b, row.place, row.head);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int32_t d = 2 * (lane % 4) + 8 * i;
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            int32_t column = warp * kColumns + 16 * step + d;
            state.q[m][step][half + 2 * i] =
                load_pair(p.q, at, column, row.valid && column < p.head_dim);
          }
          int32_t column = warp * 16 + d;
          state.q[m][kSteps][half + 2 * i] =
              load_pair(p.latent.q_rope, rope_row, column,
                        row.valid && warp < kRopeWarps && column < p.latent.rope_dim);
        }
        state.score[m][half].init(p, task, row, 1.0f);
        state.maximum[m][half] = device::negative_infinity();
        state.sum[m][half] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kOutBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.out[m][n][i] = 0.0f;
      }
    }
    const PagedWork& w = p.work;
    state.full_begin = w.mask.visible(w.q_len - 1, w.q_len, task.context).begin;
    state.full_end = w.mask.visible(0, w.q_len, task.context).end;
  }

  using Scores = float[kRowBlocks][kKeyBlocks][4];

  // S_w: four 8 x 8 blocks of keys at a time, as B operands of two n8 blocks.
  __device__ __forceinline__ void multiply_qk(const State& state, uint32_t tile,
                                              Scores& scores) const {
    int row = lane / 16 * 8 + lane % 8, odd = lane / 8 % 2;
    auto multiply = [&](int pair, int step, uint32_t from) {
      uint32_t k[4];
      device::ldmatrix_x4(k, from);
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        device::mma_m16n8k16<kType>(scores[m][2 * pair], state.q[m][step], k[0], k[1]);
        device::mma_m16n8k16<kType>(scores[m][2 * pair + 1], state.q[m][step], k[2], k[3]);
      }
    };
#pragma unroll
    for (int pair = 0; pair < kKeySteps; ++pair) {
      int key = 16 * pair + row;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        multiply(pair, step, tile + device::swizzled<kRowBytes>(key, 2 * step + odd));
      if (kWarps == kRopeWarps || warp < kRopeWarps)
        multiply(pair, kSteps, tile + rope_at(key, odd));
    }
  }

  // The sum over the warps, in their order.
  __device__ __forceinline__ void share_scores(Scores& scores) {
    uint32_t base = partials + buffer * kPartialBytes + lane * 16;
    buffer ^= 1;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const Fragment& s = scores[i / kKeyBlocks][i % kKeyBlocks];
      device::store_shared16(base + (warp * kFragments + i) * 512,
                             {__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]),
                              __float_as_uint(s[3])});
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      Fragment& s = scores[i / kKeyBlocks][i % kKeyBlocks];
      s[0] = s[1] = s[2] = s[3] = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        uint4 v = device::load_shared16(base + (w * kFragments + i) * 512);
        s[0] += __uint_as_float(v.x);
        s[1] += __uint_as_float(v.y);
        s[2] += __uint_as_float(v.z);
        s[3] += __uint_as_float(v.w);
      }
    }
  }

  // Dot products become scores in base 2, -inf where a query does not see the key. `there`: present.
  __device__ __forceinline__ void score_keys(const PagedParams& p, const State& state, int32_t key0,
                                             uint32_t there, Scores& scores) const {
    bool scored = p.scores.scored();
    bool masked = key0 < state.full_begin || key0 + kKeys > state.full_end || there != 0xffffffffu;
    there >>= 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const device::RowScore<kType>& row = state.score[m][i / 2];
          int32_t key = key0 + 8 * n + 2 * (lane % 4) + i % 2;
          float score = scored ? row.scored(p, scores[m][n][i], key)
                               : device::finite_product(scores[m][n][i], row.scale);
          bool sees = !masked || (row.sees(key) && (there >> (8 * n + i % 2) & 1) != 0);
          scores[m][n][i] = sees ? score : device::negative_infinity();
        }
      }
    }
  }

  // Scores become weights; O and the sums follow the maximum.
  static __device__ __forceinline__ void softmax_step(State& state, Scores& scores) {
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      float rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float maximum = state.maximum[m][half];
        float largest = device::negative_infinity();
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n)
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        maximum = fmaxf(maximum, device::quad_max(largest));
        float reference = maximum == device::negative_infinity() ? 0.0f : maximum;
        rescale[half] = device::exp2_approx(state.maximum[m][half] - reference);
        state.maximum[m][half] = maximum;
        state.sum[m][half] *= rescale[half];
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& s = scores[m][n][2 * half + i];
            s = device::exp2_approx(s - reference);
            state.sum[m][half] += s;
          }
        }
      }
      // The maximum settles after a few tiles. Exact.
      if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kOutBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) state.out[m][n][i] *= rescale[i / 2];
        }
      }
    }
  }

  // O += P V: two blocks of scores side by side are an A operand, keys transposed the B operands.
  __device__ __forceinline__ void multiply_pv(State& state, const Scores& scores,
                                              uint32_t tile) const {
    int row = lane / 8 % 2 * 8 + lane % 8, right = lane / 16;
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      uint32_t weights[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Fragment& s = scores[m][2 * step + i / 2];
          weights[m][i] = device::pack2<kType>(s[2 * (i % 2)], s[2 * (i % 2) + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kOutBlocks; n += 2) {
        uint32_t v[4];
        device::ldmatrix_x4_trans(v,
                                  tile + device::swizzled<kRowBytes>(16 * step + row, n + right));
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          device::mma_m16n8k16<kType>(state.out[m][n], weights[m], v[0], v[1]);
          device::mma_m16n8k16<kType>(state.out[m][n + 1], weights[m], v[2], v[3]);
        }
      }
    }
  }

  // 4. Main loop: the keys of one task, two tiles ahead.
  __device__ __forceinline__ void attend(const PagedParams& p, const device::KeyTask& task,
                                         State& state) {
    Places places = find_keys(p, task, task.begin);
    uint32_t there[kStages];
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      fill(p, places, stage);
      device::cp_async_commit();
      there[stage] = present(places);
      places = find_keys(p, task, task.begin + (stage + 1) * kKeys);
    }
    begin_task(p, task, state);  // while the first copies are on their way
    int stage = 0;
#pragma unroll 1
    for (int32_t key = task.begin; key < task.end; key += kKeys) {
      device::cp_async_wait<kStages - 1>();
      __syncwarp();  // the copies of all lanes have landed
      uint32_t tile = stages + stage * kStageBytes;
      if constexpr (kPacked) Packed::unpack(warp * kColumns, lane, tile);
      Scores scores = {};
      multiply_qk(state, tile, scores);
      share_scores(scores);
      score_keys(p, state, key, there[0], scores);
      softmax_step(state, scores);
      multiply_pv(state, scores, tile);
      __syncwarp();  // every lane is done with the stage
      if (key + kStages * kKeys < task.end) fill(p, places, stage);
      device::cp_async_commit();
      there[0] = there[1];
      there[1] = present(places);
      places = find_keys(p, task, key + (kStages + 1) * kKeys);
      stage = (stage + 1) % kStages;
    }
    device::cp_async_wait<0>();
    __syncwarp();
  }

  // 5. Epilogue: a warp writes its own columns, straight from the fragments.
  __device__ __forceinline__ void store_row(const PagedParams& p, const device::RowOutput& out,
                                            const float (&values)[kOutBlocks][4], int half) const {
#pragma unroll
    for (int n = 0; n < kOutBlocks; ++n) {
      int32_t column = warp * kColumns + 8 * n + 2 * (lane % 4);
      float low = values[n][2 * half], high = values[n][2 * half + 1];
      low = out.factor == 0.0f ? 0.0f : low * out.factor;  // whatever was accumulated
      high = out.factor == 0.0f ? 0.0f : high * out.factor;
      if (column < p.head_dim) {
        if (out.type == DType::f32) {
          *reinterpret_cast<float2*>(static_cast<float*>(out.to) + column) = {low, high};
        } else {
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out.to) + column) =
              device::pack2<kType>(low, high);
        }
      }
    }
  }

  __device__ __forceinline__ void end_row(const PagedParams& p, const device::KeyTask& task,
                                          const State& state, int m, int half) const {
    float sum = state.sum[m][half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    device::UnitRow row = row_of(p, task, m, half);
    if (!row.valid) return;
    int32_t index = 16 * m + 8 * half + lane / 4;
    device::RowOutput out = device::task_output(p, task, row, index, state.maximum[m][half], sum,
                                                warp == 0 && lane % 4 == 0);
    store_row(p, out, state.out[m], half);
  }

  // Note: as a loop over the blocks this stays one, with State in local memory.
  __device__ __forceinline__ void end_task(const PagedParams& p, const device::KeyTask& task,
                                           const State& state) const {
    end_row(p, task, state, 0, 0);
    end_row(p, task, state, 0, 1);
    if constexpr (kRowBlocks == 2) {
      end_row(p, task, state, 1, 0);
      end_row(p, task, state, 1, 1);
    }
  }

  // 6. Kernel
  static __device__ __forceinline__ void run(const PagedParams& p, const char* smem) {
    MlaSm80 me(smem);
    device::KeyTasks tasks(p.work, blockIdx.x, gridDim.x);
    device::KeyTask task;
#pragma unroll 1
    while (tasks.next(p.work, task)) {
      State state;
      me.attend(p, task, state);
      me.end_task(p, task, state);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    mla_sm80_kernel(const __grid_constant__ PagedParams params) {
  extern __shared__ __align__(1024) char smem[];
  device::wait_for_previous_kernel();
  device::release_next_kernel();
  Kernel::run(params, smem);
}

// 7. Launcher
template <class Kernel>
void launch_mla_sm80_kernel(const PagedParams& p, cudaStream_t stream) {
  unsigned blocks = grid_blocks(num_key_tasks(p.work), "sm80");
  static uint64_t allowed = 0;
  allow_shared_memory(mla_sm80_kernel<Kernel>, Kernel::kSmemBytes, allowed);
  launch_overlapping(mla_sm80_kernel<Kernel>, blocks, Kernel::kThreads, Kernel::kSmemBytes,
                     device_major(), stream, p);
}

template <DType kType, int kLatent, bool kPacked>
void launch_mla_sm80_tile(const PagedParams& p, cudaStream_t stream) {
  if (p.work.q_len * p.work.group <= 16)
    return launch_mla_sm80_kernel<MlaSm80<kType, kLatent, 16, kPacked>>(p, stream);
  launch_mla_sm80_kernel<MlaSm80<kType, kLatent, 32, kPacked>>(p, stream);
}

template <DType kType, int kHeadDim, int kHeadDimV>
void launch_mla_sm80(const PagedParams& p, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV, "the latent is key and value");
  if constexpr (kType == DType::bf16) {
    if (p.kv_dtype == DType::e4m3) return launch_mla_sm80_tile<kType, kHeadDim, true>(p, stream);
  }
  launch_mla_sm80_tile<kType, kHeadDim, false>(p, stream);
}

}  // namespace cuattn
