// SPDX-License-Identifier: Apache-2.0
// Flash attention forward on mma.sync tensor cores (sm_80 and later): float16 and bfloat16, every
// option of the API. A CTA owns kTile.m query rows of one head and walks the key tiles right to
// left; each warp owns its rows alone, so the softmax needs no word from other warps. Source:
// FlashAttention-2, arXiv:2307.08691, algorithm 1. Fragment maps: device/mma_sm80.cuh. Copies:
// device/tile_sm80.cuh. Tiles: tiles.h. Next: src/attention/plan.cpp, which picks it.
//
//   stages = 2, one barrier a tile (the prologue has loaded tile 2):
//       copy  | K1 V1           | K0 V0           |                 |
//       math  | QK2 softmax PV2 | QK1 softmax PV1 | QK0 softmax PV0 |
//   stages = 1, two barriers a tile (the prologue has loaded K1):
//       copy  | V1              | K0              | V0              |                 |
//       math  | QK1             | softmax PV1     | QK0             | softmax PV0     |
#pragma once

#include "cuattn/device/dropout.cuh"
#include "cuattn/device/finish.cuh"
#include "cuattn/device/parts.cuh"
#include "cuattn/device/scores.cuh"
#include "cuattn/device/tile_sm80.cuh"
#include "cuattn/tiles.h"
#ifndef __CUDACC_RTC__
#include "cuattn/schedule.h"
#include "cuda/host/launch.h"
#include "cuda/host/parts.h"
#endif

namespace cuattn {

// The order in which CTAs take tiles: sections of heads whose K and V fit in L2 together; inside a
// section the heaviest query tiles of all heads first, so that the last wave is made of light ones.
struct Sm80Schedule {
  int32_t tiles;          // query tiles of a sequence
  int32_t section_heads;  // (batch, head) pairs of a section
};

template <DType kType, int kHeadDim, int kHeadDimV, class Policy, Tile kTile>
struct ForwardSm80 {
  // 1. Types and sizes
  static constexpr int kThreads = kTile.warps * 32;
  static constexpr int kColumnGroups = sm80_column_groups({kHeadDim, kHeadDimV});
  static constexpr int kRowWarps = kTile.warps / kColumnGroups;
  static constexpr int kWarpRows = kTile.m / kRowWarps;
  static constexpr int kRowBlocks = kWarpRows / 16;               // m16 blocks of a warp
  static constexpr int kScoreBlocks = kTile.n / 8;                // n8 blocks of S
  static constexpr int kWarpColumns = kHeadDimV / kColumnGroups;  // of O
  static constexpr int kOutBlocks = kWarpColumns / 8;             // n8 blocks of O
  static constexpr int kQkBytes = kHeadDim * 2;                   // of one row of Q or K
  static constexpr int kVBytes = kHeadDimV * 2;                   // of one row of V or O
  static constexpr int kSmemBytes = sm80_smem_bytes({kHeadDim, kHeadDimV}, kTile);
  static constexpr int kCtasPerSm =
      kTile.warps <= 4 ? 2 : 1;  // 128 threads leave 255 registers each to two CTAs
  static_assert(kTile.m % (16 * kRowWarps) == 0 && kTile.n % 16 == 0, "tiles are made of m16n8k16");
  static_assert(kColumnGroups == 1 || kWarpColumns % 64 == 0, "the swizzle turns 64 columns");
  static_assert(kHeadDimV <= kHeadDim, "O is staged in the rows of Q");
  static_assert(kTile.stages == 1 || kTile.stages == 2,
                "the loops are written for one or two stages");

  // 2. Shared storage, in address order: Q (m, head_dim); K (stage, n, head_dim); V (stage, n,
  // head_dim_v); swizzled.
  struct Shared {
    uint32_t q, k, v;  // addresses in the shared window
    __device__ explicit Shared(const void* base)
        : q(device::smem_address(base)),
          k(q + kTile.m * kQkBytes),
          v(k + kTile.stages * kTile.n * kQkBytes) {}
    __device__ uint32_t k_stage(int stage) const { return k + stage * kTile.n * kQkBytes; }
    __device__ uint32_t v_stage(int stage) const { return v + stage * kTile.n * kVBytes; }
  };

  // 3. Roles: every warp does the same for its rows, of which wide heads have two warps for the
  // columns of O, warp w for those of group w / kRowWarps.
  static __device__ __forceinline__ int32_t row_warp() { return threadIdx.x / 32 % kRowWarps; }
  static __device__ __forceinline__ int32_t column_group() {
    return kColumnGroups == 1 ? 0 : threadIdx.x / 32 / kRowWarps;
  }

  // What a CTA works on:
  struct Work {
    int32_t batch, head, row0;  // row0: first query row of the tile
    Span queries, keys;
  };

  static __device__ Work find_work(const AttentionParams& p, const Sm80Schedule& schedule) {
    int32_t per_section = schedule.section_heads * schedule.tiles;
    int32_t section = blockIdx.x / per_section, within = blockIdx.x % per_section;
    int32_t first = section * schedule.section_heads;
    int32_t left = p.batch * p.num_heads_q - first;
    int32_t heads = left < schedule.section_heads ? left : schedule.section_heads;
    int32_t pair = first + within % heads, tile = within / heads;
    if (Policy::kHeavyLast) tile = schedule.tiles - 1 - tile;
    Work work;
    work.batch = pair / p.num_heads_q;
    work.head = pair % p.num_heads_q;
    work.row0 = tile * kTile.m;
    work.queries = query_span(p, work.batch);
    work.keys = key_span(p, work.batch);
    return work;
  }

  // Accumulators of a warp and the softmax state of its rows: lane 4g + q holds rows g and g + 8 of
  // each m16 block.
  struct State {
    float out[kRowBlocks][kOutBlocks][4];
    float row_max[kRowBlocks][2];  // of the scores in the functor's units; over the quad
    float row_sum[kRowBlocks][2];  // this lane's share; reduced over the quad at the end
  };
  using Scores = float[kRowBlocks][kScoreBlocks][4];

  // S = Q K^T. The operands of step k + 1 are fetched before the products of step k.
  static __device__ __forceinline__ void multiply_qk(Scores& scores, uint32_t q_tile,
                                                     uint32_t k_tile) {
    constexpr int kSteps = kHeadDim / 16;
    uint32_t lane = threadIdx.x % 32;
    uint32_t q_row = row_warp() * kWarpRows + lane % 16;
    uint32_t q_base = q_tile + q_row * kQkBytes,
             q_phase = device::swizzle_phase<kQkBytes>(q_row, lane / 16);
    uint32_t k_row = lane % 8 + lane / 16 * 8;
    uint32_t k_base = k_tile + k_row * kQkBytes,
             k_phase = device::swizzle_phase<kQkBytes>(k_row, lane / 8 % 2);
    uint32_t a[2][kRowBlocks][4], b[2][kTile.n / 16][4];
    auto fetch = [&](int step) {
      uint32_t q_chunk = device::chunk_address<kQkBytes>(q_base, q_phase, 2 * step);
      uint32_t k_chunk = device::chunk_address<kQkBytes>(k_base, k_phase, 2 * step);
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m)
        device::ldmatrix_x4(a[step % 2][m], q_chunk + m * 16 * kQkBytes);
#pragma unroll
      for (int n = 0; n < kTile.n / 16; ++n)
        device::ldmatrix_x4(b[step % 2][n], k_chunk + n * 16 * kQkBytes);
    };
    fetch(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) fetch(step + 1);
#pragma unroll
      for (int n = 0; n < kTile.n / 16; ++n) {
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          const uint32_t (&k_frag)[4] = b[step % 2][n];
          device::mma_m16n8k16<kType>(scores[m][2 * n], a[step % 2][m], k_frag[0], k_frag[1]);
          device::mma_m16n8k16<kType>(scores[m][2 * n + 1], a[step % 2][m], k_frag[2], k_frag[3]);
        }
      }
    }
  }

  // O += P V, P from the scores in registers.
  static __device__ __forceinline__ void multiply_pv(State& state, const Scores& scores,
                                                     uint32_t v_tile) {
    uint32_t lane = threadIdx.x % 32;
    uint32_t v_base = v_tile + lane % 16 * kVBytes + column_group() * kWarpColumns * 2,
             v_phase = device::swizzle_phase<kVBytes>(lane % 16, lane / 16);
    constexpr int kPairs = kWarpColumns / 16, kSteps = kTile.n / 16;
    uint32_t b[2][4];
    auto fetch = [&](int index) {  // pair `index % kPairs` of step `index / kPairs`
      uint32_t address = device::chunk_address<kVBytes>(v_base, v_phase, 2 * (index % kPairs));
      device::ldmatrix_x4_trans(b[index % 2], address + index / kPairs * 16 * kVBytes);
    };
    fetch(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        const float (&left)[4] = scores[m][2 * step];
        const float (&right)[4] = scores[m][2 * step + 1];
        a[m][0] = device::pack2<kType>(left[0], left[1]);
        a[m][1] = device::pack2<kType>(left[2], left[3]);
        a[m][2] = device::pack2<kType>(right[0], right[1]);
        a[m][3] = device::pack2<kType>(right[2], right[3]);
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        int index = step * kPairs + pair;
        if (index + 1 < kSteps * kPairs) fetch(index + 1);
        const uint32_t (&v_frag)[4] = b[index % 2];
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          device::mma_m16n8k16<kType>(state.out[m][2 * pair], a[m], v_frag[0], v_frag[1]);
          device::mma_m16n8k16<kType>(state.out[m][2 * pair + 1], a[m], v_frag[2], v_frag[3]);
        }
      }
    }
  }

  // Query row (within the sequence) of this lane's register pair `half` in m16 block m.
  static __device__ __forceinline__ int32_t lane_row(const Work& work, int m, int half) {
    return work.row0 + row_warp() * kWarpRows + m * 16 + half * 8 + threadIdx.x % 32 / 4;
  }

  // Where a lane's scores of the tile that begins at key0 stand.
  struct Where {
    static constexpr int kRows = 2 * kRowBlocks, kKeys = 2 * kScoreBlocks;
    const Work& work;
    int32_t first;
    __device__ __forceinline__ Where(const Work& work, int32_t key0)
        : work(work), first(key0 + 2 * static_cast<int32_t>(threadIdx.x % 4)) {}
    __device__ __forceinline__ int32_t row(int r) const { return lane_row(work, r / 2, r % 2); }
    static __device__ constexpr int column(int j) { return j / 2 * 8 + j % 2; }
    static __device__ __forceinline__ float& at(Scores& scores, int r, int j) {
      return scores[r / 2][j / 2][2 * (r % 2) + j % 2];
    }
  };

  // Scores become probabilities relative to the running maximum; O and the sums follow the maximum.
  static __device__ __forceinline__ void softmax_step(State& state, Scores& scores, float to_log2) {
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      float rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float maximum = state.row_max[m][half];
#pragma unroll
        for (int n = 0; n < kScoreBlocks; ++n) {
          maximum = fmaxf(maximum, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        maximum = device::quad_max(maximum);
        // A row that has seen nothing keeps -inf; 0 in its place keeps -inf - (-inf) out of the
        // exponent.
        float reference = Policy::kPlain ? maximum * to_log2 : maximum;
        float before = state.row_max[m][half];
        if (maximum == device::negative_infinity()) reference = 0.0f;
        if (Policy::kPlain && device::is_large_reference(reference)) {  // rare
          before -= maximum;
#pragma unroll
          for (int n = 0; n < kScoreBlocks; ++n) {
            scores[m][n][2 * half] -= maximum;
            scores[m][n][2 * half + 1] -= maximum;
          }
          reference = 0.0f;
        }
        auto exponent = [&](float score) {  // a bias may be the lowest float: first the difference
          return Policy::kPlain ? fmaf(score, to_log2, -reference) : (score - reference) * to_log2;
        };
        rescale[half] = device::exp2_approx(exponent(before));
        state.row_max[m][half] = maximum;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kScoreBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = scores[m][n][2 * half + i];
            score = device::exp2_approx(exponent(score));
            sum += score;
          }
        }
        state.row_sum[m][half] = fmaf(state.row_sum[m][half], rescale[half], sum);
      }
      // The maximum settles after a few tiles: skip the multiplications when no row of the warp has
      // moved. Exact.
      if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kOutBlocks; ++n) {
          state.out[m][n][0] *= rescale[0];
          state.out[m][n][1] *= rescale[0];
          state.out[m][n][2] *= rescale[1];
          state.out[m][n][3] *= rescale[1];
        }
      }
    }
  }

  // Dropout: probabilities times Z. The sums of the rows have them all.
  static __device__ __forceinline__ void drop(Scores& scores, const device::HeadDropout& dropout,
                                              const Work& work, int32_t key0) {
    static_assert(kScoreBlocks % 4 == 0, "four blocks of keys are drawn at a time");
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < kScoreBlocks; n += 4) {
        uint32_t kept = dropout.kept_of_rows(lane_row(work, m, 0), key0 + n * 8);
        device::apply_kept(scores[m], n, kept, dropout.params.factor());
      }
    }
  }

  // 4. Main loop
  static __device__ __forceinline__ void attend(const AttentionParams& p, const Policy& policy,
                                                const Work& work, const Shared& shared,
                                                State& state) {
    int32_t last_row = min(work.row0 + kTile.m, work.queries.used);
    auto walk = device::walk_of_part<kTile.n>(policy, work.row0, last_row);
    if (!walk.more()) return;

    int32_t kv_head = work.head / (p.num_heads_q / p.num_heads_kv);
    const char* gQ = static_cast<const char*>(p.q) +
                     2 * (work.batch * p.q_strides.batch + work.head * p.q_strides.head +
                          work.queries.start * p.q_strides.seq);
    const char* gK = static_cast<const char*>(p.k) +
                     2 * (work.batch * p.k_strides.batch + kv_head * p.k_strides.head +
                          work.keys.start * p.k_strides.seq);
    const char* gV = static_cast<const char*>(p.v) +
                     2 * (work.batch * p.v_strides.batch + kv_head * p.v_strides.head +
                          work.keys.start * p.v_strides.seq);
    auto load_k = [&](int32_t tile, int stage) {
      device::load_tile<kThreads, kTile.n, kHeadDim>(shared.k_stage(stage), gK, 2 * p.k_strides.seq,
                                                     tile * kTile.n, work.keys.used, p.head_dim);
    };
    auto load_v = [&](int32_t tile, int stage) {
      device::load_tile<kThreads, kTile.n, kHeadDimV>(shared.v_stage(stage), gV,
                                                      2 * p.v_strides.seq, tile * kTile.n,
                                                      work.keys.used, p.head_dim_v);
    };
    device::HeadDropout dropout(p, work.batch, work.head);
    device::load_tile<kThreads, kTile.m, kHeadDim>(shared.q, gQ, 2 * p.q_strides.seq, work.row0,
                                                   work.queries.used, p.head_dim);
    load_k(walk.tile, 0);
    if constexpr (kTile.stages == 2) load_v(walk.tile, 0);
    device::cp_async_commit();
    int stage = 0;
#pragma unroll 1
    for (; walk.more(); walk.next()) {
      device::cp_async_wait<0>();
      __syncthreads();  // this tile has landed, and every warp is done with the one whose place is
                        // filled next
      if constexpr (kTile.stages == 2) {
        if (walk.has_next()) {
          load_k(walk.next_tile(), stage ^ 1);
          load_v(walk.next_tile(), stage ^ 1);
        }
      } else {
        load_v(walk.tile, 0);
      }
      device::cp_async_commit();
      Scores scores = {};
      multiply_qk(scores, shared.q, shared.k_stage(stage));
      if constexpr (kTile.stages == 1) {
        device::cp_async_wait<0>();
        __syncthreads();  // V has landed, and every warp is done with K
        if (walk.has_next()) load_k(walk.next_tile(), 0);
        device::cp_async_commit();
      }
      device::apply_policy(policy, scores, Where(work, walk.tile * kTile.n), walk.masked());
      softmax_step(state, scores, policy.to_log2);
      if constexpr (!Policy::kPlain) {
        if (p.dropout.is_on()) drop(scores, dropout, work, walk.tile * kTile.n);
      }
      multiply_pv(state, scores, shared.v_stage(stage));
      if constexpr (kTile.stages == 2) stage ^= 1;
    }
  }

  // A row of an out in float32; of another it is none.
  static __device__ __forceinline__ float* wide_row(const AttentionParams& p, const Work& work,
                                                    int32_t row) {
    if (p.out_dtype != DType::f32 || row >= work.queries.stored) return nullptr;
    return static_cast<float*>(p.out) + work.batch * p.out_strides.batch +
           work.head * p.out_strides.head + (work.queries.start + row) * p.out_strides.seq +
           device::rows_before_part(p) * p.head_dim_v;
  }
  // 5. Epilogue: normalise, write lse, and turn fragments into whole rows by way of the warp's own
  // rows of Q.
  static __device__ __forceinline__ void store(const AttentionParams& p, const Work& work,
                                               const Shared& shared, State& state, float to_log2) {
    uint32_t lane = threadIdx.x % 32;
    uint32_t staging = shared.q + row_warp() * kWarpRows * kQkBytes;
    if constexpr (kColumnGroups == 1) {
      __syncwarp();  // every lane has read its last Q; no other warp reads these rows
    } else {
      __syncthreads();  // nor does the warp that shares them
    }
    const int32_t first_chunk = column_group() * kWarpColumns / 8;
    const device::Finish finish(p.scores, work.head, device::counts_sink());
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int32_t row = lane_row(work, m, half);
        float sum = device::quad_sum(state.row_sum[m][half]);
        float maximum = device::finite_product(state.row_max[m][half], to_log2);
        device::RowEnd end = finish.end(maximum, sum, row < work.queries.used);
        float* wide = wide_row(p, work, row);
#pragma unroll
        for (int n = 0; n < kOutBlocks; ++n) {
          float left = end.alive ? state.out[m][n][2 * half] * end.factor : 0.0f;
          float right = end.alive ? state.out[m][n][2 * half + 1] * end.factor : 0.0f;
          const int32_t column = (first_chunk + n) * 8;
          if (wide != nullptr && column < p.head_dim_v)
            *reinterpret_cast<float2*>(wide + column + lane % 4 * 2) = {left, right};
          device::store_shared(
              staging + device::swizzled<kVBytes>(m * 16 + half * 8 + lane / 4, first_chunk + n) +
                  lane % 4 * 4,
              device::pack2<kType>(left, right));
        }
        if (p.lse != nullptr && first_chunk == 0 && lane % 4 == 0 && row < work.queries.stored) {
          p.lse[work.batch * p.lse_strides.batch + work.head * p.lse_strides.head +
                (work.queries.start + row) * p.lse_strides.seq + device::rows_before_part(p)] =
              end.lse;
        }
      }
    }
    if (p.out_dtype == DType::f32) return;
    __syncwarp();
    char* gO = static_cast<char*>(p.out) +
               2 * (work.batch * p.out_strides.batch + work.head * p.out_strides.head +
                    work.queries.start * p.out_strides.seq);
    constexpr int kChunks = kWarpColumns / 8;
#pragma unroll
    for (int i = 0; i < kWarpRows * kChunks / 32; ++i) {
      int32_t warp_row = (i * 32 + lane) / kChunks;
      int32_t chunk = first_chunk + (i * 32 + lane) % kChunks;
      int32_t row = work.row0 + row_warp() * kWarpRows + warp_row;
      uint4 values = device::load_shared16(staging + device::swizzled<kVBytes>(warp_row, chunk));
      if (row < work.queries.stored && chunk * 8 < p.head_dim_v) {
        *reinterpret_cast<uint4*>(gO + row * (2 * p.out_strides.seq) + chunk * 16) = values;
      }
    }
  }

  // 6. Kernel
  static __device__ __forceinline__ void run(const AttentionParams& p, const Sm80Schedule& schedule,
                                             void* smem) {
    Work work = find_work(p, schedule);
    if (work.row0 >= work.queries.stored) return;
    Shared shared(smem);
    State state;
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < kOutBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.out[m][n][i] = 0.0f;
      }
      state.row_max[m][0] = state.row_max[m][1] = device::negative_infinity();
      state.row_sum[m][0] = state.row_sum[m][1] = 0.0f;
    }
    const Policy policy(p, work.batch, work.head, work.queries.used, work.keys.used);
    attend(p, policy, work, shared, state);
    store(p, work, shared, state, policy.to_log2);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    forward_sm80_kernel(const __grid_constant__ AttentionParams params,
                        const __grid_constant__ Sm80Schedule schedule) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(params, schedule, smem);
}

// 7. Launcher
#ifndef __CUDACC_RTC__
// The CTAs are the (batch, head) pairs times `tiles`.
inline Sm80Schedule make_sm80_schedule(const AttentionParams& p, Tile tile) {
  constexpr int64_t kSectionBytes = 24 << 20;  // of K and V: half the L2 of the large parts
  Sm80Schedule schedule;
  schedule.tiles = device::ceil_div(p.seqlen_q, tile.m);
  int32_t group = p.num_heads_q / p.num_heads_kv;
  int64_t pairs = int64_t{p.batch} * p.num_heads_q;
  int64_t head_bytes = (p.seqlen_kv + int64_t{1}) * (p.head_dim + p.head_dim_v) * 2;
  int64_t section = device::ceil_div(kSectionBytes, head_bytes) * group;
  schedule.section_heads = static_cast<int32_t>(section < pairs ? section : pairs);
  return schedule;
}

template <class Kernel>
void launch_forward_sm80_tile(const AttentionParams& p, const AttentionSchedule& cut, Tile tile,
                              cudaStream_t stream) {
  Sm80Schedule schedule = make_sm80_schedule(p, tile);
  unsigned blocks = grid_blocks(int64_t{p.batch} * p.num_heads_q * schedule.tiles, "sm80");
  static uint64_t allowed = 0;
  allow_shared_memory(forward_sm80_kernel<Kernel>, Kernel::kSmemBytes, allowed);
  const bool splits = cut.num_splits > 1;
  forward_sm80_kernel<Kernel>
      <<<dim3(blocks, cut.num_splits), Kernel::kThreads, Kernel::kSmemBytes, stream>>>(
          splits ? as_parts(p, cut) : p, schedule);
  CUATTN_CUDA_TRY(cudaGetLastError());
  if (splits) merge_parts(p, cut, 0, stream);
}

template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreKind kScore>
void launch_forward_sm80(const AttentionLaunch& launch, cudaStream_t stream) {
  constexpr Tile kTile = sm80_tile({kHeadDim, kHeadDimV}, kScore);
  using Policy = device::OptionPolicy<kType, kMask, kScore>;
  launch_forward_sm80_tile<ForwardSm80<kType, kHeadDim, kHeadDimV, Policy, kTile>>(
      launch.params, launch.schedule, kTile, stream);
}
#endif

}  // namespace cuattn
