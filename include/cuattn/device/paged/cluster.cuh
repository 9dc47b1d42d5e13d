// SPDX-License-Identifier: Apache-2.0
// Parts of the keys of a unit are weighed by themselves and merged in key order, without a second
// kernel. By a cluster: each thread block leaves its part in its shared memory, and all of them
// merge what is there. Or by one block that has them one after another; the arithmetic is the same,
// to the bit. Source: arXiv:2307.08691, section 3.1 (merging softmax states). Next:
// combine.cuh (merging through memory), cuda/paged/sm90/decode.cuh (its only user).
//
//   block 0      keys of part 0 | part 0 |         | its share of the elements |
//   block 1      keys of part 1 | part 1 | cluster | its share of the elements | cluster
//   ...                                  |  _sync  |   reads parts 0, 1, ...   |  _sync
#pragma once

#include "cuattn/device/mma_sm90.cuh"
#include "cuattn/device/paged/tasks.cuh"

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

// What one row has of all parts so far: the maximum (base 2) and the sum relative to it.
struct MergedRow {
  float maximum = negative_infinity(), sum = 0.0f;

  struct Weights {
    float so_far, part;
  };
  __device__ __forceinline__ Weights add(float part_maximum, float part_sum) {
    float larger = fmaxf(maximum, part_maximum);
    // A row that no part has seen keeps -inf, as in the kernel.
    float reference = larger == negative_infinity() ? 0.0f : larger;
    Weights w{exp2_approx(maximum - reference), exp2_approx(part_maximum - reference)};
    maximum = larger;
    sum = fmaf(w.part, part_sum, __fmul_rn(w.so_far, sum));
    return w;
  }
  // A part without keys: its values may be anything, even NaN.
  static __device__ __forceinline__ float value(Weights w, float so_far, float part) {
    so_far = __fmul_rn(w.so_far, so_far);
    return w.part == 0.0f ? so_far : fmaf(w.part, part, so_far);
  }
};

// Each thread of each block merges elements of the unit, one at a time.
template <DType kType, int kHeadDim, int kMostParts>
__device__ __forceinline__ void merge_cluster(const PagedParams& p, const KeyTask& task,
                                              const ClusterParts& parts, int rank, int threads) {
  const PagedWork& w = p.work;
#pragma unroll 1
  for (int i = rank * threads + threadIdx.x; i < w.rows * kHeadDim; i += w.cluster * threads) {
    int row = i / kHeadDim, column = i % kHeadDim;
    float2 sums[kMostParts];  // maximum, sum
    float values[kMostParts];
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      sums[part] = {negative_infinity(), 0.0f};
      values[part] = 0.0f;
      if (part >= w.cluster) continue;
      sums[part] = load_cluster2(in_block(parts.sum(row), part));
      values[part] = load_cluster(in_block(parts.value(row, column), part));
    }
    MergedRow merged;
    float value = 0.0f;
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      value = MergedRow::value(merged.add(sums[part].x, sums[part].y), value, values[part]);
    }
    UnitRow at = unit_row(p, task.b, task.kv_head, task.row0, row);
    if (!at.valid || column >= p.head_dim) continue;
    RowOutput output = task_output(p, task, at, row, merged.maximum, merged.sum, column == 0);
    value = output.factor == 0.0f ? 0.0f : value * output.factor;
    if (output.type == DType::f32) {
      static_cast<float*>(output.to)[column] = value;
    } else {
      static_cast<Element<kType>*>(output.to)[column] = from_float<Element<kType>>(value);
    }
  }
}

}  // namespace cuattn::device
