// SPDX-License-Identifier: Apache-2.0
// mla_decode on CUDA cores, in float32: every dtype, latent and number of rope columns. A warp has
// one row of a unit, a lane every 32nd column; keys come through shared memory, from where all rows
// of the block read them, as keys and again as values. The same tasks, rows and results as
// mla/sm80/decode.cuh, which is the one to read for speed.
#pragma once

#include "cuattn/device/paged/tasks.cuh"
#include "cuattn/tiles.h"
#include "cuda/host/launch.h"

namespace cuattn {

template <DType kType, int kLatent>
struct MlaSimt {
  // 1. Types and sizes
  using T = device::Element<kType>;
  static constexpr Tile kTile = mla_simt_tile(kLatent).tile;
  static constexpr int kWarps = kTile.warps, kThreads = kWarps * 32, kKeys = kTile.n;
  static constexpr int kRope = 128;             // columns at most
  static constexpr int kGroups = kLatent / 32;  // columns of a lane
  static_assert(kTile.m == kWarps, "a warp for each row");

  // 2. Shared storage: keys as float32, the rope columns behind the latent.
  struct Shared {
    float keys[kKeys][kLatent + kRope];
    bool there[kKeys];  // lists have entries that are no key
  };

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }

  // 3. Roles: every warp does the same.
  struct State {
    float q[kGroups], q_rope[kRope / 32], out[kGroups];
    device::RowScore<kType> score;
    float maximum, sum;  // base 2; the same in all lanes
  };

  static __device__ __forceinline__ void begin_task(const PagedParams& p,
                                                    const device::KeyTask& task, State& state) {
    device::UnitRow row = device::unit_row(p, task.b, 0, task.row0, warp());
    const T* gQ =
        static_cast<const T*>(p.q) + row_offset(p, p.q_strides, task.b, row.place, row.head);
    const T* gR = static_cast<const T*>(p.latent.q_rope) +
                  row_offset(p, p.latent.q_strides, task.b, row.place, row.head);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      bool valid = row.valid && lane() + 32 * i < p.head_dim;
      state.q[i] = valid ? device::to_float(gQ[lane() + 32 * i]) : 0.0f;
      state.out[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kRope / 32; ++i) {
      bool valid = row.valid && lane() + 32 * i < p.latent.rope_dim;
      state.q_rope[i] = valid ? device::to_float(gR[lane() + 32 * i]) : 0.0f;
    }
    state.score.init(p, task, row, 1.0f);
    state.maximum = device::negative_infinity();
    state.sum = 0.0f;
  }

  // Eight columns of a cache to shared memory.
  static __device__ __forceinline__ void load8(const T* from, bool valid, float* to) {
    constexpr int kWords = sizeof(T) / 2;  // of 16 bytes
    uint4 raw[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      raw[i] = valid ? reinterpret_cast<const uint4*>(from)[i] : uint4{};
    const T* x = reinterpret_cast<const T*>(raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = device::to_float(x[i]);
  }

  // Eight columns, from `column` on, of a packed latent.
  static __device__ __forceinline__ void unpack8(const char* from, int32_t column, bool valid,
                                                 float* to) {
    uint2 raw{};
    float scale = 0.0f;
    if (valid) {
      raw = *reinterpret_cast<const uint2*>(from + column);
      scale = *reinterpret_cast<const float*>(from + PackedLatent::kScalesAt +
                                              column / PackedLatent::kScaled * 4);
    }
    const device::E4m3* codes = reinterpret_cast<const device::E4m3*>(&raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float value = __fmul_rn(device::to_float(codes[i]), scale);
      to[i] = device::to_float(device::from_float<device::Element<DType::bf16>>(value));
    }
  }

  // Keys [key0, key0 + kKeys), or their own values.
  static __device__ __forceinline__ void load_keys(const PagedParams& p,
                                                   const device::KeyTask& task, int32_t key0,
                                                   bool values, Shared& shared) {
    int32_t latent_chunks = p.head_dim / 8;
    int32_t chunks = latent_chunks + (values ? 0 : p.latent.rope_dim / 8);
    const CacheStrides& strides = values ? p.v_strides : p.k_strides;
    const T* cache = static_cast<const T*>(values ? p.v_cache : p.k_cache);
    for (int32_t item = threadIdx.x; item < kKeys * chunks; item += kThreads) {
      int32_t i = item / chunks, chunk = item % chunks, key = key0 + i;
      bool is_rope = chunk >= latent_chunks;
      LatentPlace place{};
      if (key >= task.low && key < task.end) place = latent_place(p, task.b, key);
      if (chunk == 0) shared.there[i] = place.exists;
      int32_t column = 8 * (is_rope ? chunk - latent_chunks : chunk);
      if (p.kv_dtype == DType::e4m3 && !is_rope) {
        unpack8(static_cast<const char*>(p.k_cache) + place.at(p.k_strides), column, place.exists,
                &shared.keys[i][column]);
        continue;
      }
      const CacheStrides& s = is_rope ? p.latent.strides : strides;
      const T* from = is_rope ? static_cast<const T*>(p.latent.rope_cache) : cache;
      load8(from + place.at(s) + column, place.exists,
            &shared.keys[i][is_rope ? kLatent + column : column]);
    }
  }

  static __device__ __forceinline__ float dot(const PagedParams& p, const State& state,
                                              const float* key) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      int column = lane() + 32 * i;
      if (column < p.head_dim) sum = fmaf(state.q[i], key[column], sum);
    }
#pragma unroll
    for (int i = 0; i < kRope / 32; ++i) {
      int column = lane() + 32 * i;
      if (column < p.latent.rope_dim) sum = fmaf(state.q_rope[i], key[kLatent + column], sum);
    }
    return device::warp_sum(sum);
  }

  // 4. Main loop
  static __device__ __forceinline__ void attend(const PagedParams& p, const device::KeyTask& task,
                                                Shared& shared, State& state) {
    bool scored = p.scores.scored();
#pragma unroll 1
    for (int32_t key0 = task.begin; key0 < task.end; key0 += kKeys) {
      __syncthreads();  // the keys before are read
      load_keys(p, task, key0, false, shared);
      __syncthreads();
      float scores[kKeys], maximum = state.maximum;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        float sum = dot(p, state, shared.keys[i]);
        float score = scored ? state.score.scored(p, sum, key0 + i)
                             : device::finite_product(sum, state.score.scale);
        bool sees = state.score.sees(key0 + i) && shared.there[i];
        scores[i] = sees ? score : device::negative_infinity();
        maximum = fmaxf(maximum, scores[i]);
      }
      if (p.latent.own_values) {
        __syncthreads();
        load_keys(p, task, key0, true, shared);
        __syncthreads();
      }
      float reference = maximum == device::negative_infinity() ? 0.0f : maximum;
      float rescale = device::exp2_approx(state.maximum - reference);
      state.maximum = maximum;
      state.sum *= rescale;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) state.out[i] *= rescale;
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        if (scores[k] == device::negative_infinity()) continue;  // what it holds is not looked at
        float weight = device::exp2_approx(scores[k] - reference);
        state.sum += weight;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          int column = lane() + 32 * i;
          if (column < p.head_dim)
            state.out[i] = fmaf(weight, shared.keys[k][column], state.out[i]);
        }
      }
    }
  }

  // 5. Epilogue
  static __device__ __forceinline__ void end_task(const PagedParams& p, const device::KeyTask& task,
                                                  const State& state) {
    device::UnitRow row = device::unit_row(p, task.b, 0, task.row0, warp());
    if (!row.valid) return;
    device::RowOutput out =
        device::task_output(p, task, row, warp(), state.maximum, state.sum, lane() == 0);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      int column = lane() + 32 * i;
      if (column >= p.head_dim) continue;
      float value = out.factor == 0.0f ? 0.0f : state.out[i] * out.factor;
      if (out.type == DType::f32) {
        static_cast<float*>(out.to)[column] = value;
      } else {
        static_cast<T*>(out.to)[column] = device::from_float<T>(value);
      }
    }
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
      attend(p, task, shared, state);
      end_task(p, task, state);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kGroups <= 16 ? 2 : 1)
    mla_simt_kernel(const __grid_constant__ PagedParams params) {
  __shared__ __align__(16) typename Kernel::Shared shared;
  Kernel::run(params, shared);
}

// 7. Launcher
template <DType kType, int kHeadDim, int kHeadDimV>
void launch_mla_simt(const PagedParams& p, cudaStream_t stream) {
  static_assert(kHeadDim == kHeadDimV, "the latent is key and value");
  using Kernel = MlaSimt<kType, kHeadDim>;
  unsigned blocks = grid_blocks(num_key_tasks(p.work), "simt");
  mla_simt_kernel<Kernel><<<blocks, Kernel::kThreads, 0, stream>>>(p);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
