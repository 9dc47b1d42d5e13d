// SPDX-License-Identifier: Apache-2.0
// Rung four, backend="simt": float32 flash attention on CUDA cores, every option, head dims to 512.
// Four warps own the rows of a query tile; K and V pass through a ring of two stages in shared
// memory; both products are register tiles, as in a classic SGEMM. Source: FlashAttention-2,
// arXiv:2307.08691, algorithm 1. Next: attention/sm80/forward.cuh, the same algorithm on tensor
// cores.
#pragma once

#include "cuattn/device/dropout.cuh"
#include "cuattn/device/finish.cuh"
#include "cuattn/device/mma_sm80.cuh"
#include "cuattn/device/parts.cuh"
#include "cuattn/device/scores.cuh"
#ifndef __CUDACC_RTC__
#include "cuda/host/launch.h"
#include "cuda/host/parts.h"
#endif
#include "cuattn/schedule.h"
#include "cuattn/tiles.h"

namespace cuattn {

template <int kHeadDim, class Policy>
struct ForwardSimt {
  // 1. Types and sizes
  //
  // A warp is 2 lane rows (y) of 16 lanes (x). Lane (y, x) of warp w holds
  //
  //   query rows  w * 2 kRows + 2 i + y    i = 0..kRows-1
  //   keys        x + 16 j                 j = 0..kKeys-1
  //   columns     4 x + 64 g + 0..3        g = 0..kGroups-1, of the output
  //
  // so a row belongs to 16 lanes of one warp, and its maximum and sum take shuffles only. Four
  // values each of 8 rows and 4 keys feed 128 FFMAs: shared memory is busy half of the time.
  static constexpr Tile kTile = simt_tile(kHeadDim);
  static constexpr int kWarps = kTile.warps, kThreads = kWarps * 32;
  static constexpr int kTileM = kTile.m, kTileN = kTile.n;
  static constexpr int kRows = kTileM / (2 * kWarps), kKeys = kTileN / 16, kGroups = kHeadDim / 64;
  static constexpr int kStageFloats = 4096;              // of K or V: 8 copies of 16 bytes a thread
  static constexpr int kChunk = kStageFloats / kTileN;   // dims of K a stage holds, for all keys
  static constexpr int kPart = kStageFloats / kHeadDim;  // keys of V a stage holds, for all dims
  static constexpr int kPartsV = kTileN / kPart;
  static constexpr int kPad = 4;  // floats: 8 rows at one column then fall into 8 groups of banks
  // What 227 KiB of shared memory hold, and without spilling.
  static constexpr int kBlocksPerSm = kHeadDim == 64 && !Policy::kLoads ? 3 : 2;

  // 2. Shared storage: Q is loaded once, with zeros beyond head_dim and the last row; a warp writes
  // and reads its own rows of P only.
  struct Shared {
    alignas(16) float q[kTileM][kHeadDim + kPad];
    float p[kTileM][kTileN + kPad];
    union Stage {
      float k[kTileN][kChunk + kPad];
      float v[kPart][kHeadDim];
    } stages[2];
  };
  static_assert(sizeof(Shared) <= 99 * 1024,
                "compute capabilities 8.6, 8.9 and 12.x give a block 99 KiB at most");

  // What a block works on: one tile of query rows of one head of one sequence.
  struct Work {
    const float *q, *k, *v;  // first row of the sequence, this head
    int64_t q_stride, k_stride, v_stride;
    int32_t row_begin;  // first row of the tile
    Span queries, keys;
    int32_t head, b;
    int32_t head_dim, head_dim_v;
  };

  static __device__ Work find_work(const AttentionParams& p) {
    Work w;
    uint32_t row_tiles = device::ceil_div(p.seqlen_q, kTileM);
    uint32_t row_tile = blockIdx.x % row_tiles;
    if (Policy::kHeavyLast) row_tile = row_tiles - 1 - row_tile;
    w.row_begin = row_tile * kTileM;
    w.head = blockIdx.x / row_tiles % p.num_heads_q;
    w.b = blockIdx.x / row_tiles / p.num_heads_q;
    w.queries = query_span(p, w.b);
    w.keys = key_span(p, w.b);
    int32_t head_kv = w.head / (p.num_heads_q / p.num_heads_kv);
    w.q = static_cast<const float*>(p.q) + w.b * p.q_strides.batch +
          w.queries.start * p.q_strides.seq + w.head * p.q_strides.head;
    w.k = static_cast<const float*>(p.k) + w.b * p.k_strides.batch +
          w.keys.start * p.k_strides.seq + head_kv * p.k_strides.head;
    w.v = static_cast<const float*>(p.v) + w.b * p.v_strides.batch +
          w.keys.start * p.v_strides.seq + head_kv * p.v_strides.head;
    w.q_stride = p.q_strides.seq;
    w.k_stride = p.k_strides.seq;
    w.v_stride = p.v_strides.seq;
    w.head_dim = p.head_dim;
    w.head_dim_v = p.head_dim_v;
    return w;
  }

  // 3. Roles: all threads load, all compute.
  // [kRowCount, kColumns] floats from rows `first`.. and columns `column`.. of a matrix, zeros past
  // its extents.
  template <int kRowCount, int kColumns>
  static __device__ void load(float* shared, int pitch, const float* matrix, int64_t stride,
                              int32_t first, int32_t row_limit, int32_t column,
                              int32_t column_limit) {
    constexpr int kPieces = kColumns / 4;          // of a row, 16 bytes each
    constexpr int kPassRows = kThreads / kPieces;  // rows that the block copies at once
    static_assert(kThreads % kPieces == 0 && kRowCount % kPassRows == 0, "passes cover the tile");
    int32_t row = threadIdx.x / kPieces, offset = threadIdx.x % kPieces * 4;
    bool column_valid = column + offset < column_limit;
    const float* from = matrix + (first + row) * stride + column + offset;
    uint32_t to = device::smem_address(shared + row * pitch + offset);
#pragma unroll
    for (int pass = 0; pass < kRowCount / kPassRows; ++pass) {
      bool valid = column_valid && first + row + pass * kPassRows < row_limit;
      device::cp_async16(to + pass * kPassRows * pitch * sizeof(float), from, valid);
      from += kPassRows * stride;
    }
  }

  // The order in which K and V pass through the ring: for each key tile from right to left, the
  // chunks of K, then the parts of V. While one stage is computed on, the next one is on its way.
  //
  //   stage 0   K chunk 0 | compute | V part 0 | compute | K chunk 0 of the next tile ...
  //   stage 1             | K chunk 1 | compute | V part 1 | compute ...
  template <class Walk>
  struct Ring {
    Walk walk;  // of the next load
    int chunks;
    int step = 0;   // 0..chunks-1: K, then V
    int stage = 0;  // of the next load

    __device__ void load_next(const Work& w, Shared& s) {
      if (walk.more()) {
        typename Shared::Stage& to = s.stages[stage];
        if (step < chunks) {
          load<kTileN, kChunk>(to.k[0], kChunk + kPad, w.k, w.k_stride, walk.tile * kTileN,
                               w.keys.used, step * kChunk, w.head_dim);
        } else {
          load<kPart, kHeadDim>(to.v[0], kHeadDim, w.v, w.v_stride,
                                walk.tile * kTileN + (step - chunks) * kPart, w.keys.used, 0,
                                w.head_dim_v);
        }
        if (++step == chunks + kPartsV) {
          step = 0;
          walk.next();
        }
      }
      device::cp_async_commit();
      stage ^= 1;
    }

    // The oldest load, complete for all threads; the barrier also means that nobody reads the other
    // stage any more.
    __device__ const typename Shared::Stage& take(const Work& w, Shared& s) {
      device::cp_async_wait<0>();
      __syncthreads();
      const typename Shared::Stage& ready = s.stages[stage ^ 1];
      load_next(w, s);
      return ready;
    }
  };

  // 4. Main loop: S = Q K^T, online softmax, O += P V.
  using Scores = float[kRows][kKeys];
  using Output = float[kRows][kGroups][4];
  struct State {
    Output out;
    float max[kRows], sum[kRows];  // max: of scores; sum: this lane's share
  };

  static __device__ int row_of(int i) {
    return threadIdx.x / 32 * (2 * kRows) + 2 * i + threadIdx.x % 32 / 16;
  }
  static __device__ int lane_x() { return threadIdx.x % 16; }
  static __device__ float4 read4(const float* shared) {
    return *reinterpret_cast<const float4*>(shared);
  }

  static __device__ void add_dots(Scores& scores, const Shared& s,
                                  const typename Shared::Stage& stage, int chunk, int dims) {
#pragma unroll 1
    for (int d = 0; d < dims; d += 4) {
      float4 k[kKeys];
#pragma unroll
      for (int j = 0; j < kKeys; ++j) k[j] = read4(&stage.k[lane_x() + 16 * j][d]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float4 q = read4(&s.q[row_of(i)][chunk * kChunk + d]);
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          scores[i][j] = fmaf(q.x, k[j].x, scores[i][j]);
          scores[i][j] = fmaf(q.y, k[j].y, scores[i][j]);
          scores[i][j] = fmaf(q.z, k[j].z, scores[i][j]);
          scores[i][j] = fmaf(q.w, k[j].w, scores[i][j]);
        }
      }
    }
  }

  // Where a lane's scores of a tile stand.
  struct Where {
    static constexpr int kRows = ForwardSimt::kRows, kKeys = ForwardSimt::kKeys;
    int32_t row0, first;
    __device__ Where(const Work& w, int32_t tile)
        : row0(w.row_begin + row_of(0)), first(tile * kTileN + lane_x()) {}
    __device__ int32_t row(int r) const { return row0 + 2 * r; }
    static __device__ constexpr int column(int j) { return 16 * j; }
    static __device__ float& at(Scores& scores, int r, int j) { return scores[r][j]; }
  };

  // Dropout: which of this lane's probabilities are kept, bit i * kKeys + j. A warp draws for its
  // own rows, and passes the bytes round in its own rows of P.
  static __device__ uint32_t find_kept(const device::HeadDropout& dropout, const Work& w, Shared& s,
                                       int32_t tile) {
    constexpr int kDraws = kTileN / 16;  // of a row
    static_assert(kRows * kKeys <= 32, "a bit each");
    for (int draw = threadIdx.x % 32; draw < 2 * kRows * kDraws; draw += 32) {
      int row = threadIdx.x / 32 * (2 * kRows) + draw / kDraws;
      PhiloxWords bytes = dropout.draw(w.row_begin + row, tile * kDraws + draw % kDraws);
      reinterpret_cast<PhiloxWords*>(s.p[row])[draw % kDraws] = bytes;
    }
    __syncwarp();
    uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(s.p[row_of(i)]) + lane_x();
#pragma unroll
      for (int j = 0; j < kKeys; ++j)
        kept |= uint32_t{bytes[16 * j] < dropout.params.threshold()} << (i * kKeys + j);
    }
    __syncwarp();  // before probabilities take the place of the bytes
    return kept;
  }

  // Times Z. The sums of the rows have all probabilities.
  static __device__ void drop(Shared& s, uint32_t kept, float factor) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        float& prob = s.p[row_of(i)][lane_x() + 16 * j];
        prob = kept >> (i * kKeys + j) & 1u ? prob * factor : 0.0f;
      }
    }
  }

  // Scores become probabilities relative to the running maximum, in shared memory; `rescale` takes
  // what was added up before to the new maximum. The rounding error of an exponent is that of a
  // difference, which is small where the probability is large, however large the scores.
  static __device__ void softmax(Scores& scores, float (&rescale)[kRows], State& state, Shared& s,
                                 float to_log2) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float max = scores[i][0];
#pragma unroll
      for (int j = 1; j < kKeys; ++j) max = fmaxf(max, scores[i][j]);
#pragma unroll
      for (int lane = 8; lane > 0; lane /= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lane));
      }
      max = fmaxf(max, state.max[i]);  // a NaN leaves the maximum and enters the sum
      // No key seen yet: 0 in place of -inf keeps -inf - -inf out of the exponents.
      float reference = max == device::negative_infinity() ? 0.0f : max;
      rescale[i] = device::exp2_approx((state.max[i] - reference) * to_log2);
      state.max[i] = max;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        float prob = device::exp2_approx((scores[i][j] - reference) * to_log2);
        sum += prob;
        s.p[row_of(i)][lane_x() + 16 * j] = prob;
      }
      state.sum[i] = fmaf(state.sum[i], rescale[i], sum);
    }
  }

  static __device__ void add_values(Output& out, const Shared& s,
                                    const typename Shared::Stage& stage, int part) {
#pragma unroll 1
    for (int key = 0; key < kPart; key += 4) {
      float p[kRows][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float4 four = read4(&s.p[row_of(i)][part * kPart + key]);
        p[i][0] = four.x, p[i][1] = four.y, p[i][2] = four.z, p[i][3] = four.w;
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          float4 v = read4(&stage.v[key + n][4 * lane_x() + 64 * g]);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            out[i][g][0] = fmaf(p[i][n], v.x, out[i][g][0]);
            out[i][g][1] = fmaf(p[i][n], v.y, out[i][g][1]);
            out[i][g][2] = fmaf(p[i][n], v.z, out[i][g][2]);
            out[i][g][3] = fmaf(p[i][n], v.w, out[i][g][3]);
          }
        }
      }
    }
  }

  static __device__ void clear(Output& out) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int c = 0; c < 4; ++c) out[i][g][c] = 0.0f;
      }
    }
  }

  static __device__ void attend(const AttentionParams& p, const Policy& policy, const Work& w,
                                Shared& s, State& state) {
    int32_t row_end = min(w.row_begin + kTileM, w.queries.used);
    auto walk = device::walk_of_part<kTileN>(policy, w.row_begin, row_end);
    if (!walk.more()) return;
    device::HeadDropout dropout(p, w.b, w.head);
    Ring<decltype(walk)> ring{walk, device::ceil_div(w.head_dim, kChunk)};
    load<kTileM, kHeadDim>(s.q[0], kHeadDim + kPad, w.q, w.q_stride, w.row_begin, w.queries.used, 0,
                           w.head_dim);
    ring.load_next(w, s);  // one group with Q
#pragma unroll 1
    for (; walk.more(); walk.next()) {
      Scores scores = {};
      float rescale[kRows];
#pragma unroll 1
      for (int chunk = 0; chunk < ring.chunks; ++chunk) {
        add_dots(scores, s, ring.take(w, s), chunk, min(kChunk, w.head_dim - chunk * kChunk));
      }
      device::apply_policy(policy, scores, Where(w, walk.tile), walk.masked());
      const bool drops = !Policy::kPlain && p.dropout.is_on();
      uint32_t kept = drops ? find_kept(dropout, w, s, walk.tile) : 0;
      softmax(scores, rescale, state, s, policy.to_log2);
      if (drops) drop(s, kept, dropout.params.factor());
      // Note: a tile is summed apart and then added, in the multiplication that rescales. One sum
      // over all keys would have several times the rounding error at 4096 keys.
      Output out;
      clear(out);
#pragma unroll 1
      for (int part = 0; part < kPartsV; ++part) {
        // The barrier in take() also lets the lanes of a warp see each other's probabilities.
        add_values(out, s, ring.take(w, s), part);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            state.out[i][g][c] = fmaf(state.out[i][g][c], rescale[i], out[i][g][c]);
          }
        }
      }
    }
  }

  // 5. Epilogue: normalise and store; a row without keys becomes 0 and -inf, as do stored rows past
  // the used ones.
  static __device__ void store(const AttentionParams& p, const Work& w, const State& state,
                               float to_log2) {
    const device::Finish finish(p.scores, w.head, device::counts_sink());
    const int64_t before = device::rows_before_part(p);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float sum = state.sum[i];
#pragma unroll
      for (int lane = 8; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
      int32_t row = w.row_begin + row_of(i);
      if (row >= w.queries.stored) continue;
      device::RowEnd end =
          finish.end(device::finite_product(state.max[i], to_log2), sum, row < w.queries.used);
      int64_t at = w.queries.start + row;
      float* out = static_cast<float*>(p.out) + w.b * p.out_strides.batch + at * p.out_strides.seq +
                   w.head * p.out_strides.head + before * p.head_dim_v;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        int column = 4 * lane_x() + 64 * g;
        if (column >= w.head_dim_v) continue;
        const float (&o)[4] = state.out[i][g];
        *reinterpret_cast<float4*>(out + column) =
            end.alive
                ? float4{o[0] * end.factor, o[1] * end.factor, o[2] * end.factor, o[3] * end.factor}
                : float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
      if (p.lse != nullptr && lane_x() == 0) {
        p.lse[w.b * p.lse_strides.batch + w.head * p.lse_strides.head + at * p.lse_strides.seq +
              before] = end.lse;
      }
    }
  }

  // 6. Kernel
  static __device__ __forceinline__ void run(const AttentionParams& p, void* memory) {
    Shared& shared = *static_cast<Shared*>(memory);
    Work work = find_work(p);
    if (work.row_begin >= work.queries.stored) return;
    State state;
    clear(state.out);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      state.max[i] = device::negative_infinity();
      state.sum[i] = 0.0f;
    }
    const Policy policy(p, work.b, work.head, work.queries.used, work.keys.used);
    attend(p, policy, work, shared, state);
    store(p, work, state, policy.to_log2);
  }
};

template <class Kernel, class Policy>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm)
    forward_simt(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  Kernel::run(p, dynamic_shared);
}

// 7. Launcher
#ifndef __CUDACC_RTC__
template <DType kType, int kHeadDim, int kHeadDimV, MaskKind kMask, ScoreKind kScore>
void launch_forward_simt(const AttentionLaunch& launch, cudaStream_t stream) {
  const AttentionParams& p = launch.params;
  static_assert(kType == DType::f32 && kHeadDim == kHeadDimV,
                "simt has float32 and square head dims");
  using Policy = device::OptionPolicy<DType::f32, kMask, kScore>;
  using Kernel = ForwardSimt<kHeadDim, Policy>;
  CUATTN_ASSERT(p.head_dim <= kHeadDim && p.head_dim_v <= kHeadDim, "simt: head dims ", p.head_dim,
                ", ", p.head_dim_v);
  int64_t blocks = int64_t{p.batch} * p.num_heads_q * device::ceil_div(p.seqlen_q, Kernel::kTileM);
  if (blocks == 0) return;
  static uint64_t opted_in = 0;
  constexpr int kSharedBytes = sizeof(typename Kernel::Shared);
  allow_shared_memory(forward_simt<Kernel, Policy>, kSharedBytes, opted_in);
  const AttentionSchedule& cut = launch.schedule;
  const bool splits = cut.num_splits > 1;
  forward_simt<Kernel, Policy>
      <<<dim3(grid_blocks(blocks, "simt"), cut.num_splits), Kernel::kThreads, kSharedBytes,
         stream>>>(splits ? as_parts(p, cut) : p);
  CUATTN_CUDA_TRY(cudaGetLastError());
  if (splits) merge_parts(p, cut, 0, stream);
}
#endif

}  // namespace cuattn
