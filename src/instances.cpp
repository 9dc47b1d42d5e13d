// SPDX-License-Identifier: Apache-2.0
// The list that cmake/instances.cmake writes from cuda/instances.cmake, and the search in it.
#include "cuattn/instances.h"

#include <iterator>

#include "cuattn/error.h"

namespace cuattn {
namespace {

constexpr Instance kInstances[] = {
#define CUATTN_INSTANCE(op, kernel, dtype, head_dim, head_dim_v, mask, score, archs, function) \
  {Op::op, Kernel::kernel, DType::dtype, {head_dim, head_dim_v}, mask, score, archs},
#define CUATTN_ABSENT_INSTANCE CUATTN_INSTANCE
#include "instances.inc"
#undef CUATTN_ABSENT_INSTANCE
#undef CUATTN_INSTANCE
};
constexpr int32_t kCount = static_cast<int32_t>(std::size(kInstances));

template <class Axis>
constexpr int index(Axis value) {
  return static_cast<int>(value);
}

// Dtypes that kernels are compiled for, in order; what is missing here does not compile.
constexpr DType kOfKernels[] = {DType::f32, DType::f16, DType::bf16, DType::e4m3, DType::i8};
constexpr int kDTypes = std::size(kOfKernels);
constexpr int index(DType dtype) {
  int at = 0;
  while (at < kDTypes && kOfKernels[at] != dtype) ++at;
  return at;
}

constexpr int32_t columns(int32_t number) {
  return kInstances[number].dims.qk + kInstances[number].dims.v;
}

// The instances that differ in head sizes alone, smallest first: every call asks, so that nothing
// but these is looked at.
struct Sizes {
  static constexpr int kMost = 8;
  int16_t numbers[kMost], count;

  constexpr void insert(int16_t number) {
    int at = count++;  // more than kMost do not compile
    for (; at > 0 && columns(numbers[at - 1]) > columns(number); --at)
      numbers[at] = numbers[at - 1];
    numbers[at] = number;
  }
};

struct Index {
  static constexpr int kOps = std::size(kOpNames), kKernels = 8, kMasks = 4;
  static constexpr int kScores = 5;  // what is missing here does not compile
  Sizes sizes[kOps][kKernels][kDTypes][kMasks][kScores] = {};

  constexpr Index() {
    for (int16_t number = 0; number < kCount; ++number) {
      const Instance& i = kInstances[number];
      for (int mask = 0; mask < kMasks; ++mask) {
        for (int score = 0; score < kScores; ++score) {
          bool serves =
              (!i.mask || index(*i.mask) == mask) && (!i.score || index(*i.score) == score);
          if (serves) at(i.op, i.kernel, i.dtype)[mask][score].insert(number);
        }
      }
    }
    for (auto& of_op : sizes) {
      for (auto& of_kernel : of_op) {
        for (auto& masks : of_kernel) widen(masks);
      }
    }
  }
  // A window without limits is every mask but row ranges, and `causal` without its limit is none:
  // where no kernel is compiled for the narrower one, that of the wider one serves it.
  static constexpr void widen(Sizes (&masks)[kMasks][kScores]) {
    constexpr MaskKind kWider[][2] = {{MaskKind::causal, MaskKind::window},
                                      {MaskKind::none, MaskKind::causal}};
    for (const auto& [mask, wider] : kWider) {
      for (int score = 0; score < kScores; ++score) {
        Sizes& own = masks[index(mask)][score];
        if (own.count == 0) own = masks[index(wider)][score];
      }
    }
  }
  constexpr auto at(Op op, Kernel kernel, DType dtype) -> Sizes (&)[kMasks][kScores] {
    return sizes[index(op)][index(kernel)][index(dtype)];
  }
};

}  // namespace

int32_t find_instance(Op op, Kernel kernel, DType dtype, HeadDims dims, MaskKind mask,
                      ScoreKind score) {
  static constexpr Index kIndex;
  if (index(dtype) >= kDTypes) return kNoInstance;
  const Sizes& sizes =
      kIndex.sizes[index(op)][index(kernel)][index(dtype)][index(mask)][index(score)];
  for (int16_t at = 0; at < sizes.count; ++at) {
    HeadDims compiled = kInstances[sizes.numbers[at]].dims;
    if (dims.qk <= compiled.qk && dims.v <= compiled.v) return sizes.numbers[at];
  }
  return kNoInstance;
}

const Instance& instance_at(int32_t number) {
  CUATTN_ASSERT(number >= 0 && number < kCount, "instance ", number, " of ", kCount);
  return kInstances[number];
}

void list_instances(std::vector<KernelInfo>& list) {
  for (const Instance& i : kInstances) {
    if (i.archs[0] == '\0') continue;
    list.push_back({kOpNames[index(i.op)], kernel_name(i.kernel), i.archs, dtype_name(i.dtype),
                    i.dims.qk, i.dims.v, i.mask ? mask_name(*i.mask) : "any",
                    i.score ? score_name(*i.score) : "any"});
  }
}

}  // namespace cuattn
