// SPDX-License-Identifier: Apache-2.0
// The second kernel of paged attention: the partial results of each unit become its output, in key
// order, whoever wrote them. One block a row of up to 128 columns, its warps share the parts: all
// loads are on their way at once. It is launched so that it overlaps the first kernel and waits
// for its results. V2's reduction is the same sum over other arrays. Source:
// arXiv:2307.08691, section 3.1 (merging softmax states). Next: merge_states.cu (the same for whole
// tensors).
#include "cuattn/device/paged.cuh"
#include "launch.h"
#include "launchers.h"

namespace cuattn {
namespace {

using device::ceil_div;

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kColumns = 128;  // of a block, four a lane

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

// Columns first_column to first_column + 127 of one row.
template <DType kType, Parts kParts>
__device__ void combine_row(const PagedParams& p, const RowParts<kType, kParts>& parts,
                            int32_t count, int32_t b, const device::UnitRow& row,
                            int32_t first_column) {
  constexpr int kAhead = 8;  // parts that a warp loads at once
  __shared__ float4 warp_merged[kWarps][32];
  __shared__ float warp_sum[kWarps];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t column = first_column + lane * 4;
  float4 values[kAhead];
  float lses[kAhead];
  auto load = [&](int32_t first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int32_t part = first + i * kWarps;
      lses[i] = part < count ? parts.lse(part) : device::negative_infinity();
      values[i] = part < count && column < p.head_dim ? parts.values(part, column) : float4{};
    }
  };
  load(warp);
  float maximum = device::negative_infinity();  // a NaN leaves it and enters the sum
  for (int32_t part = lane; part < count; part += 32) maximum = fmaxf(maximum, parts.lse(part));
  maximum = device::warp_max(maximum);
  float reference = maximum == device::negative_infinity() ? 0.0f : maximum;

  float sum = 0.0f;
  float4 merged = {};
  auto add = [&](float weight, const float4& v) {
    // A part without keys: its values may be anything, even NaN.
    merged.x = weight == 0.0f ? merged.x : fmaf(weight, v.x, merged.x);
    merged.y = weight == 0.0f ? merged.y : fmaf(weight, v.y, merged.y);
    merged.z = weight == 0.0f ? merged.z : fmaf(weight, v.z, merged.z);
    merged.w = weight == 0.0f ? merged.w : fmaf(weight, v.w, merged.w);
  };
  for (int32_t first = warp; first < count;) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float weight = device::exp2_approx(lses[i] - reference);
      sum += weight;
      add(weight, values[i]);
    }
    first += kWarps * kAhead;
    if (first < count) load(first);
  }
  warp_merged[warp][lane] = merged;
  if (lane == 0) warp_sum[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
    sum += warp_sum[other];
    float4 v = warp_merged[other][lane];
    merged = {merged.x + v.x, merged.y + v.y, merged.z + v.z, merged.w + v.w};
  }
  device::RowOutput out =
      device::final_output(p, b, row, maximum, sum, lane == 0 && first_column == 0);
  float f = out.factor;  // 0 without a key, and then nothing was merged
  float4 scaled = {merged.x * f, merged.y * f, merged.z * f, merged.w * f};
  if (column < p.head_dim) store<kType>(out.to, column, scaled);
}

// Grid: units, rows of a unit, blocks of columns.
template <DType kType, Parts kParts>
__global__ void __launch_bounds__(kThreads) paged_combine(const __grid_constant__ PagedParams p) {
  const PagedWork& w = p.work;
  // The plan and the lengths were there before the kernel that is still running: no wait for them.
  Unit unit;
  bool found = find_unit(w, blockIdx.x, unit);
  device::release_next_kernel();
  device::wait_for_previous_kernel();
  if (!found) return;

  int32_t row = blockIdx.y;
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
  combine_row<kType, kParts>(p, parts, count, unit.b, at, blockIdx.z * kColumns);
}

template <DType kType>
void launch(const PagedParams& p, int32_t major, cudaStream_t stream) {
  const PagedWork& w = p.work;
  int64_t items = w.num_splits == 0 ? w.num_workers : int64_t{w.num_seqs} * head_groups(w);
  dim3 grid(grid_blocks(items, "combine"), w.rows, ceil_div(p.head_dim, kColumns));
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
