// SPDX-License-Identifier: Apache-2.0
// The fused pass of the backward kernels on Hopper (sm_90a): five products of tiles where the two
// passes make seven, and in return dQ is summed in memory, in any order or in that of the keys
// (ordered.cuh). A CTA owns 128 keys of a KV head as in keys.cuh; besides, dx^T of a tile goes to
// shared memory, where both groups read it for dQ += dx K, and each adds its share to float32 sums
// in the workspace. Three kernels:
//
//   prepare  states of the rows; zeros for the sums; with an order, its counters
//   fused    | S^T  dP^T | P^T, dx^T -> shared | dV += P^T dO | meet | dQ = dx K   dK += dx^T Q | add dQ
//   finish   sums * scale -> dq
//
// The sums lie in the order of the accumulators, [tile][group][block of 8 columns][thread][4], so
// that a warp adds and reads 512 bytes at a time: adds of 4 floats from registers, which was faster
// than staging them for a bulk add. Where no sequence has more than 128 keys, a tile of dQ has one part:
// it leaves for dq at once, and there are no sums (nullptr) and no third kernel.
#pragma once

#include "cuda/backward/sm90/key_tiles.cuh"
#include "cuda/backward/sm90/ordered.cuh"
#include "cuda/backward/sm90/row_states.cuh"

namespace cuattn::backward {

template <DType kType, int kHeadDim, MaskKind kMask, ScoreForm kForm>
struct FusedPass : KeyTiles<kType, kHeadDim, kHeadDim, kMask, kForm, true> {
  using Base = KeyTiles<kType, kHeadDim, kHeadDim, kMask, kForm, true>;
  using typename Base::Shared;
  using typename Base::Work;
  static constexpr Tile kTile = Base::kTile;
  static_assert(kTile.n == 64 * kConsumers);
  // A group makes 64 x 64 of a tile of dQ: half of 128 rows, or half of 128 columns. Of 96 columns
  // the second group has 32: it runs code of its own.
  static constexpr bool kSharesRows = kTile.m == 128;
  static constexpr bool kIsUneven = kHeadDim % 64 != 0 && !kSharesRows;
  static constexpr int kColumnsOfSecond = kSharesRows ? 64 : kHeadDim - 64;
  static_assert(kTile.m == (kSharesRows ? 128 : 64) && kColumnsOfSecond % 16 == 0);
  static constexpr uint32_t kMeetBarrier = 1;
  static constexpr bool kStoresDq = sm90_stores_dq({kHeadDim, kHeadDim}, kForm);
  static constexpr bool kHelps = Base::kDrops || Base::kOrders;  // a warp beside the producer

  // dx^T as the accumulators hold it, keys x queries, to panels of 64 queries.
  static __device__ __forceinline__ void share_grads(uint32_t to, int group,
                                                     const uint32_t (&grads)[kTile.m / 4]) {
    const uint32_t thread = Base::kOrders && kTile.m == 128 ? fresh_thread() : threadIdx.x;
    const int lane = thread % 32;
    const int row = group * 64 + thread / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < kTile.m / 16; ++j) {
      const int chunk = (2 * (j % 4) + lane / 16) ^ (row % 8);
      device::stmatrix_x4(to + j / 4 * kTile.n * 128 + row * 128 + chunk * 16, grads[4 * j],
                          grads[4 * j + 1], grads[4 * j + 2], grads[4 * j + 3]);
    }
  }

  // dq (64 x kColumns) = dx K, both transposed in shared memory.
  template <int kColumns>
  static __device__ __forceinline__ void multiply_dq(float (&dq)[kColumns / 2], uint32_t grads,
                                                     uint32_t k, int group) {
    constexpr int kPanel = kTile.n * 128;
    const uint64_t a = device::wgmma_descriptor(grads + (kSharesRows ? group * kPanel : 0), kPanel);
    const uint64_t b = device::wgmma_descriptor(k + (kSharesRows ? 0 : group * kPanel), kPanel);
#pragma unroll
    for (int step = 0; step < kTile.n / 16; ++step) {
      device::Wgmma<kType, kColumns>::template ss<1, 1>(dq, device::advance(a, step * 2048),
                                                        device::advance(b, step * 2048), step != 0);
    }
  }

  // `to`: the sums of the tile, for this group and thread.
  template <int kCount>
  static __device__ __forceinline__ void add_dq(float* to, const float (&dq)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i * 512),
                   "f"(dq[4 * i]), "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                   : "memory");
    }
  }

  // `to`: the sums; nullptr: the tile of dQ has all its keys.
  template <int kColumns>
  static __device__ __forceinline__ void store_or_add_dq(const BackwardParams& p, const Work& work,
                                                         int32_t head, int32_t tile, int group,
                                                         float* to,
                                                         const float (&dq)[kColumns / 2]) {
    if (!kStoresDq || to != nullptr) return add_dq(to, dq);
    const AttentionParams& f = p.forward;
    const Strides& s = p.dq_strides;
    const int32_t thread = threadIdx.x % 128;
    const int32_t first = tile * kTile.m + (kSharesRows ? group * 64 : 0) + thread / 32 * 16;
    const int64_t base = work.batch * s.batch + head * s.head + work.queries.start * s.seq;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first + thread % 32 / 4 + 8 * half;
      store_row<kType, kColumns>(dq, half, f.scores.scale * Base::factor_of(f),
                                 static_cast<char*>(p.dq) + 2 * (base + row * s.seq),
                                 kSharesRows ? 0 : group * 64, f.head_dim, row < work.queries.used,
                                 row < work.queries.stored);
    }
  }

  // Keys behind the last one of the sequence may hold anything: their rows of K become zeros.
  static __device__ __forceinline__ void clear_keys(const Work& work, const Shared& shared,
                                                    int group) {
    device::barrier_wait(shared.q_full(0), 0);  // K comes with the first Q
    clear_tile<kTile.n, Base::kPanelsQk>(shared.k, work.keys.used - work.key0);
    finish_clearing(group);
  }

  // What a thread has of a tile.
  struct Fragments {
    float scores[kTile.m / 2], dout_v[kTile.m / 2];   // S^T, then P^T; dP^T, then dx^T
    uint32_t probs[kTile.m / 4], grads[kTile.m / 4];  // P^T and dx^T, packed
  };
  using Ring = device::Ring<kTile.stages>;

  // Waits for Q of a tile. Rows behind the last one of the sequence become zeros, of dO, too.
  static __device__ __forceinline__ void await_rows(const Work& work, const Shared& shared,
                                                    const Ring& ring, int tile, uint32_t q,
                                                    uint32_t dout, int group) {
    device::barrier_wait(shared.q_full(ring.stage()), ring.parity());
    if (work.clears && (tile + 1) * kTile.m > work.queries.used) {
      device::barrier_wait(shared.dout_full(ring.stage()), ring.parity());
      Base::clear_behind(work, q, dout, tile);
      finish_clearing(group);
    }
  }

  // S^T = K Q^T and dP^T = V dO^T, begun.
  static __device__ __forceinline__ void multiply_scores(const Shared& shared, const Ring& ring,
                                                         uint32_t k, uint32_t q, uint32_t v,
                                                         uint32_t dout, Fragments& x) {
    using namespace device;
    claim(x.scores);
    claim(x.dout_v);
    wgmma_fence();
    multiply_rows<kType, kHeadDim, kTile.n, kTile.m>(x.scores, k, q);
    wgmma_commit();
    barrier_wait(shared.dout_full(ring.stage()), ring.parity());
    wgmma_fence();
    multiply_rows<kType, kHeadDim, kTile.n, kTile.m>(x.dout_v, v, dout);
    wgmma_commit();
  }

  // P^T and dx^T, packed, as S^T and dP^T come.
  static __device__ __forceinline__ void weigh(const AttentionParams& f, const Work& work,
                                               const typename Base::Mod& mod, const Shared& shared,
                                               int stage, const typename Base::Sight& sight,
                                               int tile, bool masked, Fragments& x) {
    using namespace device;
    wgmma_wait<1>();
    pin(x.scores);
    Base::make_probs(x.scores, x.probs, f, work, mod, shared, stage, sight, tile, masked);
    wgmma_wait<0>();
    pin(x.dout_v);
    if constexpr (Base::kDrops && Base::kPacksLate)
      Base::kept_of(shared, stage).drop_all(x.dout_v);
    else if constexpr (Base::kDrops)
      Base::kept_of(shared, stage).drop_all(x.probs, x.dout_v);
    Base::make_grads(x.dout_v, x.scores, shared.delta(stage), masked);
    pack<kType>(x.grads, x.dout_v);
    if constexpr (Base::kPacksLate) {
      pack<kType>(x.probs, x.scores);
      if constexpr (Base::kDrops) Base::kept_of(shared, stage).drop_all(x.probs);
    }
  }

  // dx^T of keys behind the last one of the sequence, whose V may hold anything, becomes zeros.
  static __device__ __forceinline__ void clear_tail(const Work& work,
                                                    const typename Base::Sight& sight,
                                                    uint32_t (&grads)[kTile.m / 4]) {
#pragma unroll
    for (int i = 0; i < kTile.m / 4; ++i)
      if (sight.key + 8 * (i % 2) >= work.keys.used) grads[i] = 0;
  }

  // dV += P^T dO, begun.
  static __device__ __forceinline__ void add_values(uint32_t (&probs)[kTile.m / 4], uint32_t dout,
                                                    float (&dv)[kHeadDim / 2]) {
    using namespace device;
    pin(dv);
    pin(probs);
    wgmma_fence();
    add_weighted<kType, kHeadDim, kTile.m>(dv, probs, dout);
    wgmma_commit();
  }

  // dQ = dx K, of the keys of both groups, and dK += dx^T Q, begun.
  template <int kColumns>
  static __device__ __forceinline__ void multiply_grads(const Shared& shared, uint32_t shared_grads,
                                                        uint32_t q, int group,
                                                        uint32_t (&grads)[kTile.m / 4],
                                                        float (&dq)[kColumns / 2],
                                                        float (&dk)[kHeadDim / 2]) {
    using namespace device;
    claim(dq);
    pin(dk);
    pin(grads);
    wgmma_fence();
    multiply_dq<kColumns>(dq, shared_grads, shared.k, group);
    wgmma_commit();
    add_weighted<kType, kHeadDim, kTile.m>(dk, grads, q);
    wgmma_commit();
  }

  // All sums of a group of consumers. Note: a branch around a product would serialise all of them.
  // kColumns: of dQ.
  template <int kColumns>
  static __device__ __forceinline__ void gather(const BackwardParams& p, const Work& work,
                                                const RowStates& states, float* sums,
                                                const Shared& shared, int group,
                                                float (&dk)[kHeadDim / 2],
                                                float (&dv)[kHeadDim / 2]) {
    using namespace device;
    const AttentionParams& f = p.forward;
    const int32_t first_head = work.kv_head * work.group;
    const uint32_t k = shared.k + group * 64 * 128, v = shared.v + group * 64 * 128;
    const auto sight = Base::lane_sight(f, work, group * 64);
    const bool has_tail = work.key0 + kTile.n > work.keys.used;
    typename Base::Mod mod(f, 0, 0, 0, 0);
    Ring ring(0);
    [[maybe_unused]] device::Ring<2> own_parts(0);
    auto& parts = *[&] {  // of dQ: with two stages, as these go
      if constexpr (kTile.stages == 2)
        return &ring;
      else
        return &own_parts;
    }();
    Fragments x;
    uint32_t shared_grads = shared.crossing;
    auto release = [](uint32_t barrier) {
      if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    };
    if (has_tail) clear_keys(work, shared, group);
#pragma unroll 1
    for (int32_t outer = Base::kMixesHeads ? work.range.begin : first_head;
         outer < (Base::kMixesHeads ? work.range.end : first_head + work.group); ++outer) {
      const int32_t head = outer;
      float* to = sums +
                  (states.place(f, work.queries, work.batch, head) + work.range.begin * kTile.m) *
                      kHeadDim +
                  group * 64 * 64 + threadIdx.x % 128 * 4;
      if constexpr (kForm == ScoreForm::smooth) mod = typename Base::Mod(f, work.batch, head, 0, 0);
#pragma unroll 1
      for (int inner = Base::kMixesHeads ? 0 : work.range.begin;
           inner < (Base::kMixesHeads ? work.group : work.range.end); ++inner) {
        const int at = Base::kMixesHeads ? outer : inner;
        const int tile = Base::kLastRowsFirst ? work.range.begin + work.range.end - 1 - at : at;
        const int stage = ring.stage();
        const uint32_t q = shared.q_stage(stage), dout = shared.dout_stage(stage);
        await_rows(work, shared, ring, tile, q, dout, group);
        pin(dk);
        pin(dv);
        multiply_scores(shared, ring, k, q, v, dout, x);
        const bool masked = tile < work.range.full_begin || tile >= work.range.full_end;
        weigh(f, work, mod, shared, stage, sight, tile, masked, x);
        if (has_tail) clear_tail(work, sight, x.grads);
        if constexpr (Base::kOrders) barrier_wait(shared.crossing_empty(), parts.stage() ^ 1);
        share_grads(shared_grads, group, x.grads);
        async_proxy_fence();
        add_values(x.probs, dout, dv);
        named_barrier_sync(kMeetBarrier, 128 * kConsumers);  // dx^T of both groups is there
        float dq[kColumns / 2];
        multiply_grads<kColumns>(shared, shared_grads, q, group, x.grads, dq, dk);
        wgmma_wait<2>();
        pin(dv);
        pin(x.probs);
        release(shared.dout_empty(stage));
        wgmma_wait<1>();
        pin(dq);
        if constexpr (Base::kOrders) {
          release(shared.crossing_empty());
          hand_over_part(shared, parts, group, dq);
        } else {
          store_or_add_dq<kColumns>(p, work, head, tile, group, sums == nullptr ? nullptr : to, dq);
        }
        wgmma_wait<0>();
        pin(dk);
        pin(x.grads);
        release(shared.q_empty(stage));
        to += kTile.m * kHeadDim;
        if constexpr (!Base::kOrders)
          shared_grads ^= shared.crossing ^ (shared.crossing + Shared::kCrossingBytes);
        ring.next();
        if constexpr (Base::kOrders && kTile.stages != 2) parts.next();
      }
    }
  }

  static __device__ __forceinline__ void consume(const BackwardParams& p, const Work& work,
                                                 const RowStates& states, float* sums,
                                                 const Shared& shared, int group) {
    float dk[kHeadDim / 2], dv[kHeadDim / 2];
#pragma unroll
    for (float& x : dk) x = 0.0f;
#pragma unroll
    for (float& x : dv) x = 0.0f;
    if (work.range.begin < work.range.end) {
      if (kIsUneven && group == 1) {
        gather<kColumnsOfSecond>(p, work, states, sums, shared, group, dk, dv);
      } else {
        gather<64>(p, work, states, sums, shared, group, dk, dv);
      }
    }
    device::wait_for_previous_kernel();  // every CTA does: who waits for this kernel needs both
    const AttentionParams& f = p.forward;
    const float factor = Base::factor_of(f);
    Base::template store<kHeadDim>(dk, f.scores.scale * factor, p.dk, p.dk_strides, p.dk_dtype,
                                   work, group * 64, f.head_dim);
    Base::template store<kHeadDim>(dv, factor, p.dv, p.dv_strides, p.dv_dtype, work, group * 64,
                                   f.head_dim_v);
  }
};

template <class Pass>
__global__ void __launch_bounds__(kThreads, 1)
    fused_sm90_kernel(const __grid_constant__ BackwardParams params,
                      const __grid_constant__ RowStates states, float* sums,
                      const __grid_constant__ KeySchedule schedule,
                      const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char smem[];
  using Shared = typename Pass::Shared;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const Shared shared(smem);  // here: behind the branch its values would leave uniform registers
  int32_t* counters = Pass::kOrders ? counters_of<Pass>(params.forward, states, sums) : nullptr;
  int32_t item = static_cast<int32_t>(blockIdx.x);
  if constexpr (Pass::kOrders) item = draw_ticket(counters, smem, shared);
  const typename Pass::Work work(params.forward, schedule, item);
  if (work.key0 >= work.keys.stored) return device::wait_for_previous_kernel();
  if constexpr (Pass::kOrders) init_order_barriers(shared);
  shared.init_barriers();
  __syncthreads();
  if (group == 0) {
    device::registers_shrink<Registers<Pass::kHelps>::kOfProducer>();
    if (threadIdx.x < 32) {
      if (device::elect_one()) Pass::produce(params.forward, states, maps, work, shared);
    } else if constexpr (Pass::kOrders) {
      if (threadIdx.x == 32) Adder<Pass>{shared, counters}.run(params.forward, work, states, sums);
    } else if constexpr (Pass::kDrops) {
      if (int drawer = drawer_number(); drawer >= 0)
        Pass::draw(params.forward, work, shared, drawer);
    }
  } else {
    device::registers_grow<Registers<Pass::kHelps>::kOfConsumer>();
    Pass::consume(params, work, states, sums, shared, group - 1);
  }
}

// ---- Before and after: a CTA of 256 threads has 128 rows of a head, whole tiles.
struct RowBlock {
  RowsOfHead rows;
  int32_t row0;
  __device__ __forceinline__ RowBlock(const AttentionParams& f, int32_t blocks) {
    int32_t pair = blockIdx.x / blocks;
    rows = {pair / f.num_heads_q, pair % f.num_heads_q, {}};
    rows.queries = query_span(f, rows.batch);
    row0 = blockIdx.x % blocks * kRowPad;
  }
};
constexpr int kRowThreads = 256;

// Whether some row of a tile sees some key.
template <int kRows>
__device__ __forceinline__ bool has_parts(const AttentionParams& f, const RowsOfHead& rows,
                                          int32_t row0) {
  const Span keys = key_span(f, rows.batch);
  const int32_t end = min(row0 + kRows, rows.queries.used);
  const auto seen =
      device::tile_range<128>(f.mask.left, f.mask.right, row0, end, rows.queries.used, keys.used);
  return seen.begin < seen.end;
}

// Zeros for rows [begin, end) of dq.
__device__ __forceinline__ void clear_dq_rows(const BackwardParams& p, const RowsOfHead& rows,
                                              int32_t begin, int32_t end) {
  constexpr int kChunks = 16;  // of 8 columns, of a row at most
  const Strides& s = p.dq_strides;
  const int32_t chunk = threadIdx.x % kChunks;
  if (chunk * 8 >= p.forward.head_dim) return;
  uint16_t* dq = static_cast<uint16_t*>(p.dq) + rows.batch * s.batch + rows.head * s.head +
                 rows.queries.start * s.seq + chunk * 8;
#pragma unroll 1
  for (int32_t row = begin + threadIdx.x / kChunks; row < end; row += kRowThreads / kChunks)
    *reinterpret_cast<uint4*>(dq + row * s.seq) = uint4{};
}

template <DType kType, int kHeadDim>
__global__ void __launch_bounds__(kRowThreads)
    prepare_sm90_kernel(const __grid_constant__ BackwardParams params,
                        const __grid_constant__ RowStates states, float* sums, int32_t* counters,
                        int32_t blocks) {
  device::wait_for_previous_kernel();
  device::release_next_kernel();
  const RowBlock block(params.forward, blocks);
  if (counters != nullptr && blockIdx.x == 0 && threadIdx.x == 0) counters[0] = 0;
  if (block.row0 >= block.rows.queries.stored) return;
  const int64_t place =
      states.place(params.forward, block.rows.queries, block.rows.batch, block.rows.head) +
      block.row0;
  if (counters != nullptr && threadIdx.x < kRowPad / kOrderRows)
    counters[kOrderPad + place / kOrderRows + threadIdx.x] = 0;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int32_t row = block.row0 + 64 * half + static_cast<int32_t>(threadIdx.x) / 4;
    make_row_state<kType>(params, states, block.rows, row);
  }
  // With an order, or a single part, the first part of a tile is stored: only what has none needs zeros.
  const AttentionParams& f = params.forward;
  constexpr int kRows = FusedPass<kType, kHeadDim, MaskKind::none, ScoreForm::plain>::kTile.m;
#pragma unroll 1
  for (int32_t row0 = block.row0; row0 < block.row0 + kRowPad; row0 += kRows) {
    const bool has_first = counters != nullptr || sums == nullptr;
    if (has_first && has_parts<kRows>(f, block.rows, row0)) continue;
    if (sums == nullptr) {
      clear_dq_rows(params, block.rows, row0, min(row0 + kRows, block.rows.queries.stored));
      continue;
    }
    float4* to = reinterpret_cast<float4*>(sums + (place + row0 - block.row0) * kHeadDim);
    for (int i = threadIdx.x; i < kRows * kHeadDim / 4; i += kRowThreads) to[i] = float4{};
  }
}

template <DType kType, int kHeadDim>
__global__ void __launch_bounds__(kRowThreads)
    finish_sm90_kernel(const __grid_constant__ BackwardParams params,
                       const __grid_constant__ RowStates states, const float* sums,
                       int32_t blocks) {
  using Pass = FusedPass<kType, kHeadDim, MaskKind::none, ScoreForm::plain>;
  device::wait_for_previous_kernel();
  const AttentionParams& f = params.forward;
  const RowBlock block(f, blocks);
  const Span& queries = block.rows.queries;
  if (block.row0 >= queries.stored) return;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int64_t place = states.place(f, queries, block.rows.batch, block.rows.head) + block.row0;
  const Strides& s = params.dq_strides;
  const int64_t base =
      block.rows.batch * s.batch + block.rows.head * s.head + queries.start * s.seq;
#pragma unroll
  for (int tile = 0; tile < kRowPad / Pass::kTile.m; ++tile) {
    const float* from =
        sums + (place + tile * Pass::kTile.m) * kHeadDim + group * 64 * 64 + thread * 4;
    float dq[32];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool exists = group == 0 || i < Pass::kColumnsOfSecond / 8;
      const float4 x = exists ? *reinterpret_cast<const float4*>(from + i * 512) : float4{};
      dq[4 * i] = x.x;
      dq[4 * i + 1] = x.y;
      dq[4 * i + 2] = x.z;
      dq[4 * i + 3] = x.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = block.row0 + tile * Pass::kTile.m + (Pass::kSharesRows ? group * 64 : 0) +
                          thread / 32 * 16 + thread % 32 / 4 + 8 * half;
      store_row<kType, 64>(dq, half, f.scores.scale * f.dropout.factor(),
                           static_cast<char*>(params.dq) + 2 * (base + row * s.seq),
                           Pass::kSharesRows ? 0 : group * 64, f.head_dim, row < queries.used,
                           row < queries.stored);
    }
  }
}

}  // namespace cuattn::backward

namespace cuattn {

template <DType kType, int kHeadDim, MaskKind kMask, ScoreForm kForm>
void launch_fused_sm90(const BackwardLaunch& launch, const backward::RowStates& states,
                       cudaStream_t stream) {
  using Pass = backward::FusedPass<kType, kHeadDim, kMask, kForm>;
  const BackwardParams& p = launch.params;
  const AttentionParams& f = p.forward;
  const bool sums_dq = launch.schedule.num_chunks > 1;
  float* sums = sums_dq ? states.delta + states.pitch * f.num_heads_q : nullptr;
  int32_t* counters = Pass::kOrders ? backward::counters_of<Pass>(f, states, sums) : nullptr;
  const int32_t row_blocks = device::ceil_div(f.seqlen_q, kRowPad);
  const unsigned rows = grid_blocks(int64_t{f.batch} * f.num_heads_q * row_blocks, "sm90");
  if (rows > 0) {
    launch_overlapping(backward::prepare_sm90_kernel<kType, kHeadDim>, rows, backward::kRowThreads,
                       0, 9, stream, p, states, sums, counters, row_blocks);
  }
  const backward::KeySchedule schedule(f, Pass::kTile, kMask, Pass::kOrders);
  const unsigned blocks = grid_blocks(int64_t{schedule.pairs} * schedule.tiles, "sm90");
  if (blocks > 0) {
    auto* kernel = backward::fused_sm90_kernel<Pass>;
    static uint64_t allowed = 0;
    allow_shared_memory(kernel, Pass::kSmemBytes, allowed);
    launch_overlapping(kernel, blocks, backward::kThreads, Pass::kSmemBytes, rows > 0 ? 9 : 0,
                       stream, p, states, sums, schedule,
                       backward::make_maps(p, Pass::kTile.m, Pass::kTile.n, kForm));
  }
  if (rows > 0 && sums_dq) {
    launch_overlapping(backward::finish_sm90_kernel<kType, kHeadDim>, rows, backward::kRowThreads,
                       0, 9, stream, p, states, sums, row_blocks);
  }
}

}  // namespace cuattn
