// SPDX-License-Identifier: Apache-2.0
// The policy of a functor in the passes of the backward kernels. Beside what functor.cuh asks for a
// functor has
//
//   derivative(score, place, params)            d score function / d score
//   kGives, give(ds, score, place, params)      adds to the gradients of captured arrays
//
// Next: cuda/backward/sm80/queries.cuh and cuda/backward/simt/passes.cuh, whose passes of queries
// give; python/cuattn/flex/emit_backward.py.
#pragma once

#include "cuattn/device/functor.cuh"

namespace cuattn::device {

// 1. What functors call: `value` is added to the element of an array's gradient that a load reads.
// All lanes of a warp come here; where they add to one element, one lane does it for all.
__device__ __forceinline__ void add_gradient(const FlexArrayGradient& to, int64_t offset,
                                             float value) {
  int32_t lane = threadIdx.x % 32;
  int64_t first = __shfl_sync(0xffffffffu, offset, 0);
  if (__all_sync(0xffffffffu, offset == first)) {
    value = warp_sum(value);
    if (lane != 0) value = 0.0f;
  }
  if (value != 0.0f) atomicAdd(to.data + offset, value);  // NaN is added, too
}

__device__ __forceinline__ int64_t gradient_offset(const FlexArray& array,
                                                   const FlexArrayGradient& to, int axis,
                                                   int32_t at) {
  return min(max(at, 0), array.extents[axis] - 1) * to.strides[axis];
}
__device__ __forceinline__ void add(const FlexArray&, const FlexArrayGradient& to, float value) {
  add_gradient(to, 0, value);
}
__device__ __forceinline__ void add(const FlexArray& array, const FlexArrayGradient& to,
                                    float value, int32_t x) {
  add_gradient(to, gradient_offset(array, to, 0, x), value);
}
__device__ __forceinline__ void add(const FlexArray& array, const FlexArrayGradient& to,
                                    float value, int32_t x, int32_t y) {
  add_gradient(to, gradient_offset(array, to, 0, x) + gradient_offset(array, to, 1, y), value);
}

// 2. The policy
template <DType kType, class Functor>
struct GradientPolicy : FunctorPolicy<kType, Functor> {
  // A pass that walks no lists, or meets tiles of several blocks, asks the mask function.
  static_assert(!Functor::kLists || Functor::kMask, "lists of blocks need a mask function");
  using Base = FunctorPolicy<kType, Functor>;
  static constexpr bool kGives = Functor::kGives;
  using Base::Base, Base::given, Base::b, Base::h;

  // What has no weight gives nothing, whatever the derivative is there.
  __device__ __forceinline__ float through(float ds, float dot, int32_t row, int32_t key) const {
    float dx = ds * ScoreMod<kType, ScoreKind::scored>::derivative(dot);
    if constexpr (Functor::kScore)
      dx *= Functor::derivative(this->capped_score(dot), this->place(row, key), given);
    return ds == 0.0f ? 0.0f : dx;
  }
  __device__ __forceinline__ void give(float ds, float dot, int32_t row, int32_t key) const {
    Functor::give(ds, this->capped_score(dot), this->place(row, key),
                  static_cast<const FunctorGradientParams&>(given));
  }

  // Whether lists leave a tile of queries and keys, which begins there and lies within a block;
  // `masked` learns whether it is to be asked. The lanes of a warp share the entries out.
  __device__ __forceinline__ bool lists(int32_t row, int32_t key, bool& masked) const {
    if constexpr (Functor::kLists) {
      const FlexLists& lists = given.lists;
      const int32_t* starts =
          lists.starts + b * lists.stride_batch + h * lists.stride_head + row / lists.query_block;
      int32_t block = key / lists.key_block;
      bool is_listed = false, is_asked = false;
      for (int32_t at = starts[0] + threadIdx.x % 32; at < starts[1]; at += 32) {
        int32_t entry = lists.entries[at];
        is_listed |= entry >> 1 == block;
        is_asked |= entry >> 1 == block && (entry & 1) != 0;
      }
      masked |= __any_sync(0xffffffffu, is_asked);
      return __any_sync(0xffffffffu, is_listed);
    }
    masked |= Functor::kMask;
    return true;
  }

  // The same of a tile of rows [row, row_end) that may lie in several blocks of queries.
  __device__ __forceinline__ bool lists(int32_t row, int32_t row_end, int32_t key,
                                        bool& masked) const {
    if constexpr (!Functor::kLists) return lists(row, key, masked);
    bool some = false, all = true;
    for (; row < row_end; row = (row / given.lists.query_block + 1) * given.lists.query_block) {
      bool is_listed = lists(row, key, masked);
      some |= is_listed;
      all &= is_listed;
    }
    masked |= !all;
    return some;
  }
};

}  // namespace cuattn::device
