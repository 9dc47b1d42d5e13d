// SPDX-License-Identifier: Apache-2.0
// The second kernel of paged attention: the partial results of each unit become its output, in key
// order, whoever wrote them. One block a row of up to 128 columns; where rows are many and have few
// parts, one warp, and the same sum. It is launched so that it overlaps the first kernel and waits
// for its results. V2's reduction is the same sum over other arrays. Next:
// device/paged/combine.cuh (the sum), merge/states.cu (the same for whole tensors).
#include "cuattn/device/paged/combine.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using device::ceil_div;
using device::Parts;

constexpr int kThreads = device::kCombineWarps * 32;
constexpr int kFewParts = 8;  // a warp has them all on their way at once
// 80 registers: two blocks wait beside those of the first kernel, which leave 22,000.
constexpr int kBlocksPerSm = 6;

// Which unit block `item` of the grid's first axis merges. With a deal and more units than half of
// the workers the item is the worker that holds a unit's second part, so each unit that is cut is found
// once; else it is the unit.
struct Unit {
  int32_t b, head_group;
  PagedSlots slots;
};

// To see that a unit is not cut takes divisions, that a worker holds no second part none.
CUATTN_HOST_DEVICE bool has_items_of_workers(const PagedWork& w) {
  return w.num_splits == 0 && int64_t{w.num_seqs} * head_groups(w) * 2 > w.num_workers;
}

__device__ bool find_unit(const PagedWork& w, int64_t item, Unit& unit) {
  if (!has_items_of_workers(w)) {
    unit.b = static_cast<int32_t>(item / head_groups(w));
    unit.head_group = static_cast<int32_t>(item % head_groups(w));
    unit.slots = paged_slots(w, unit.b, unit.head_group);
    // Whatever the deal holds, no part lies outside the buffers.
    return unit.slots.first >= 0 && unit.slots.slot(unit.slots.count - 1) < num_paged_slots(w);
  }
  const int32_t* entry = w.deal + PagedDeal::worker(item);
  unit.head_group = entry[PagedDeal::kWorkerHead];
  unit.b = entry[PagedDeal::kWorkerSeq];
  if (entry[PagedDeal::kWorkerCount] <= 0 || entry[PagedDeal::kWorkerTile] <= 0 || unit.b < 0 ||
      unit.b >= w.num_seqs || unit.head_group < 0 || unit.head_group >= head_groups(w)) {
    return false;
  }
  unit.slots = paged_slots(w, unit.b, unit.head_group);
  return unit.slots.second == 2 * item && unit.slots.first >= 0 &&
         unit.slots.slot(unit.slots.count - 1) < num_paged_slots(w);
}

// Grid: units, rows of a unit (kWarpRows: a warp each), blocks of columns.
template <DType kType, Parts kParts, bool kWarpRows>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    paged_combine(const __grid_constant__ PagedParams p) {
  const PagedWork& w = p.work;
  // The deal and the lengths were there before the kernel that is still running: no wait for them.
  Unit unit;
  device::release_next_kernel();
  bool found = find_unit(w, blockIdx.x, unit);
  device::wait_for_previous_kernel();
  if (!found) return;

  constexpr int kRows = kWarpRows ? kThreads / 32 : 1;
  __shared__ device::CombineShared shared_rows[kRows];
  int warp = threadIdx.x / 32;
  device::CombineShared& shared = shared_rows[kWarpRows ? warp : 0];
  int32_t row = static_cast<int32_t>(blockIdx.y) * kRows + (kWarpRows ? warp : 0);
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
  if constexpr (kWarpRows) {
    using Share = device::CombineShare<kType, kParts, kFewParts / device::kCombineWarps>;
    Share shares[] = {{p, parts, count, first_column, 0},
                      {p, parts, count, first_column, 1},
                      {p, parts, count, first_column, 2},
                      {p, parts, count, first_column, 3}};
    static_assert(sizeof(shares) == device::kCombineWarps * sizeof(Share));
#pragma unroll
    for (Share& share : shares) share.put(shared);
    __syncwarp();
  } else {
    device::CombineShare<kType, kParts>(p, parts, count, first_column, warp).put(shared);
    __syncthreads();
  }
  if (kWarpRows || warp == 0) device::finish_row<kType>(p, shared, unit.b, at, first_column);
}

template <DType kType, Parts kParts>
void launch(const PagedParams& p, int32_t major, cudaStream_t stream) {
  const PagedWork& w = p.work;
  int64_t units = int64_t{w.num_seqs} * head_groups(w);
  int64_t items = has_items_of_workers(w) ? w.num_workers : units;
  int64_t parts = w.num_splits == 0 ? w.num_workers / units + 2 : w.num_splits;  // about, at most
  bool warp_rows = parts <= kFewParts && w.rows > 1 && items * w.rows > w.num_workers;
  auto kernel =
      warp_rows ? paged_combine<kType, kParts, true> : paged_combine<kType, kParts, false>;
  dim3 grid(grid_blocks(items, "combine"),
            warp_rows ? ceil_div(w.rows, device::kCombineWarps) : w.rows,
            ceil_div(p.head_dim, device::kCombineColumns));
  launch_overlapping(kernel, grid, kThreads, 0, major, stream, p);
}

template <DType kType>
void launch(const PagedParams& p, int32_t major, cudaStream_t stream) {
  if (p.exp_sums != nullptr) return launch<kType, Parts::partitions>(p, major, stream);
  launch<kType, Parts::partial>(p, major, stream);
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
