// SPDX-License-Identifier: Apache-2.0
// What wgmma reads and writes in float8.cuh, and its products: S = Q K^T; O += P V with sums of one
// level; T = P V, which joins O, with two.
#pragma once

#include "cuattn/device/wgmma_float8_sm90.cuh"
#include "cuattn/device/wgmma_int8_sm90.cuh"
#include "cuda/attention/sm90/float8_maps.cuh"
#include "cuda/attention/sm90/float8_step.cuh"

namespace cuattn {

template <class Kernel>
struct ProductsFloat8 {
  static constexpr Tile kTile = Kernel::kTile;
  static constexpr int kHeadDim = Kernel::kQkColumns, kHeadDimV = Kernel::kVColumns;
  static constexpr bool kIsFast = Kernel::kIsFast, kCounts = Kernel::kCounts;
  static constexpr int kScoreCount = kTile.n / 2, kOutCount = kHeadDimV / 2;  // of a thread
  // Columns of a T that takes the registers of S; 0: there is none, or it has its own.
  // Note: with int8 128 columns would spill.
  static constexpr int kSlice = kIsFast || kHeadDimV <= 64          ? 0
                                : kHeadDimV <= 128 || Kernel::kInt8 ? 64
                                                                    : 128;
  static constexpr bool kTakesScores = kSlice > 0, kHasPart = !kIsFast && !kTakesScores;
  using Qk = device::Wgmma<Kernel::kCodes, kTile.n>;
  using Pv = device::Wgmma<DType::e4m3, kHeadDimV>;
  using Count = device::Wgmma<DType::e4m3, 8>;

  // 1. Registers and shared memory
  // What wgmma reads and writes: O, T, S, P in the order of an A operand, and the sums of P of a tile
  // (kCounts). T is `part` at head_dim 64 with sums of two levels, above it stands in `scores`
  // (add_slices); with one level products join O.
  struct Tiles {
    float out[kOutCount], part[kHasPart ? kOutCount : 1], scores[kScoreCount], counts[4];
    uint32_t probs[kScoreCount / 4];
    __device__ __forceinline__ float (&product()) [kOutCount] {
      if constexpr (kHasPart) {
        return part;
      } else {
        return out;
      }
    }
    // P of the 32 keys of a step.
    __device__ __forceinline__ const uint32_t (&operand(int step) const)[4] {
      return *reinterpret_cast<const uint32_t (*)[4]>(&probs[4 * step]);
    }
    // A product may begin, and has ended: registers that it reads, adds to, or writes anew.
    __device__ __forceinline__ void claim_product() {
      if constexpr (kHasPart) {
        device::claim(part);
      } else {
        device::pin(out);
      }
      if constexpr (kCounts) device::claim(counts);
      device::pin(probs);
    }
    __device__ __forceinline__ void pin_product() {
      device::pin(product());
      if constexpr (kCounts) device::pin(counts);
      device::pin(probs);
    }
  };

  // What wgmma reads, by descriptors of the first stages.
  struct Operands {
    uint64_t q, k, v, ones;
    __device__ __forceinline__ Operands(const typename Kernel::Shared& shared, int group)
        : q(device::wgmma_descriptor(shared.q + group * 64 * 128, 0)),
          k(device::wgmma_descriptor(shared.k, 0)),
          v(device::wgmma_descriptor(shared.v, 0)),
          ones(device::wgmma_descriptor(shared.ones, 0)) {}
  };

  // 2. Products, begun
  // S = Q K^T of the stages at which the rings stand. `zero`: behind add_slices a 0 that the compiler does
  // not know; see the note there.
  static __device__ __forceinline__ void multiply_qk(const Operands& from, const auto& at,
                                                     float (&scores)[kScoreCount],
                                                     float zero = 0.0f) {
    using namespace device;
    const uint64_t a = advance(from.q, uniform(at.q_ring.stage() * Kernel::kQBytes));
    const uint64_t b = advance(from.k, uniform(at.ring.stage() * Kernel::kKBytes));
    if constexpr (Kernel::kInt8) {  // sums of int8 are numbers as soon as they are there
#pragma unroll
      for (float& score : scores) score = kInt8Offset;
      pin(scores);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 32; ++step) {
      Qk::ss(scores, advance(a, step / 4 * kTile.m * 128 + step % 4 * 32),
             advance(b, step / 4 * kTile.n * 128 + step % 4 * 32),
             Kernel::kInt8 || step > 0 ? 1 : __float_as_int(zero));
    }
    wgmma_commit();
  }

  // T = P V or O += P V, and the sums of P: its product with ones.
  static __device__ __forceinline__ void multiply_pv(const Operands& from, int stage,
                                                     Tiles& tiles) {
    using namespace device;
    const uint64_t b = advance(from.v, uniform(stage * Kernel::kVBytes));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile.n / 32; ++step) {
      Pv::rs(tiles.product(), tiles.operand(step),
             advance(b, step / 4 * Kernel::kVPanelBytes + step % 4 * 32), kIsFast || step != 0);
    }
    if constexpr (kCounts) {
#pragma unroll
      for (int step = 0; step < kTile.n / 32; ++step)
        Count::rs(tiles.counts, tiles.operand(step), from.ones, step != 0);
    }
    wgmma_commit();
  }

  // 3. O += P V by T, kColumns columns at a time, in the registers of S.
  //
  // Note: ptxas gives a product registers of its own if it knows that it begins at zero, and moves the
  // additions behind the next product: then hundreds of bytes spill. With a zero that only we know a
  // product seems to add to what its registers hold, so that they have to be read before.
  template <int kColumns>
  static __device__ __forceinline__ void add_slices(const Operands& from, int stage, Tiles& tiles,
                                                    float zero) {
    using namespace device;
    using Product = device::Wgmma<DType::e4m3, kColumns>;
    const uint64_t b = advance(from.v, uniform(stage * Kernel::kVBytes));
    auto& part = *reinterpret_cast<float (*)[kColumns / 2]>(tiles.scores);
    static_assert(kColumns / 2 <= kScoreCount && kHeadDimV % kColumns == 0);
    pin(tiles.scores);
    pin(tiles.probs);
#pragma unroll
    for (int first = 0; first < kHeadDimV; first += kColumns) {
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTile.n / 32; ++step) {
        const int at = step / 4 * Kernel::kVPanelBytes + first * 128 + step % 4 * 32;
        Product::rs(part, tiles.operand(step), advance(b, at),
                    step == 0 ? __float_as_int(zero) : 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(part);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) tiles.out[first / 2 + i] += part[i];
    }
    pin(tiles.probs);
  }
};

}  // namespace cuattn
