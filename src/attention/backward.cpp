// SPDX-License-Identifier: Apache-2.0
// attention_backward and attention_varlen_backward in two steps: validate (arrays and options to
// BackwardParams) and run (results, launch). The forward call's part is validate.cpp's. Next:
// backward_plan.cpp.
#include "src/attention/backward.h"

#include <algorithm>

#include "src/attention/flex.h"
#include "src/check/arrays.h"
#include "src/check/axes.h"
#include "src/check/overlap.h"

namespace cuattn {
namespace {

constexpr uint32_t kAllNeeds = 2 * kNeedDslopes - 1;

void require_shape(const char* function, const char* argument, const TensorView& view,
                   const TensorView& shape, const char* like) {
  bool same = view.ndim == shape.ndim;
  for (int32_t axis = 0; same && axis < shape.ndim; ++axis)
    same = view.shape[axis] == shape.shape[axis];
  CUATTN_REQUIRE(same, function, ": ", argument, " must have the shape of ", like, " ",
                 shape_text(shape), ", got ", shape_text(view), "; make them equal");
}

void fill_shapes(BackwardCall& call) {
  const AttentionCall& forward = call.forward;
  const AttentionParams& p = forward.params;
  int64_t *out = call.out_shape, *lse = call.lse_shape;
  if (forward.ragged) {
    out[0] = p.total_q;
    out[1] = p.num_heads_q;
    out[2] = p.head_dim_v;
    lse[0] = p.num_heads_q;
    lse[1] = p.total_q;
    return;
  }
  Axes axes = axes_of(false, forward.layout);
  out[axes.batch] = lse[0] = p.batch;
  out[axes.head] = lse[1] = p.num_heads_q;
  out[axes.seq] = lse[2] = p.seqlen_q;
  out[3] = p.head_dim_v;
}

// What the forward pass gave, and the gradients that come in.
void read_results(BackwardCall& call, const BackwardArrays& arrays, const DLTensor* dlse,
                  bool check_data) {
  const char* fn = call.function();
  AttentionCall& forward = call.forward;
  AttentionParams& p = forward.params;
  Axes axes = axes_of(forward.ragged, forward.layout);
  TensorView out_shape = shape_view(call.out_shape, axes.ndim);
  TensorView lse_shape = shape_view(call.lse_shape, axes.ndim - 1);
  auto read_out = [&](const char* name, const TensorView& view, const char* like) {
    require_dtype(fn, name, view, p.dtype, "q");
    require_device(fn, name, view, forward.device);
    require_shape(fn, name, view, out_shape, like);
    require_rows(fn, name, view, false, check_data);
    return strides_of(view, axes);
  };
  auto read_lse = [&](const char* name, const TensorView& view) {
    require_dtype(fn, name, view, DType::f32);
    require_device(fn, name, view, forward.device);
    require_shape(fn, name, view, lse_shape, "the forward call's lse");
    require_strided(fn, name, view, false, check_data);
    return lse_strides_of(view, forward.ragged);
  };
  p.out_strides = read_out("out", arrays.out, "the forward call's out");
  p.out = arrays.out.data;
  p.lse_strides = read_lse("lse", arrays.lse);
  p.lse = static_cast<float*>(arrays.lse.data);
  call.params.dout_strides = read_out("dout", arrays.dout, "out");
  call.params.dout = arrays.dout.data;
  if (dlse == nullptr) return;
  TensorView view = view_of(fn, "dlse", dlse);
  call.params.dlse_strides = read_lse("dlse", view);
  call.params.dlse = static_cast<const float*>(view.data);
}

void read_need(BackwardCall& call, const cuattn_attention_options& o,
               const cuattn_backward_options& b) {
  const char* fn = call.function();
  BackwardParams& p = call.params;
  uint32_t need = static_cast<uint32_t>(b.need);
  CUATTN_REQUIRE(need != 0 && (need & ~kAllNeeds) == 0, fn,
                 ": need must name at least one of dq, dk, dv, dbias, dsinks, dslopes, got ",
                 b.need, "; or CUATTN_NEED_* together");
  const struct {
    uint32_t bit;
    const char *name, *option;
    const DLTensor* tensor;
  } optional[] = {{kNeedDbias, "dbias", "bias", o.bias},
                  {kNeedDsinks, "dsinks", "sinks", o.sinks},
                  {kNeedDslopes, "dslopes", "alibi_slopes", o.alibi_slopes}};
  for (const auto& [bit, name, option, tensor] : optional) {
    CUATTN_REQUIRE((need & bit) == 0 || tensor != nullptr, fn, ": need must not name ", name,
                   " where no ", option, " is given; pass ", option, "=, or leave it out");
  }
  p.need = need;
  if (o.bias != nullptr) {
    TensorView bias = view_of(fn, "bias", o.bias);
    CUATTN_REQUIRE((need & kNeedDbias) == 0 || !bias.is(DType::boolean), fn,
                   ": need must not name dbias where bias is bool, which has no gradient; leave it "
                   "out");
    call.bias_ndim = bias.ndim;
    for (int64_t& extent : p.dbias.extents) extent = 1;
    for (int32_t axis = 0; axis < bias.ndim; ++axis)
      p.dbias.extents[4 - bias.ndim + axis] = bias.shape[axis];
    // A bound of lengths may exceed all rows together, of which there may be none: dbias has zeros
    // there, which are written too.
    AttentionParams& f = call.forward.params;
    if (call.forward.ragged && (need & kNeedDbias) != 0) {
      const int64_t* extents = p.dbias.extents;
      f.seqlen_q = std::max(f.seqlen_q, checked_length(fn, "bias", "seqlen_q", extents[2]));
      f.seqlen_kv = std::max(f.seqlen_kv, checked_length(fn, "bias", "seqlen_kv", extents[3]));
    }
  }
  if (o.alibi_slopes != nullptr) call.slopes_ndim = o.alibi_slopes->ndim;
}

}  // namespace

BackwardCall validate_backward(const BackwardArrays& arrays, const cuattn_attention_options& o,
                               const cuattn_backward_options& b, bool check_data, CallKind kind) {
  if (o.block_tables != nullptr) {
    fail<NotImplemented>(
        "attention_varlen_backward: block_tables must not be given, keys in pages have no "
        "gradients; copy them into rows with gather_cache");
  }
  BackwardCall call{};
  call.forward = validate_attention(arrays.q, arrays.k, arrays.v, o, check_data, kind);
  const AttentionParams& f = call.forward.params;
  if (std::max(f.head_dim, f.head_dim_v) > kMostHeadDim) {
    fail<NotImplemented>(call.function(), ": q and v must have head_dim and head_dim_v up to ",
                         kMostHeadDim, ", got ", f.head_dim, " and ", f.head_dim_v,
                         "; wider heads have no backward pass, call the forward alone");
  }
  CUATTN_REQUIRE(b.deterministic >= -1 && b.deterministic <= 1, call.function(),
                 ": deterministic must be None, True or False, got ", b.deterministic,
                 "; in C -1, 1 or 0");
  call.deterministic = b.deterministic;
  fill_shapes(call);
  read_need(call, o, b);
  read_results(call, arrays, b.dlse, check_data);
  return call;
}

BackwardParams problem_of(const BackwardCall& call) {
  BackwardParams params = call.params;
  params.forward = call.forward.params;
  if (call.forward.has_programs) params.forward.flex = &call.forward.flex;
  if (call.gradient.program.count > 0 || call.forward.flex.functor != 0)
    params.flex = &call.gradient;
  return params;
}

Plan plan_of(const BackwardCall& call, const DeviceInfo& device, const char* backend) {
  require_dropout_key(call.forward, device);
  // On the CPU the bits never depend on the run; a batch changes them where keys are cut.
  SumOrder order = SumOrder::any;
  if (call.forward.batch_invariant)
    order = SumOrder::of_sequence;
  else if (device.is_cuda && call.deterministic != 0)
    order = call.deterministic == 1 ? SumOrder::of_problem : SumOrder::where_free;
  return select_backward(call.function(), problem_of(call), order, device, backend);
}

namespace {

const TensorView& given(const char* function, const char* name, const TensorView* view) {
  CUATTN_REQUIRE(view != nullptr, function, ": ", name,
                 " must be given, for it is needed; allocate it, or leave it out of need");
  return *view;
}

// The results that are needed, each where it is to be written.
void read_gradients(BackwardCall& call, const Gradients& g, CallMemory& memory) {
  const char* fn = call.function();
  const AttentionCall& forward = call.forward;
  const AttentionParams& f = forward.params;
  BackwardParams& p = call.params;
  Axes axes = axes_of(forward.ragged, forward.layout);
  auto read_rows = [&](const char* name, const TensorView* view, int64_t rows, int64_t heads,
                       int64_t dim, bool may_be_float, DType& dtype, Strides& strides) {
    int64_t shape[4] = {rows, heads, dim, 0};
    if (!forward.ragged) {
      shape[axes.batch] = f.batch;
      shape[axes.seq] = rows;
      shape[axes.head] = heads;
      shape[3] = dim;
    }
    const TensorView& to = given(fn, name, view);
    dtype = may_be_float && to.is(DType::f32) ? DType::f32 : f.dtype;
    require_output(fn, name, to, dtype, shape_view(shape, axes.ndim), forward.device);
    require_rows(fn, name, to, true, true);
    strides = strides_of(to, axes);
    memory.writes({name, to});
    return to.data;
  };
  int64_t rows_q = forward.ragged ? f.total_q : f.seqlen_q;
  int64_t rows_kv = forward.ragged ? f.total_kv : f.seqlen_kv;
  DType of_q;
  if (p.needs(kNeedDq)) {
    p.dq = read_rows("dq", g.dq, rows_q, f.num_heads_q, f.head_dim, false, of_q, p.dq_strides);
  }
  if (p.needs(kNeedDk)) {
    p.dk =
        read_rows("dk", g.dk, rows_kv, f.num_heads_kv, f.head_dim, true, p.dk_dtype, p.dk_strides);
  }
  if (p.needs(kNeedDv)) {
    p.dv = read_rows("dv", g.dv, rows_kv, f.num_heads_kv, f.head_dim_v, true, p.dv_dtype,
                     p.dv_strides);
  }
  if (p.needs(kNeedDbias)) {
    const TensorView& to = given(fn, "dbias", g.dbias);
    const int64_t* extents = p.dbias.extents + 4 - call.bias_ndim;
    require_output(fn, "dbias", to, f.scores.bias_dtype, shape_view(extents, call.bias_ndim),
                   forward.device);
    require_strided(fn, "dbias", to, true, true);
    for (int32_t axis = 0; axis < to.ndim; ++axis)
      p.dbias.strides[4 - to.ndim + axis] = stride_of(to, axis);
    p.dbias.data = to.data;
    memory.writes({"dbias", to});
  }
  if (p.needs(kNeedDsinks)) {
    const TensorView& to = given(fn, "dsinks", g.dsinks);
    int64_t shape[1] = {f.num_heads_q};
    require_output(fn, "dsinks", to, DType::f32, shape_view(shape, 1), forward.device);
    require_strided(fn, "dsinks", to, true, true);
    p.dsinks = static_cast<float*>(to.data);
    p.dsinks_stride = stride_of(to, 0);
    memory.writes({"dsinks", to});
  }
  if (p.needs(kNeedDslopes)) {
    const TensorView& to = given(fn, "dslopes", g.dslopes);
    int64_t shape[2] = {f.batch, f.num_heads_q};
    require_output(fn, "dslopes", to, DType::f32,
                   shape_view(shape + 2 - call.slopes_ndim, call.slopes_ndim), forward.device);
    require_strided(fn, "dslopes", to, true, true);
    p.dslopes = static_cast<float*>(to.data);
    p.dslopes_per_batch = call.slopes_ndim == 2;
    p.dslopes_stride_batch = call.slopes_ndim == 2 ? stride_of(to, 0) : 0;
    p.dslopes_stride_head = stride_of(to, call.slopes_ndim - 1);
    memory.writes({"dslopes", to});
  }
}

}  // namespace

void run_backward(BackwardCall& call, const Gradients& gradients, void* workspace,
                  size_t workspace_bytes, Stream stream) {
  const char* fn = call.function();
  const AttentionCall& forward = call.forward;
  const AttentionParams& f = forward.params;
  BackwardParams& p = call.params;
  const Plan& plan = forward.plan;
  CallMemory memory(fn);  // what is written lies apart from all else
  read_gradients(call, gradients, memory);
  memory.writes_workspace(workspace, plan.workspace_bytes, workspace_bytes);
  check_array_gradients(call, memory);
  check_inputs(forward, memory);
  int64_t batch = forward.ragged ? 1 : f.batch, rows = forward.ragged ? f.total_q : f.seqlen_q;
  auto reads = [&](const char* name, const void* data, int64_t item, const Strides& strides,
                   int64_t dim) {
    memory.reads(
        {name,
         data,
         item,
         {{batch, strides.batch}, {rows, strides.seq}, {f.num_heads_q, strides.head}, {dim, 1}}});
  };
  reads("dout", p.dout, itemsize(f.dtype), p.dout_strides, f.head_dim_v);
  reads("out", f.out, itemsize(f.dtype), f.out_strides, f.head_dim_v);
  reads("lse", f.lse, 4, f.lse_strides, 1);
  reads("dlse", p.dlse, 4, p.dlse_strides, 1);

  bool cuda = is_cuda(forward.device);
  const Backend& backend = backend_of(fn, forward.device);
  bool has_data = forward.ragged || forward.uses_seqused || f.dropout.state != nullptr;
  if (has_data && (!cuda || checks_device_data()))
    backend.check(fn, f, forward.device.device_id, stream);
  require_workspace(fn, plan, forward.device, workspace, workspace_bytes);
  backend.backward(problem_of(call), {plan.chunk_keys, plan.num_chunks, workspace, plan.in_order},
                   plan, forward.device.device_id, stream);
}

}  // namespace cuattn
