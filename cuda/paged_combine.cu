// SPDX-License-Identifier: Apache-2.0
// The second kernel of paged attention: the partial results of each unit become its output, in key
// order, whoever wrote them. One warp a row. It is launched so that it overlaps the first kernel
// and waits for its results. V2's reduction is the same sum over other arrays. Source:
// arXiv:2307.08691, section 3.1 (merging softmax states). Next: merge_states.cu (the same for whole
// tensors).
#include "cuattn/device/paged.cuh"
#include "launch.h"
#include "launchers.h"

namespace cuattn {
namespace {

using device::ceil_div;

constexpr int kThreads = 128, kRowsPerBlock = kThreads / 32;
constexpr int kMaxColumns = 256;

// The parts of a unit: from kPartial slots, or V2's partitions.
enum class Parts { partial, partitions };

// Which unit block `item` of the grid's first axis merges. With a plan the item is the worker that
// holds a unit's second part, so each unit that is cut is found once; without, it is the unit.
struct Unit {
  int32_t b, head_group;
  PagedSlots slots;
};

__device__ bool find_unit(const PagedWork& w, int64_t item, Unit& unit) {
  if (w.num_splits != 0) {
    unit.b = static_cast<int32_t>(item / head_groups(w));
    unit.head_group = static_cast<int32_t>(item % head_groups(w));
    unit.slots = paged_slots(w, unit.b, unit.head_group);
    return true;
  }
  const int32_t* entry = w.plan + PagedPlan::worker(item);
  unit.head_group = entry[PagedPlan::kWorkerHead];
  unit.b = entry[PagedPlan::kWorkerSeq];
  if (entry[PagedPlan::kWorkerCount] <= 0 || entry[PagedPlan::kWorkerTile] <= 0 || unit.b < 0 ||
      unit.b >= w.num_seqs || unit.head_group < 0 || unit.head_group >= head_groups(w)) {
    return false;
  }
  unit.slots = paged_slots(w, unit.b, unit.head_group);
  return unit.slots.second == 2 * item && unit.slots.first >= 0 &&
         unit.slots.slot(unit.slots.count - 1) < num_paged_slots(w);
}

template <DType kType, Parts kParts>
struct RowParts {
  const PagedParams& p;
  PagedSlots slots;
  int32_t row;         // partial: within the unit
  int64_t first_part;  // partitions

  __device__ int64_t index(int32_t part) const {
    if constexpr (kParts == Parts::partial) return slots.slot(part) * p.work.rows + row;
    return first_part + part;
  }
  // Log-sum-exp in base 2.
  __device__ float lse(int32_t part) const {
    int64_t at = index(part);
    if constexpr (kParts == Parts::partial) return p.partial_lse[at];
    return fmaf(p.max_logits[at], device::kLog2e, device::log2_approx(p.exp_sums[at]));
  }
  // Four columns of the normalised output.
  __device__ float4 values(int32_t part, int32_t column) const {
    int64_t at = index(part) * p.head_dim + column;
    if constexpr (kParts == Parts::partial || kType == DType::f32) {
      const void* from = kParts == Parts::partial ? p.partial_out : p.tmp_out;
      return *reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
    } else {
      using T = device::Element<kType>;
      struct alignas(8) Four {
        T x[4];
      };
      Four four = *reinterpret_cast<const Four*>(static_cast<const T*>(p.tmp_out) + at);
      return {device::to_float(four.x[0]), device::to_float(four.x[1]), device::to_float(four.x[2]),
              device::to_float(four.x[3])};
    }
  }
};

template <DType kType>
__device__ void store(void* to, int32_t column, const float4& v) {
  if constexpr (kType == DType::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(to) + column) = v;
  } else {
    uint2 packed = {device::pack2<kType>(v.x, v.y), device::pack2<kType>(v.z, v.w)};
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(to) + column) = packed;
  }
}

template <DType kType, Parts kParts>
__device__ void combine_row(const PagedParams& p, const RowParts<kType, kParts>& parts,
                            int32_t count, int32_t b, const device::UnitRow& row) {
  constexpr int kPasses = kMaxColumns / 128;  // a warp takes 128 columns at once, 4 a lane
  int lane = threadIdx.x % 32;
  float maximum = device::negative_infinity();  // a NaN leaves it and enters the sum
  for (int32_t part = lane; part < count; part += 32) maximum = fmaxf(maximum, parts.lse(part));
  maximum = device::warp_max(maximum);
  float reference = maximum == device::negative_infinity() ? 0.0f : maximum;

  float sum = 0.0f;
  float4 merged[kPasses] = {};
  for (int32_t first = 0; first < count; first += 32) {
    int32_t here = min(count - first, 32);
    float weights = lane < here ? device::exp2_approx(parts.lse(first + lane) - reference) : 0.0f;
    sum += weights;
#pragma unroll 4
    for (int32_t i = 0; i < here; ++i) {
      float weight = __shfl_sync(0xffffffffu, weights, i);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        int32_t column = pass * 128 + lane * 4;
        if (column >= p.head_dim) continue;
        float4 v = parts.values(first + i, column);
        if (weight == 0.0f) v = {};  // a part without keys: its values may be anything, even NaN
        merged[pass].x = fmaf(weight, v.x, merged[pass].x);
        merged[pass].y = fmaf(weight, v.y, merged[pass].y);
        merged[pass].z = fmaf(weight, v.z, merged[pass].z);
        merged[pass].w = fmaf(weight, v.w, merged[pass].w);
      }
    }
  }
  sum = device::warp_sum(sum);
  device::RowOutput out = device::final_output(p, b, row, maximum, sum, lane == 0);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    int32_t column = pass * 128 + lane * 4;
    if (column >= p.head_dim) continue;
    float4 v = merged[pass];
    float f = out.factor;  // 0 without a key, and then nothing was merged
    store<kType>(out.to, column, {v.x * f, v.y * f, v.z * f, v.w * f});
  }
}

template <DType kType, Parts kParts>
__global__ void __launch_bounds__(kThreads, 8)
    paged_combine(const __grid_constant__ PagedParams p) {
  const PagedWork& w = p.work;
  // The plan and the lengths were there before the kernel that is still running: no wait for them.
  Unit unit;
  bool found = find_unit(w, blockIdx.x, unit);
  device::wait_for_previous_kernel();
  int32_t row = blockIdx.y * kRowsPerBlock + threadIdx.x / 32;
  if (!found || row >= w.rows) return;

  device::UnitRow at = device::unit_row(w, unit.head_group / w.row_groups,
                                        unit.head_group % w.row_groups * w.rows, row);
  if (!at.valid) return;
  RowParts<kType, kParts> parts{p, unit.slots, row, 0};
  int32_t count = unit.slots.count;
  if constexpr (kParts == Parts::partitions) {
    PagedSpan span = paged_span(w, unit.b);
    PagedSplits splits = paged_splits(w, span);
    parts.first_part = (int64_t{unit.b} * p.num_heads_q + at.head) * w.num_splits + splits.first;
    count = span.end > span.begin ? splits.count : 0;
  } else if (count <= 1) {
    return;  // the unit was written whole
  }
  combine_row<kType, kParts>(p, parts, count, unit.b, at);
}

template <DType kType>
void launch(const PagedParams& p, int32_t major, cudaStream_t stream) {
  const PagedWork& w = p.work;
  int64_t items = w.num_splits == 0 ? w.num_workers : int64_t{w.num_seqs} * head_groups(w);
  dim3 grid(grid_blocks(items, "combine"), ceil_div(w.rows, kRowsPerBlock));
  if (p.exp_sums != nullptr) {
    launch_overlapping(paged_combine<kType, Parts::partitions>, grid, kThreads, 0, major, stream,
                       p);
  } else {
    launch_overlapping(paged_combine<kType, Parts::partial>, grid, kThreads, 0, major, stream, p);
  }
}

}  // namespace

void launch_paged_combine(const PagedParams& p, int32_t major, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::f32: return launch<DType::f32>(p, major, stream);
    case DType::f16: return launch<DType::f16>(p, major, stream);
    case DType::bf16: return launch<DType::bf16>(p, major, stream);
    default: CUATTN_ASSERT(false, "paged_attention: dtype ", static_cast<int>(p.dtype));
  }
}

}  // namespace cuattn
