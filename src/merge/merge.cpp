// SPDX-License-Identifier: Apache-2.0
// merge_states: validation of its four layouts down to one: rows (batch, seqlen, head) of head_dim
// elements.
#include "src/merge/merge.h"

#include "cuattn/c_api.h"
#include "src/check/arrays.h"
#include "src/check/overlap.h"

namespace cuattn {
namespace {

constexpr const char* kFunction = "merge_states";

// Axes of out and of lse in a layout; -1: the layout has no such axis.
struct Axes {
  int32_t ndim, batch, seq, head;        // of out; its last axis is head_dim
  int32_t lse_batch, lse_seq, lse_head;  // lse has one axis less
  const char *out_names, *lse_names;
};

Axes axes_of(int32_t layout) {
  switch (layout) {
    case CUATTN_LAYOUT_BSHD:
      return {4,
              0,
              1,
              2,
              0,
              2,
              1,
              "[batch, seqlen, num_heads, head_dim]",
              "[batch, num_heads, seqlen]"};
    case CUATTN_LAYOUT_BHSD:
      return {4,
              0,
              2,
              1,
              0,
              2,
              1,
              "[batch, num_heads, seqlen, head_dim]",
              "[batch, num_heads, seqlen]"};
    case CUATTN_LAYOUT_NHD:
      return {3, -1, 0, 1, -1, 0, 1, "[n, num_heads, head_dim]", "[n, num_heads]"};
    case CUATTN_LAYOUT_THD:
      return {3, -1, 0, 1, -1, 1, 0, "[total, num_heads, head_dim]", "[num_heads, total]"};
    default:
      fail<InvalidArgument>(kFunction, ": layout must be 'bshd', 'bhsd', 'nhd' or 'thd', got ",
                            layout_text(layout), "; choose one of these");
  }
}

// The array without its first axis.
TensorView part_of(const TensorView& stacked) {
  TensorView part = stacked;
  part.ndim = stacked.ndim - 1;
  for (int32_t axis = 0; axis < part.ndim; ++axis) {
    part.shape[axis] = stacked.shape[axis + 1];
    part.strides[axis] = stacked.strides[axis + 1];
  }
  return part;
}

int64_t extent_at(const TensorView& view, int32_t axis) { return axis < 0 ? 1 : view.shape[axis]; }
int64_t stride_at(const TensorView& view, int32_t axis) {
  return axis < 0 ? 0 : stride_of(view, axis);
}

void require_same_shape(const char* name, const TensorView& view, const TensorView& want,
                        const char* like) {
  bool same = view.ndim == want.ndim;
  for (int32_t axis = 0; same && axis < want.ndim; ++axis)
    same = view.shape[axis] == want.shape[axis];
  CUATTN_REQUIRE(same, kFunction, ": ", name, " must have the shape of ", like, " ",
                 shape_text(want), ", got ", shape_text(view), "; make them equal");
}

Strides read_out(const MergeParams& p, const Axes& axes, const char* name, const TensorView& out,
                 DLDevice device, bool output) {
  require_dtype(kFunction, name, out, p.dtype);
  require_device(kFunction, name, out, device);
  require_rows(kFunction, name, out, output, true);
  return {stride_at(out, axes.batch), stride_at(out, axes.seq), stride_at(out, axes.head)};
}

// `like` names the array whose rows and heads lse must have.
Strides read_lse(const MergeParams& p, const Axes& axes, const char* name, const TensorView& lse,
                 const char* like, DLDevice device, bool output) {
  require_dtype(kFunction, name, lse, DType::f32);
  require_device(kFunction, name, lse, device);
  require_rank(kFunction, name, lse, axes.ndim - 1, axes.lse_names);
  require_extent(kFunction, name, "num_heads", lse.shape[axes.lse_head], p.num_heads, like);
  require_extent(kFunction, name, "rows", lse.shape[axes.lse_seq], p.seqlen, like);
  require_extent(kFunction, name, "batch", extent_at(lse, axes.lse_batch), p.batch, like);
  require_strided(kFunction, name, lse, output, true);
  return {stride_at(lse, axes.lse_batch), stride_at(lse, axes.lse_seq),
          stride_at(lse, axes.lse_head)};
}

MergeParams params_of(const Axes& axes, const char* name, const TensorView& out) {
  MergeParams p{};
  p.dtype = p.part_dtype = attention_dtype(kFunction, name, out);
  require_rank(kFunction, name, out, axes.ndim, axes.out_names);
  p.batch = extent_at(out, axes.batch);
  p.seqlen = out.shape[axes.seq];
  p.num_heads = out.shape[axes.head];
  int64_t head_dim = out.shape[axes.ndim - 1];
  CUATTN_REQUIRE(head_dim >= 8 && head_dim <= 1024 && head_dim % 8 == 0, kFunction, ": ", name,
                 " must have head_dim a multiple of 8 up to 1024, got ", head_dim,
                 "; pad it with zeros");
  p.head_dim = static_cast<int32_t>(head_dim);
  return p;
}

void read_outputs(MergeParams& p, const Axes& axes, const TensorView& part, const char* part_name,
                  const TensorView& out, const TensorView* lse_out) {
  require_same_shape("out", out, part, part_name);
  if (p.part_dtype == DType::f32 && out.is(DType::f16)) p.dtype = DType::f16;
  if (p.part_dtype == DType::f32 && out.is(DType::bf16)) p.dtype = DType::bf16;
  p.merged_out_strides = read_out(p, axes, "out", out, part.device, true);
  p.merged_out = out.data;
  if (lse_out == nullptr) return;
  p.merged_lse_strides = read_lse(p, axes, "lse_out", *lse_out, "out", part.device, true);
  p.merged_lse = static_cast<float*>(lse_out->data);
}

// A part that is about to be merged, or the stack of all.
struct Part {
  const char *out_name, *lse_name;
  const TensorView &out, &lse;
};

// Whether a result is a part itself: the two are one view, or it is one of a stack whose parts lie
// apart.
bool is_part(const TensorView& result, const TensorView& part) {
  if (result.ndim == part.ndim) return is_same_view(result, part);
  int64_t stride = stride_of(part, 0) * (part.dtype.bits / 8);
  TensorView first = part_of(part);
  intptr_t offset = static_cast<char*>(result.data) - static_cast<char*>(first.data);
  if (offset < 0 || (stride > 0 ? offset % stride != 0 : offset != 0)) return false;
  int64_t index = stride > 0 ? offset / stride : 0;
  first.data = result.data;
  return index < part.shape[0] && is_same_view(result, first) && !overlaps_itself(part);
}

// Results lie apart from the parts, or are one of them: a row of all parts is read before it is
// written.
void check_memory(std::initializer_list<Part> parts, const TensorView& out,
                  const TensorView* lse_out) {
  CallMemory memory(kFunction);
  memory.writes({"out", out});
  if (lse_out != nullptr) memory.writes({"lse_out", *lse_out});
  for (const Part& part : parts) {
    if (!is_part(out, part.out)) memory.reads({part.out_name, part.out});
    if (lse_out == nullptr || !is_part(*lse_out, part.lse)) memory.reads({part.lse_name, part.lse});
  }
}

}  // namespace

void merge_states(const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
                  const TensorView& lse_b, const TensorView& out, const TensorView* lse_out,
                  int32_t layout, Stream stream) {
  Axes axes = axes_of(layout);
  MergeParams p = params_of(axes, "out_a", out_a);
  require_rank(kFunction, "out_b", out_b, axes.ndim, axes.out_names);
  require_same_shape("out_b", out_b, out_a, "out_a");
  DLDevice device = out_a.device;
  require_known_device(kFunction, "out_a", device);
  p.out_strides[0] = read_out(p, axes, "out_a", out_a, device, false);
  p.lse_strides[0] = read_lse(p, axes, "lse_a", lse_a, "out_a", device, false);
  p.out_strides[1] = read_out(p, axes, "out_b", out_b, device, false);
  p.lse_strides[1] = read_lse(p, axes, "lse_b", lse_b, "out_b", device, false);
  p.outs[0] = out_a.data;
  p.outs[1] = out_b.data;
  p.lses[0] = static_cast<const float*>(lse_a.data);
  p.lses[1] = static_cast<const float*>(lse_b.data);
  p.num_parts = 2;
  p.stacked = false;
  read_outputs(p, axes, out_a, "out_a", out, lse_out);
  check_memory({{"out_a", "lse_a", out_a, lse_a}, {"out_b", "lse_b", out_b, lse_b}}, out, lse_out);
  const Backend& backend = backend_of(kFunction, device);
  if (out.size() > 0) backend.merge(p, device.device_id, stream);
}

void merge_many(const TensorView& outs, const TensorView& lses, const TensorView& out,
                const TensorView* lse_out, int32_t layout, Stream stream) {
  Axes axes = axes_of(layout);
  CUATTN_REQUIRE(outs.ndim == axes.ndim + 1 && outs.shape[0] >= 1, kFunction,
                 ": outs must stack at least one part ", axes.out_names,
                 " on a new first axis, got shape ", shape_text(outs), "; use stack()");
  CUATTN_REQUIRE(lses.ndim == axes.ndim && lses.shape[0] == outs.shape[0], kFunction,
                 ": lses must stack ", outs.shape[0], " parts ", axes.lse_names,
                 " like outs, got shape ", shape_text(lses), "; use stack()");
  CUATTN_REQUIRE(outs.shape[0] <= 0x7fffffff, kFunction,
                 ": outs must stack up to 2147483647 parts, got ", outs.shape[0],
                 "; merge in groups");
  require_known_device(kFunction, "outs", outs.device);
  TensorView out_part = part_of(outs), lse_part = part_of(lses);
  MergeParams p = params_of(axes, "outs", out_part);
  require_rows(kFunction, "outs", outs, false, true);
  p.out_strides[0] = read_out(p, axes, "outs", out_part, outs.device, false);
  p.lse_strides[0] = read_lse(p, axes, "lses", lse_part, "outs", outs.device, false);
  p.outs[0] = outs.data;
  p.lses[0] = static_cast<const float*>(lses.data);
  p.out_part_stride = stride_of(outs, 0);
  p.lse_part_stride = stride_of(lses, 0);
  p.num_parts = static_cast<int32_t>(outs.shape[0]);
  p.stacked = true;
  read_outputs(p, axes, out_part, "one part of outs", out, lse_out);
  check_memory({{"outs", "lses", outs, lses}}, out, lse_out);
  const Backend& backend = backend_of(kFunction, outs.device);
  if (out.size() > 0) backend.merge(p, outs.device.device_id, stream);
}

}  // namespace cuattn
