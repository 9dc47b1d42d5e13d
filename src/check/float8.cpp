// SPDX-License-Identifier: Apache-2.0
#include "src/check/float8.h"

#include <cmath>

namespace cuattn {
namespace {

// How the shapes that `shape` allows are spelled.
std::string shapes_text(const ScaleShape& shape) {
  std::string heads = concat("(batch, num_heads_kv) = (", shape.batch, ", ", shape.heads, ")");
  std::string one = concat("(1,), (num_heads_kv,) = (", shape.heads, ",)");
  if (shape.full_text == nullptr) return one + " or " + heads;
  return concat(one, ", ", heads, " or ", shape.full_text, " = (", shape.batch, ", ",
                shape.full_heads, ", ", shape.parts, ")");
}

}  // namespace

void require_one_scale(const char* function, const char* name, bool has_number, double number,
                       const DLTensor* tensor) {
  CUATTN_REQUIRE(!has_number || tensor == nullptr, function, ": ", name,
                 " must be a number or an array, got ", number,
                 " and an array; leave one of them out");
}

Float8Scale read_float8_scale(const char* function, const ScaleShape& shape, double number,
                              const DLTensor* tensor, DLDevice device, bool check_data) {
  require_one_scale(function, shape.name, number != 1.0, number, tensor);
  Float8Scale scale{nullptr, static_cast<float>(number), shape.group, {1, 1, 1}, {0, 0, 0}};
  CUATTN_REQUIRE(std::isfinite(scale.number) && scale.number >= 0.0f, function, ": ", shape.name,
                 " must be finite in float32 and not negative, got ", number,
                 "; value = stored * scale");
  if (tensor == nullptr) return scale;
  TensorView view = view_of(function, shape.name, tensor);
  require_dtype(function, shape.name, view, DType::f32);
  require_device(function, shape.name, view, device);
  require_strided(function, shape.name, view, false, check_data);
  auto is = [&](int32_t ndim, int64_t a, int64_t b, int64_t c) {
    return view.ndim == ndim && (ndim < 1 || view.shape[0] == a) &&
           (ndim < 2 || view.shape[1] == b) && (ndim < 3 || view.shape[2] == c);
  };
  bool is_full = shape.full_text != nullptr && is(3, shape.batch, shape.full_heads, shape.parts);
  bool is_one = is(0, 0, 0, 0) || is(1, 1, 0, 0);
  CUATTN_REQUIRE(
      is_one || is_full || is(1, shape.heads, 0, 0) || is(2, shape.batch, shape.heads, 0), function,
      ": ", shape.name, " must be a number or have shape ", shapes_text(shape), ", got ",
      shape_text(view), "; make such a scale with cuattn.quantize");
  scale.data = static_cast<const float*>(view.data);
  int32_t first = view.ndim == 1 ? 1 : 0;  // a vector has no batch axis
  for (int32_t axis = 0; axis < view.ndim && !is_one; ++axis) {
    scale.extents[first + axis] = view.shape[axis];
    scale.strides[first + axis] = stride_of(view, axis);
  }
  if (is_full) scale.group = 1;
  return scale;
}

DType float8_out_dtype(const char* function, const TensorView& out, DType q) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    if (out.is(dtype)) return dtype;
  }
  fail<InvalidArgument>(function, ": out must be bfloat16, float16 or float32 for ", dtype_name(q),
                        " q, got ", text(out.dtype), "; allocate it so, or leave it out");
}

Footprint scale_footprint(const char* name, const Float8Scale& scale) {
  return {name,
          scale.data,
          sizeof(float),
          {{scale.extents[0], scale.strides[0]},
           {scale.extents[1], scale.strides[1]},
           {scale.extents[2], scale.strides[2]}}};
}

int64_t require_values(const char* function, const char* argument, const TensorView& view,
                       int32_t seq, bool output, bool check_data) {
  int32_t last = view.ndim - 1;
  bool is_rows = view.shape[last] <= 1 || view.strides[last] == 1 || view.size() == 0;
  if (is_rows) {
    require_rows(function, argument, view, output, check_data);
    return 1;
  }
  CUATTN_REQUIRE(view.shape[seq] <= 1 || view.strides[seq] == 1, function, ": ", argument,
                 " must be contiguous in its last axis or in its sequence axis, got strides ",
                 strides_text(view), " in elements; make a contiguous copy");
  TensorView columns = view;  // as rows of tokens, which are what starts on 16 bytes
  columns.shape[seq] = 1;
  require_strided(function, argument, view, output, check_data);
  require_aligned(function, argument, "channels", columns, view.ndim, check_data);
  return view.strides[last];
}

}  // namespace cuattn
