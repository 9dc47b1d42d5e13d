// SPDX-License-Identifier: Apache-2.0
// rms_norm, layer_norm, act_mul and bias_act: from borrowed arrays to rows. Next:
// cuda/fused/norm.cu, cuda/fused/activation.cu.
#include <cmath>

#include "src/check/arrays.h"
#include "src/check/overlap.h"
#include "src/fused/fused.h"

namespace cuattn {
namespace {

// An array as rows: how many, and how far apart they begin.
struct Rows {
  int64_t count, columns, stride;
};

Rows rows_of(const char* fn, const char* name, const TensorView& view, bool output) {
  CUATTN_REQUIRE(view.ndim >= 1, fn, ": ", name,
                 " must have at least one axis, got a scalar; reshape it");
  require_last_axis(fn, name, view);
  require_strided(fn, name, view, output, true);
  int32_t last = view.ndim - 1;
  Rows rows{1, view.shape[last], 0};
  for (int32_t axis = last - 1; axis >= 0; --axis) {
    int64_t stride = stride_of(view, axis), wanted = rows.stride * rows.count;
    CUATTN_REQUIRE(view.size() == 0 || view.shape[axis] == 1 || rows.count == 1 || stride == wanted,
                   fn, ": ", name, " must have rows that begin at even steps, got strides ",
                   strides_text(view), " for shape ", shape_text(view), "; make a contiguous copy");
    if (rows.count == 1) rows.stride = stride;
    rows.count *= view.shape[axis];
  }
  return rows;
}

void require_shape_of_x(const char* fn, const char* name, const TensorView& view, DType dtype,
                        const TensorView& x, int64_t columns) {
  TensorView shape = shape_view(x.shape.data(), x.ndim);
  shape.shape[x.ndim - 1] = columns;
  require_output(fn, name, view, dtype, shape, x.device);
}

const void* read_columns(const char* fn, const char* name, const TensorView& view, DType dtype,
                         int64_t columns, DLDevice device) {
  return read_vector(fn, name, view, dtype, columns, "columns", device, "x", true);
}

void read_weights(const char* fn, const TensorView& weight, const cuattn_norm_options& options,
                  DLDevice device, NormParams& p) {
  p.weight_dtype = weight.is(DType::f32) ? DType::f32 : p.dtype;
  p.weight = read_columns(fn, "weight", weight, p.weight_dtype, p.columns, device);
  if (options.bias == nullptr) return;
  CUATTN_REQUIRE(p.centred, fn, ": bias must be NULL, got an array; layer_norm has one");
  p.bias = read_columns(fn, "bias", view_of(fn, "bias", options.bias), p.weight_dtype, p.columns,
                        device);
}

float read_number(const char* fn, const char* name, double value, const char* rule, bool fits) {
  CUATTN_REQUIRE(fits && std::isfinite(static_cast<float>(value)), fn, ": ", name, " must be ",
                 rule, ", got ", value, "; pass another number");
  return static_cast<float>(value);
}

}  // namespace

void norm(const TensorView& x, const TensorView& weight, const cuattn_norm_options& options,
          bool centred, const TensorView& out, Stream stream) {
  const char* fn = centred ? "layer_norm" : "rms_norm";
  NormParams p{};
  DLDevice device = x.device;
  require_known_device(fn, "x", device);
  p.dtype = attention_dtype(fn, "x", x);
  p.centred = centred;
  Rows rows = rows_of(fn, "x", x, false);
  CUATTN_REQUIRE(rows.columns >= 1 && rows.columns <= INT32_MAX - 65536, fn,
                 ": x must have from 1 to ", INT32_MAX - 65536, " columns on its last axis, got ",
                 rows.columns, "; there is nothing to normalise, or too much");
  p.x = x.data;
  p.rows = rows.count;
  p.columns = rows.columns;
  p.x_stride = rows.stride;
  p.eps = read_number(fn, "eps", options.eps, "finite and not negative", options.eps >= 0.0);
  p.weight_offset = read_number(fn, "weight_offset", options.weight_offset, "finite", true);
  read_weights(fn, weight, options, device, p);
  require_shape_of_x(fn, "out", out, p.dtype, x, p.columns);
  p.out = out.data;
  p.out_stride = rows_of(fn, "out", out, true).stride;

  CallMemory memory(fn);
  memory.writes({"out", out});
  CUATTN_REQUIRE(options.residual != nullptr || options.residual_out == nullptr, fn,
                 ": residual_out must be NULL without residual, got an array; pass residual too");
  if (options.residual != nullptr) {
    TensorView residual = view_of(fn, "residual", options.residual);
    TensorView sum = view_of(fn, "residual_out", options.residual_out);
    bool in_place = is_same_view(sum, residual);
    const char* sum_name = in_place ? "residual" : "residual_out";
    require_shape_of_x(fn, "residual", residual, p.dtype, x, p.columns);
    require_shape_of_x(fn, sum_name, sum, p.dtype, x, p.columns);
    p.residual = residual.data;
    p.residual_stride = rows_of(fn, "residual", residual, false).stride;
    p.residual_out = sum.data;
    p.residual_out_stride = rows_of(fn, sum_name, sum, true).stride;
    memory.writes({sum_name, sum});
    if (!in_place) memory.reads({"residual", residual});
  }
  if (!is_same_view(out, x)) memory.reads({"x", x});
  memory.reads({"weight", weight});
  if (options.bias != nullptr) memory.reads({"bias", view_of(fn, "bias", options.bias)});
  const Backend& backend = backend_of(fn, device);
  if (p.rows > 0) backend.norm(p, device.device_id, stream);
}

void activate(const TensorView& x, const TensorView* bias, int32_t activation, bool gated,
              const TensorView& out, Stream stream) {
  const char* fn = gated ? "act_mul" : "bias_act";
  ActivationParams p{};
  DLDevice device = x.device;
  require_known_device(fn, "x", device);
  p.dtype = attention_dtype(fn, "x", x);
  CUATTN_REQUIRE(activation >= CUATTN_ACT_SILU && activation <= CUATTN_ACT_GELU_TANH, fn,
                 ": act must be 0 (silu), 1 (gelu) or 2 (gelu_tanh), got ", activation,
                 "; choose one of these");
  p.activation = static_cast<Activation>(activation);
  p.gated = gated;
  Rows rows = rows_of(fn, "x", x, false);
  CUATTN_REQUIRE(!gated || rows.columns % 2 == 0, fn,
                 ": x must have an even number of columns on its last axis, got ", rows.columns,
                 "; its halves are multiplied");
  p.x = x.data;
  p.x_stride = rows.stride;
  p.rows = rows.count;
  p.columns = gated ? rows.columns / 2 : rows.columns;
  if (bias != nullptr) p.bias = read_columns(fn, "bias", *bias, p.dtype, rows.columns, device);
  require_shape_of_x(fn, "out", out, p.dtype, x, p.columns);
  p.out = out.data;
  p.out_stride = rows_of(fn, "out", out, true).stride;
  CallMemory memory(fn);
  memory.writes({"out", out});
  if (gated || !is_same_view(out, x)) memory.reads({"x", x});
  if (bias != nullptr) memory.reads({"bias", *bias});
  const Backend& backend = backend_of(fn, device);
  if (out.size() > 0) backend.activate(p, device.device_id, stream);
}

}  // namespace cuattn
