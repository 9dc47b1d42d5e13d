// SPDX-License-Identifier: Apache-2.0
// Paged attention of one unit by a cluster: each thread block has one split of the keys and leaves
// its part in its shared memory, and all of them merge the parts, without a second kernel. The sum
// is in key order. Source: arXiv:2307.08691, section 3.1 (merging softmax states). Next:
// paged_combine.cuh (the same through memory), cuda/paged_sm90.cuh (its only user).
//
//   block 0      keys of split 0 | part 0 |         | its share of the elements |
//   block 1      keys of split 1 | part 1 | cluster | its share of the elements | cluster
//   ...                                   |  _sync  |   reads parts 0, 1, ...   |  _sync
#pragma once

#include "cuattn/device/mma_sm90.cuh"
#include "cuattn/device/paged.cuh"

namespace cuattn::device {

// Where a part lies in shared memory: of each row the maximum (base 2) and the sum, 16 bytes apart,
// and the values, not divided by the sum.
struct ClusterParts {
  uint32_t values, sums;
  int row_bytes;  // of values
  __device__ uint32_t sum(int row) const { return sums + row * 16; }
  __device__ uint32_t value(int row, int column) const {
    return values + row * row_bytes + column * 4;
  }
};

// Of the elements of the unit each thread of each block merges one at a time.
template <DType kType, int kHeadDim, int kMostParts>
__device__ __forceinline__ void merge_cluster(const PagedParams& p, const PagedItem& item,
                                              const ClusterParts& parts, int threads) {
  using T = Element<kType>;
  const PagedWork& w = p.work;
  const int32_t kv_head = item.head_group / w.row_groups;
  const int32_t row0 = (item.head_group - kv_head * w.row_groups) * w.rows;
#pragma unroll 1
  for (int i = item.split * threads + threadIdx.x; i < w.rows * kHeadDim;
       i += w.num_splits * threads) {
    int row = i / kHeadDim, column = i % kHeadDim;
    float2 sums[kMostParts];  // maximum, sum
    float values[kMostParts];
    float maximum = negative_infinity();
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      sums[part] = {negative_infinity(), 0.0f};
      values[part] = 0.0f;
      if (part >= w.num_splits) continue;
      sums[part] = load_cluster2(in_block(parts.sum(row), part));
      values[part] = load_cluster(in_block(parts.value(row, column), part));
    }
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) maximum = fmaxf(maximum, sums[part].x);
    // A row that no part has seen keeps -inf, as in the kernel.
    float reference = maximum == negative_infinity() ? 0.0f : maximum;
    float sum = 0.0f, value = 0.0f;
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      float weight = exp2_approx(sums[part].x - reference);
      sum = fmaf(weight, sums[part].y, sum);
      // A part without keys: its values may be anything, even NaN.
      value = weight == 0.0f ? value : fmaf(weight, values[part], value);
    }
    UnitRow at = unit_row(p, item.b, kv_head, row0, row);
    if (!at.valid || column >= p.head_dim) continue;
    RowOutput output = final_output(p, item.b, at, maximum, sum, column == 0);
    value = output.factor == 0.0f ? 0.0f : value * output.factor;
    static_cast<T*>(output.to)[column] = from_float<T>(value);
  }
}

}  // namespace cuattn::device
