// SPDX-License-Identifier: Apache-2.0
#include "src/float8/quantize.h"

#include <cmath>
#include <cstring>

#include "src/cache/checks.h"
#include "src/check/arrays.h"
#include "src/check/overlap.h"
#include "src/check/text.h"

namespace cuattn {
namespace {

constexpr int64_t kMostDim = 256, kMostPadding = 15;

// Where the axes of a rows array lie; batch = -1: there is none.
struct Places {
  int32_t batch, rows, heads, dim;
};

Places places_of(const char* fn, const TensorView& x, int32_t layout) {
  CUATTN_REQUIRE(x.ndim == 3 || x.ndim == 4, fn, ": x must have 3 or 4 axes, got shape ",
                 shape_text(x), "; pass [total, heads, dim] or the axes of layout");
  CUATTN_REQUIRE(layout == CUATTN_LAYOUT_BSHD || layout == CUATTN_LAYOUT_BHSD, fn,
                 ": layout must be 'bshd' or 'bhsd', got ", layout_text(layout),
                 "; choose one of these");
  if (x.ndim == 3) return {-1, 0, 1, 2};
  return layout == CUATTN_LAYOUT_BSHD ? Places{0, 1, 2, 3} : Places{0, 2, 1, 3};
}

QuantizeArray array_of(const TensorView& view, DType dtype, const Places& at) {
  return {view.data,
          dtype,
          {at.batch < 0 ? 0 : stride_of(view, at.batch), stride_of(view, at.rows),
           stride_of(view, at.heads)},
          stride_of(view, at.dim)};
}

// Of numbers, which codes are made of or become.
DType number_dtype(const char* fn, const char* name, const TensorView& view) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (view.is(dtype)) return dtype;
  }
  fail<InvalidArgument>(fn, ": ", name, " must be float32, float16 or bfloat16, got ",
                        text(view.dtype), "; cast it");
}

// The dtype of codes: e4m3, which bytes may hold, or i8.
void read_codes(const char* fn, const char* name, const TensorView& view, QuantizeArray& codes) {
  if (!view.is(DType::i8)) return require_dtype(fn, name, as_e4m3(view), DType::e4m3);
  codes.dtype = DType::i8;
}

// A float32 array of the call.
void require_numbers(const char* fn, const char* name, const TensorView& view, DLDevice device,
                     bool output) {
  require_dtype(fn, name, view, DType::f32);
  require_device(fn, name, view, device, "x");
  require_strided(fn, name, view, output, true);
}

// What to do about a scale of another shape. Of quantize no caller has one of channels.
const char* way_out_of(const char* fn, const TensorView& scale, const cuattn_quantize_options& o,
                       int32_t dim) {
  bool is_of_channels = std::strcmp(fn, "dequantize") == 0 && o.channels == 0 && scale.ndim == 3 &&
                        scale.shape[2] == dim;
  return is_of_channels ? "pass channels=True for scales of channels, (batch, heads, dim)"
                        : "allocate it so";
}

void read_scale(const char* fn, const TensorView& scale, const cuattn_quantize_options& o,
                QuantizeParams& p) {
  Float8Scale& s = p.scale;
  s = {static_cast<const float*>(scale.data), 1.0f, 1, {1, 1, 1}, {0, 0, 0}};
  int64_t parts = o.channels ? p.dim : (p.rows + kScaleRows - 1) / kScaleRows;
  if (scale.ndim == 0 || (scale.ndim == 1 && scale.shape[0] == 1)) {
    s.group = p.heads > 0 ? p.heads : 1;
    return;
  }
  int32_t first = scale.ndim == 1 ? 1 : 0;
  bool is_known = scale.ndim <= 3;
  for (int32_t axis = 0; is_known && axis < scale.ndim; ++axis) {
    s.extents[first + axis] = scale.shape[axis];
    s.strides[first + axis] = stride_of(scale, axis);
  }
  is_known = is_known && (first == 1 || s.extents[0] == p.batch) && s.extents[1] > 0 &&
             p.heads % s.extents[1] == 0 && (scale.ndim < 3 || s.extents[2] == parts);
  CUATTN_REQUIRE(is_known, fn, ": scale must have shape (1,), (heads,), (batch, heads), each with ",
                 p.heads, " heads or a divisor of it, or (batch, heads, ",
                 o.channels ? "dim" : "ceil(rows / 128)", ") = (", p.batch, ", ", p.heads, ", ",
                 parts, "), got ", shape_text(scale), "; ", way_out_of(fn, scale, o, p.dim));
  s.group = p.heads / static_cast<int32_t>(s.extents[1]);
  if (scale.ndim == 3) p.part = o.channels ? ScalePart::channels : ScalePart::rows;
}

// One number in the host's memory beside arrays on a device.
bool is_host_number(const TensorView& x, const TensorView& scale,
                    const cuattn_quantize_options& o) {
  return o.is_given != 0 && scale.ndim == 0 && scale.device.device_type == kDLCPU &&
         x.device.device_type != kDLCPU;
}

void check_number(const char* fn, float x) {
  CUATTN_REQUIRE(std::isfinite(x) && x > 0.0f, fn, ": scale must hold finite numbers above 0, got ",
                 x, "; value = stored * scale");
}

Float8Scale number_scale(const char* fn, const TensorView& scale) {
  require_dtype(fn, "scale", scale, DType::f32);
  float number = *static_cast<const float*>(scale.data);
  check_number(fn, number);
  return {nullptr, number, 1, {1, 1, 1}, {0, 0, 0}};
}

// x, out, scale and the extents.
QuantizeParams read_arrays(const char* fn, const TensorView& x, const TensorView& out,
                           const TensorView& scale, const cuattn_quantize_options& o) {
  QuantizeParams p{};
  Places at = places_of(fn, x, o.layout);
  require_known_device(fn, "x", x.device);
  p.x = array_of(x, DType::e4m3, at);
  p.out = array_of(out, DType::e4m3, at);
  p.batch = at.batch < 0 ? 1 : checked_extent(fn, "x", "batch", x.shape[at.batch]);
  p.heads = checked_extent(fn, "x", "heads", x.shape[at.heads]);
  p.dim = checked_extent(fn, "x", "dim", x.shape[at.dim]);
  p.rows = x.shape[at.rows];
  CUATTN_REQUIRE(p.dim >= 16 && p.dim <= kMostDim && p.dim % 16 == 0, fn,
                 ": x must have dim a multiple of 16 up to ", kMostDim, ", got ", p.dim,
                 "; pad it with zeros");
  require_strided(fn, "x", x, false, true);
  require_device(fn, "out", out, x.device, "x");
  require_strided(fn, "out", out, true, true);
  bool agrees = out.ndim == x.ndim;
  for (int32_t axis = 0; agrees && axis < x.ndim; ++axis) {
    int64_t more = out.shape[axis] - x.shape[axis];
    agrees = more == 0 || (axis == at.rows && more > 0 && more <= kMostPadding);
  }
  CUATTN_REQUIRE(agrees, fn, ": out must have the shape of x, ", shape_text(x),
                 ", or up to 15 rows more, got ", shape_text(out), "; allocate it so");
  p.out_rows = out.shape[at.rows];
  if (is_host_number(x, scale, o)) {
    p.scale = number_scale(fn, scale);
    return p;
  }
  require_numbers(fn, "scale", scale, x.device, !o.is_given);
  read_scale(fn, scale, o, p);
  return p;
}

void read_mean(const char* fn, const cuattn_quantize_options& o, DLDevice device,
               QuantizeParams& p) {
  if (o.mean == nullptr) return;
  TensorView mean = view_of(fn, "mean", o.mean);
  require_numbers(fn, "mean", mean, device, !o.mean_given);
  require_last_axis(fn, "mean", mean);
  bool is_shared = o.mean_given != 0 && mean.ndim == 3 && mean.shape[0] == 1;  // by the batch
  bool agrees = mean.ndim == 3 && (mean.shape[0] == p.batch || is_shared) &&
                mean.shape[1] == p.heads && mean.shape[2] == p.dim;
  CUATTN_REQUIRE(agrees, fn, ": mean must have shape (batch, heads, dim) = (", p.batch, ", ",
                 p.heads, ", ", p.dim, "), got ", shape_text(mean), "; allocate it so");
  p.mean = static_cast<float*>(mean.data);
  p.mean_batch = stride_of(mean, 0);
  p.mean_head = stride_of(mean, 1);
  p.gives_mean = o.mean_given == 0;
}

void read_shift(const char* fn, const cuattn_quantize_options& o, DLDevice device,
                QuantizeParams& p) {
  CUATTN_REQUIRE((o.shift == nullptr) == (o.shift_mean == nullptr), fn,
                 ": shift and shift_mean must be given together, got one; pass both or none");
  if (o.shift == nullptr) return;
  TensorView shift = view_of(fn, "shift", o.shift), mean = view_of(fn, "shift_mean", o.shift_mean);
  require_numbers(fn, "shift", shift, device, true);
  require_numbers(fn, "shift_mean", mean, device, false);
  require_last_axis(fn, "shift_mean", mean);
  CUATTN_REQUIRE(shift.ndim == 3 && shift.shape[0] == p.batch && shift.shape[1] == p.heads &&
                     shift.shape[2] == p.rows,
                 fn, ": shift must have shape (batch, heads, rows) = (", p.batch, ", ", p.heads,
                 ", ", p.rows, "), got ", shape_text(shift), "; allocate it so");
  CUATTN_REQUIRE(mean.ndim == 3 && (mean.shape[0] == p.batch || mean.shape[0] == 1) &&
                     mean.shape[1] > 0 && p.heads % mean.shape[1] == 0 && mean.shape[2] == p.dim,
                 fn, ": shift_mean must have shape (batch, heads / n, dim) for ", p.heads,
                 " heads of ", p.dim, ", got ", shape_text(mean), "; pass the mean of the keys");
  p.shift = static_cast<float*>(shift.data);
  p.shift_batch = stride_of(shift, 0);
  p.shift_head = stride_of(shift, 1);
  p.shift_row = stride_of(shift, 2);
  p.shift_mean = static_cast<const float*>(mean.data);
  p.shift_mean_batch = stride_of(mean, 0);
  p.shift_mean_head = stride_of(mean, 1);
  p.shift_group = p.heads / static_cast<int32_t>(mean.shape[1]);
}

// What is written lies apart from all else.
void check_memory(const char* fn, const TensorView& x, const TensorView& out,
                  const TensorView& scale, const cuattn_quantize_options& o) {
  CallMemory memory(fn);
  memory.writes({"out", out});
  if (o.shift != nullptr) memory.writes({"shift", view_of(fn, "shift", o.shift)});
  if (o.is_given == 0) memory.writes({"scale", scale});
  if (o.mean != nullptr && o.mean_given == 0) memory.writes({"mean", view_of(fn, "mean", o.mean)});
  memory.reads({"x", x});
  if (o.is_given != 0 && !is_host_number(x, scale, o)) memory.reads({"scale", scale});
  if (o.mean != nullptr && o.mean_given != 0) memory.reads({"mean", view_of(fn, "mean", o.mean)});
}

// A given scale on the CPU.
void check_scale(const char* fn, const Float8Scale& s) {
  for (int64_t b = 0; b < s.extents[0]; ++b) {
    for (int64_t h = 0; h < s.extents[1]; ++h) {
      for (int64_t i = 0; i < s.extents[2]; ++i) {
        check_number(fn, s.data[b * s.strides[0] + h * s.strides[1] + i * s.strides[2]]);
      }
    }
  }
}

const Backend& backend_with(const char* fn, const TensorView& x) {
  const Backend& backend = backend_of(fn, x.device);
  if (backend.quantize != nullptr) return backend;
  fail<NotImplemented>(
      fn, ": x is on ", text(x.device),
      ", where no kernel quantises yet; quantise on the CPU and copy the codes, or "
      "by your library's own arithmetic, as docs/fp8.md shows");
}

}  // namespace

void quantize(const TensorView& x, const TensorView& out, const TensorView& scale,
              const cuattn_quantize_options& o, Stream stream) {
  const char* fn = "quantize";
  const Backend& backend = backend_with(fn, x);
  QuantizeParams p = read_arrays(fn, x, out, scale, o);
  p.x.dtype = number_dtype(fn, "x", x);
  read_codes(fn, "out", out, p.out);
  p.gives_scale = o.is_given == 0;
  p.rotates = o.hadamard != 0;
  read_mean(fn, o, x.device, p);
  read_shift(fn, o, x.device, p);
  check_memory(fn, x, out, scale, o);
  if (o.is_given != 0 && x.device.device_type == kDLCPU) check_scale(fn, p.scale);
  backend.quantize(p, x.device.device_id, stream);
}

void dequantize(const TensorView& x, const TensorView& out, const TensorView& scale,
                const cuattn_quantize_options& o, Stream stream) {
  const char* fn = "dequantize";
  const Backend& backend = backend_with(fn, x);
  cuattn_quantize_options given = o;
  given.is_given = 1;
  given.mean = given.shift = nullptr;
  QuantizeParams p = read_arrays(fn, x, out, scale, given);
  read_codes(fn, "x", x, p.x);
  p.out.dtype = number_dtype(fn, "out", out);
  check_memory(fn, x, out, scale, given);
  if (x.device.device_type == kDLCPU) check_scale(fn, p.scale);
  backend.dequantize(p, x.device.device_id, stream);
}

}  // namespace cuattn
