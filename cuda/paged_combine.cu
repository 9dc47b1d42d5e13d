// SPDX-License-Identifier: Apache-2.0
// The second kernel of paged attention: the partial results of each unit become its output, in key
// order, whoever wrote them. One block a row of up to 128 columns. It is launched so that it
// overlaps the first kernel and waits for its results. V2's reduction is the same sum over other
// arrays. Next: device/paged_combine.cuh (the sum), merge_states.cu (the same for whole tensors).
#include "cuattn/device/paged_combine.cuh"
#include "launch.h"
#include "launchers.h"

namespace cuattn {
namespace {

using device::ceil_div;
using device::Parts;

constexpr int kThreads = device::kCombineWarps * 32;

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

// Grid: units, rows of a unit, blocks of columns.
template <DType kType, Parts kParts>
__global__ void __launch_bounds__(kThreads) paged_combine(const __grid_constant__ PagedParams p) {
  const PagedWork& w = p.work;
  // The plan and the lengths were there before the kernel that is still running: no wait for them.
  Unit unit;
  device::release_next_kernel();
  bool found = find_unit(w, blockIdx.x, unit);
  device::wait_for_previous_kernel();
  if (!found) return;

  __shared__ device::CombineShared shared;
  int32_t row = blockIdx.y;
  device::UnitRow at = device::unit_row(p, unit.b, unit.head_group / w.row_groups,
                                        unit.head_group % w.row_groups * w.rows, row);
  int32_t count = unit.slots.count;
  if (!at.valid || count <= 1) return;  // one part: the unit was written whole
  device::RowParts<kType, kParts> parts{p, unit.slots, row, 0};
  if constexpr (kParts == Parts::partitions) {
    int32_t first = paged_splits(w, paged_span(w, unit.b)).first;
    parts.first_part = (int64_t{unit.b} * p.num_heads_q + at.head) * w.num_splits + first;
  }
  int32_t first_column = blockIdx.z * device::kCombineColumns;
  device::CombineShare<kType, kParts>(p, parts, count, first_column).put(shared);
  __syncthreads();
  if (threadIdx.x < 32) device::finish_row<kType>(p, shared, unit.b, at, first_column);
}

template <DType kType>
void launch(const PagedParams& p, int32_t major, cudaStream_t stream) {
  const PagedWork& w = p.work;
  int64_t items = w.num_splits == 0 ? w.num_workers : int64_t{w.num_seqs} * head_groups(w);
  dim3 grid(grid_blocks(items, "combine"), w.rows, ceil_div(p.head_dim, device::kCombineColumns));
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
