// SPDX-License-Identifier: Apache-2.0
// Paged attention in float32 on CUDA cores: every layout and option. A warp takes kKeys keys at a
// time, in turn with the other warps; a lane holds four neighbouring columns of Q, K, V and O. The
// same tasks, rows and results as paged/sm80/decode.cuh, which is the one to read for speed.
#pragma once

#include "cuattn/device/paged/tasks.cuh"
#include "cuattn/tiles.h"
#include "cuda/host/launch.h"

namespace cuattn {

template <int kHeadDim>
struct PagedSimt {
  // 1. Types and sizes
  static constexpr Tile kTile = kPagedSimtTile.tile;
  static constexpr int kRows = kTile.m, kWarps = kTile.warps, kThreads = kWarps * 32;
  static constexpr int kGroups = kHeadDim / 128;  // of 128 columns: 4 a lane
  static constexpr int kKeys = 4;                 // of a warp at a time: loads in flight
  static_assert(kHeadDim % 128 == 0 && kTile.n % kKeys == 0, "whole groups and batches");

  // 2. Shared storage: the state of each warp at the end of a task.
  struct Shared {
    float out[kWarps][kRows][kHeadDim];
    float maximum[kWarps][kRows], sum[kWarps][kRows];
  };

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int column(int group) { return group * 128 + lane() * 4; }

  // 3. Roles: every warp does the same.
  struct State {
    float4 q[kRows][kGroups], out[kRows][kGroups];
    device::RowScore<DType::f32> score[kRows];
    float maximum[kRows], sum[kRows];  // base 2; the same in all lanes
  };

  static __device__ __forceinline__ void begin_task(const PagedParams& p,
                                                    const device::KeyTask& task, State& state) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      device::UnitRow row = device::unit_row(p, task.b, task.kv_head, task.row0, r);
      const float* gQ = static_cast<const float*>(p.q) + task.b * p.q_strides.batch +
                        row.place * p.q_strides.seq + row.head * p.q_strides.head;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        bool valid = row.valid && column(g) < p.head_dim;
        state.q[r][g] = valid ? *reinterpret_cast<const float4*>(gQ + column(g)) : float4{};
        state.out[r][g] = {};
      }
      state.score[r].init(p, task, row, device::key_scale(p, task));
      state.maximum[r] = device::negative_infinity();
      state.sum[r] = 0.0f;
    }
  }

  // Four columns of one key of K or V; `place`: the key within its block.
  static __device__ __forceinline__ float4 load_k(const PagedParams& p, const device::KeyTask& task,
                                                  int64_t block, int32_t place, int g) {
    const float* gK = static_cast<const float*>(p.k_cache) + block * p.k_strides.block +
                      task.kv_head * p.k_strides.head;
    int64_t at = p.kv_layout == KvLayout::vllm
                     ? int64_t{column(g)} * p.pages.block_size + place * 4  // x = 4
                     : place * p.k_strides.token + column(g);
    return *reinterpret_cast<const float4*>(gK + at);
  }
  static __device__ __forceinline__ float4 load_v(const PagedParams& p, const device::KeyTask& task,
                                                  int64_t block, int32_t place, int g) {
    const float* gV = static_cast<const float*>(p.v_cache) + block * p.v_strides.block +
                      task.kv_head * p.v_strides.head;
    if (p.kv_layout != KvLayout::vllm) {
      return *reinterpret_cast<const float4*>(gV + place * p.v_strides.token + column(g));
    }
    gV += int64_t{column(g)} * p.pages.block_size + place;
    return {gV[0], gV[p.pages.block_size], gV[2 * p.pages.block_size], gV[3 * p.pages.block_size]};
  }

  static __device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
  }

  // 4. Main loop
  static __device__ __forceinline__ void attend(const PagedParams& p, const device::KeyTask& task,
                                                State& state) {
    bool scored = p.scores.scored();
#pragma unroll 1
    for (int32_t key0 = task.begin + warp() * kKeys; key0 < task.end; key0 += kWarps * kKeys) {
      float4 k[kKeys][kGroups], v[kKeys][kGroups];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        int32_t key = key0 + i;
        bool valid = key >= task.low && key < task.end;
        int64_t block = valid ? p.pages.block(task.b, key / p.pages.block_size) : 0;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          bool loads = valid && column(g) < p.head_dim;
          k[i][g] = loads ? load_k(p, task, block, key % p.pages.block_size, g) : float4{};
          v[i][g] = loads ? load_v(p, task, block, key % p.pages.block_size, g) : float4{};
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= p.work.rows) break;
        float scores[kKeys], maximum = state.maximum[r];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          float sum = 0.0f;
#pragma unroll
          for (int g = 0; g < kGroups; ++g) sum = dot(state.q[r][g], k[i][g], sum);
          sum = device::warp_sum(sum);
          float score = scored ? state.score[r].scored(p, sum, key0 + i)
                               : device::finite_product(sum, state.score[r].scale);
          scores[i] = state.score[r].sees(key0 + i) ? score : device::negative_infinity();
          maximum = fmaxf(maximum, scores[i]);
        }
        float reference = maximum == device::negative_infinity() ? 0.0f : maximum;
        float rescale = device::exp2_approx(state.maximum[r] - reference);
        state.maximum[r] = maximum;
        state.sum[r] *= rescale;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          float4& out = state.out[r][g];
          out = {out.x * rescale, out.y * rescale, out.z * rescale, out.w * rescale};
        }
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          if (scores[i] == device::negative_infinity()) continue;  // what it holds is not looked at
          float weight = device::exp2_approx(scores[i] - reference);
          state.sum[r] += weight;
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            float4& out = state.out[r][g];
            out.x = fmaf(weight, v[i][g].x, out.x);
            out.y = fmaf(weight, v[i][g].y, out.y);
            out.z = fmaf(weight, v[i][g].z, out.z);
            out.w = fmaf(weight, v[i][g].w, out.w);
          }
        }
      }
    }
  }

  // 5. Epilogue: the states of the warps become one.
  static __device__ __forceinline__ void end_task(const PagedParams& p, const device::KeyTask& task,
                                                  Shared& shared, const State& state) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        *reinterpret_cast<float4*>(&shared.out[warp()][r][column(g)]) = state.out[r][g];
      }
      if (lane() == 0) {
        shared.maximum[warp()][r] = state.maximum[r];
        shared.sum[warp()][r] = state.sum[r];
      }
    }
    __syncthreads();
    constexpr int kChunks = kHeadDim / 8;
    for (int32_t item = threadIdx.x; item < kRows * kChunks; item += kThreads) {
      int32_t r = item / kChunks, chunk = item % kChunks;
      device::UnitRow row = device::unit_row(p, task.b, task.kv_head, task.row0, r);
      if (!row.valid || chunk * 8 >= p.head_dim) continue;
      float maximum = device::negative_infinity(), sum = 0.0f, merged[8] = {};
      for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, shared.maximum[w][r]);
      float reference = maximum == device::negative_infinity() ? 0.0f : maximum;
      for (int w = 0; w < kWarps; ++w) {
        if (shared.sum[w][r] == 0.0f) continue;  // no key there that this row sees
        float weight = device::exp2_approx(shared.maximum[w][r] - reference);
        sum = fmaf(shared.sum[w][r], weight, sum);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          merged[i] = fmaf(weight, shared.out[w][r][chunk * 8 + i], merged[i]);
        }
      }
#pragma unroll 1
      for (bool keeps = device::keeps_partition(p, task);; keeps = false) {
        device::RowOutput out =
            keeps ? device::partition_output(p, task, row, maximum, sum, chunk == 0)
                  : device::task_output(p, task, row, r, maximum, sum, chunk == 0);
        float factor = out.factor * device::value_scale(p, task), result[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) result[i] = merged[i] * factor;
        device::store8(out, 8 * chunk, result);
        if (!keeps || task.slot >= 0) break;  // V2: a partition that is all writes the output, too
      }
    }
    __syncthreads();  // the shared states are read
  }

  // 6. Kernel
  static __device__ __forceinline__ void run(const PagedParams& p, Shared& shared) {
    device::release_next_kernel();
    device::KeyTasks tasks(p.work);
    device::KeyTask task;
#pragma unroll 1
    while (tasks.next(p.work, task)) {
      State state;
      begin_task(p, task, state);
      attend(p, task, state);
      end_task(p, task, shared, state);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, kPagedSimtTile.ctas_per_sm)
    paged_simt_kernel(const __grid_constant__ PagedParams params) {
  __shared__ __align__(16) typename Kernel::Shared shared;
  Kernel::run(params, shared);
}

// 7. Launcher
template <DType kCache, int kHeadDim, int kHeadDimV>
void launch_paged_simt(const PagedParams& p, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV);
  static_assert(kCache == DType::f32, "16-bit caches run on tensor cores");
  using Kernel = PagedSimt<kHeadDim>;
  unsigned blocks = grid_blocks(num_key_tasks(p.work), "simt");
  paged_simt_kernel<Kernel><<<blocks, Kernel::kThreads, 0, stream>>>(p);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
