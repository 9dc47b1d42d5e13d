// SPDX-License-Identifier: Apache-2.0
// What the kernels of paged attention share: which keys a thread block works on (its tasks), the
// rows of a unit with their scores and masks, and where a result goes. The arithmetic of splits and
// slots stands in params/deal.h. Next: cuda/paged/sm80/decode.cuh.
#pragma once

#include "cuattn/device/finish.cuh"
#include "cuattn/device/mask.cuh"
#include "cuattn/device/overlap.cuh"
#include "cuattn/params/paged.h"

namespace cuattn::device {

// Keys [begin, end) of one unit, for one thread block.
struct KeyTask {
  int32_t b, kv_head, row0;  // row0: first row of the unit among the rows of its kv head
  int32_t split;             // 0 with a deal
  int32_t context;
  int32_t begin, end;  // begin is a multiple of the tile; no key where end <= begin
  int32_t low;         // the first key that some query sees; those before it count as absent
  int64_t slot;        // of the partial result; -1: this, or the cluster, has all of the unit, and
                       // the output is written
};

// The tasks of thread block `index`: with a deal those of the worker of that number; without, of
// the splits of all units, num_key_tasks(work) in number, split `index` and each `stride`-th after.
class KeyTasks {
 public:
  static constexpr uint32_t kOnlyOne = 1u << 31;  // a stride past all splits

  __device__ explicit KeyTasks(const PagedWork& w, uint32_t index = blockIdx.x,
                               uint32_t stride = kOnlyOne)
      : index_(index), stride_(stride) {
    if (w.num_splits == 0) walk_ = PagedWalk(w, index);
  }

  __device__ __forceinline__ bool next(const PagedWork& w, KeyTask& task) {
    if (w.num_splits == 0) return next_of_walk(w, task);
    while (index_ < static_cast<uint32_t>(num_key_tasks(w))) {
      uint32_t index = index_;
      index_ += stride_;
      if (take_split(w, index, task)) return true;
    }
    return false;
  }
  // Whether the task that `next` gave is the last, of a walk or a lone split.
  __device__ __forceinline__ bool is_last(const PagedWork& w) const {
    return w.num_splits != 0 || walk_.left <= 0;
  }

 private:
  __device__ __forceinline__ static void place(const PagedWork& w, int32_t b, int32_t head_group,
                                               const PagedSpan& span, KeyTask& task) {
    task.b = b;
    task.kv_head = w.row_groups == 1 ? head_group : head_group / w.row_groups;
    task.row0 = (head_group - task.kv_head * w.row_groups) * w.rows;
    task.context = span.context;
    task.low = span.low;
  }

  __device__ __forceinline__ bool next_of_walk(const PagedWork& w, KeyTask& task) {
    PagedTask part;
    if (!walk_.next(w, part)) return false;
    const PagedSpan& span = part.span;
    place(w, part.b, part.head_group, span, task);
    int64_t begin = span.begin + int64_t{part.tile} * w.tile;
    int64_t end = begin + int64_t{part.count} * w.tile;
    task.begin = static_cast<int32_t>(begin < span.end ? begin : span.end);
    task.end = static_cast<int32_t>(end < span.end ? end : span.end);
    task.split = 0;
    task.slot = part.slot;
    return true;
  }

  __device__ __forceinline__ static bool take_split(const PagedWork& w, uint32_t index,
                                                    KeyTask& task) {
    PagedItem item = paged_item(w, index);
    int32_t b = item.b, head_group = item.head_group;
    task.split = item.split;
    PagedSpan span = paged_span(w, b);
    PagedSplits splits = paged_splits(w, span);
    if (task.split < splits.first || task.split >= splits.first + splits.count) return false;
    place(w, b, head_group, span, task);
    int64_t begin = splits.begin_of(task.split), end = splits.begin_of(task.split + 1);
    task.begin = static_cast<int32_t>(begin > span.begin ? begin : span.begin);
    task.end = static_cast<int32_t>(end < span.end ? end : span.end);
    task.slot = -1;
    if (splits.count > 1) {
      task.slot = (int64_t{b} * head_groups(w) + head_group) * w.num_splits + task.split;
    }
    return true;
  }

  PagedWalk walk_;
  uint32_t index_, stride_;
};

// A word that the kernel before this one may be writing. Past L1, which would keep it.
__device__ __forceinline__ int32_t peek(const int32_t* word) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Which keys split `index` will most likely have, before wait_for_previous_kernel().
// Lengths and tables may be about to change: good for a prefetch and for nothing else.
struct KeyGuess {
  int32_t b, kv_head;
  int32_t begin, end;  // within what the table can name; no key where end <= begin
};

__device__ __forceinline__ KeyGuess guess_keys(const PagedWork& w, uint32_t index) {
  PagedItem item = paged_item(w, index);
  int32_t length = w.context_lens == nullptr ? w.capacity : peek(w.context_lens + item.b);
  PagedSpan span = paged_span_of_context(w, context_of_length(w, length));
  PagedSplits splits = paged_splits(w, span);
  int64_t begin = max(splits.begin_of(item.split), int64_t{span.begin});
  int64_t end = splits.begin_of(item.split + 1);
  return {item.b, item.head_group / w.row_groups,
          static_cast<int32_t>(min(begin, int64_t{span.end})),
          static_cast<int32_t>(min(end, int64_t{span.end}))};
}

__device__ __forceinline__ float key_scale(const PagedParams& p, const KeyTask& task) {
  if (p.k_scales == nullptr) return p.k_scale;
  return p.k_scales[task.b * p.k_scales_stride_batch + task.kv_head * p.k_scales_stride_head];
}

__device__ __forceinline__ float value_scale(const PagedParams& p, const KeyTask& task) {
  if (p.v_scales == nullptr) return p.v_scale;
  return p.v_scales[task.b * p.v_scales_stride_batch + task.kv_head * p.v_scales_stride_head];
}

// Which query and head row `row` of a unit is, and where it lies (query_row). Rows past the last
// are padding, and so are queries that a ragged sequence does not have.
struct UnitRow {
  int32_t query, head;
  int64_t place;
  bool valid;
};

__device__ __forceinline__ UnitRow unit_row(const PagedParams& p, int32_t b, int32_t kv_head,
                                            int32_t row0, int32_t row) {
  const PagedWork& w = p.work;
  int32_t at = row0 + row;
  bool valid = row < w.rows && at < w.q_len * w.group;
  if (!valid) at = 0;
  int32_t query = w.q_len == 1 ? 0 : at / w.group;
  UnitRow found{query, kv_head * w.group + at - query * w.group, 0, valid};
  found.place = query_row(p, b, found.query);
  if (found.place < 0) {
    found.place = 0;
    found.valid = false;
  }
  return found;
}

// Dot products of one row become scores in base 2: exponents, ready for exp2. Each is rounded
// before the maximum is taken from it, so that the maximum itself has the exponent 0, however large
// it is.
template <DType kType>
struct RowScore {
  float scale;       // identity: with log2 e, scored: natural units
  float slope;       // ALiBi
  int32_t position;  // of the query among the keys
  KeyRange visible;

  // `dot_scale`: what a dot product is times k_scale.
  __device__ __forceinline__ void init(const PagedParams& p, const KeyTask& task,
                                       const UnitRow& row, float dot_scale) {
    scale = p.scores.scale * dot_scale * (p.scores.scored() ? 1.0f : kLog2e);
    slope = p.scores.slope(task.b, row.head);
    position = task.context - p.work.q_len + row.query;
    visible = p.work.mask.visible(row.query, p.work.q_len, task.context);
  }

  __device__ __forceinline__ float scored(const PagedParams& p, float dot, int32_t key) const {
    float score = dot * scale;
    if (p.scores.softcap > 0.0f)
      score = p.scores.softcap * capped<kType>(score, p.scores.softcap, p.scores.inv_softcap);
    return finite_product(score - slope * fabsf(static_cast<float>(position - key)), kLog2e);
  }

  __device__ __forceinline__ bool sees(int32_t key) const {
    return key >= visible.begin && key < visible.end;
  }
};

// Where the result of a row goes, and by what its accumulated values are multiplied.
struct RowOutput {
  void* to;  // head_dim elements
  DType type;
  float factor;  // 0: no key, whatever was accumulated
};

__device__ __forceinline__ void store8(const RowOutput& out, int32_t column, const float (&v)[8]) {
  if (out.type == DType::f32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(out.to) + column);
    to[0] = {v[0], v[1], v[2], v[3]};
    to[1] = {v[4], v[5], v[6], v[7]};
    return;
  }
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = out.type == DType::f16 ? pack2<DType::f16>(v[2 * i], v[2 * i + 1])
                                      : pack2<DType::bf16>(v[2 * i], v[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out.to) + column) = {pairs[0], pairs[1],
                                                                        pairs[2], pairs[3]};
}

// The output itself. `maximum` (base 2) and `sum` of the exponentials relative to it are over all
// keys of the row; the sink enters here. The thread with `leader` set writes lse.
__device__ __forceinline__ RowOutput final_output(const PagedParams& p, int32_t b,
                                                  const UnitRow& row, float maximum, float sum,
                                                  bool leader) {
  RowEnd end = Finish(p.scores, row.head).end(maximum, sum);
  if (leader && p.lse != nullptr) {
    p.lse[row_offset(p, p.lse_strides, b, row.place, row.head)] = end.lse;
  }
  int64_t at = row_offset(p, p.out_strides, b, row.place, row.head);
  return {static_cast<char*>(p.out) + at * (p.out_dtype == DType::f32 ? 4 : 2), p.out_dtype,
          end.alive ? end.factor : 0.0f};
}

// V2 keeps what it finds in a partition, if there is a key.
__device__ __forceinline__ bool keeps_partition(const PagedParams& p, const KeyTask& task) {
  return p.exp_sums != nullptr && task.begin < task.end;
}

__device__ __forceinline__ RowOutput partition_output(const PagedParams& p, const KeyTask& task,
                                                      const UnitRow& row, float maximum, float sum,
                                                      bool leader) {
  int64_t at = (int64_t{task.b} * p.num_heads_q + row.head) * p.work.num_splits + task.split;
  if (leader) {
    p.exp_sums[at] = sum;
    p.max_logits[at] = maximum * kLn2;
  }
  return {static_cast<char*>(p.tmp_out) + at * p.head_dim * (p.dtype == DType::f32 ? 4 : 2),
          p.dtype, sum != 0.0f ? 1.0f / sum : 0.0f};
}

// The result of a task: the output, or a partial one, of row `index` of its unit.
__device__ __forceinline__ RowOutput task_output(const PagedParams& p, const KeyTask& task,
                                                 const UnitRow& row, int32_t index, float maximum,
                                                 float sum, bool leader) {
  if (task.slot < 0) return final_output(p, task.b, row, maximum, sum, leader);
  int64_t at = task.slot * p.work.rows + index;
  if (leader) {
    p.partial_lse[at] = sum != 0.0f ? maximum + log2_approx(sum) : negative_infinity();
  }
  return {p.partial_out + at * p.head_dim, DType::f32, sum != 0.0f ? 1.0f / sum : 0.0f};
}

}  // namespace cuattn::device
