// SPDX-License-Identifier: Apache-2.0
#include "src/check/text.h"

#include "cuattn/c_api.h"
#include "cuattn/error.h"
#include "src/check/arrays.h"

namespace cuattn {
namespace {

std::string list_text(const int64_t* values, int32_t n) {
  std::string list = "(";
  for (int32_t i = 0; i < n; ++i) list += concat(i > 0 ? ", " : "", values[i]);
  return list + (n == 1 ? ",)" : ")");
}

}  // namespace

std::string text(DLDevice device) {
  if (is_cpu(device)) return "cpu";
  return concat(is_cuda(device) ? "cuda:" : "device type ",
                is_cuda(device) ? device.device_id : device.device_type);
}

std::string text(DLDataType dtype) {
  std::string lanes = dtype.lanes > 1 ? concat("x", dtype.lanes) : "";
  int bits = dtype.bits;
  switch (dtype.code) {
    case kDLInt: return concat("int", bits, lanes);
    case kDLUInt: return concat("uint", bits, lanes);
    case kDLFloat: return concat("float", bits, lanes);
    case kDLBfloat: return concat("bfloat", bits, lanes);
    case kDLComplex: return concat("complex", bits, lanes);
    case kDLBool: return "bool" + lanes;
    case kDLFloat8_e4m3fn: return "float8_e4m3fn" + lanes;
    case kDLFloat8_e5m2: return "float8_e5m2" + lanes;
    default:
      return concat("dtype code ", static_cast<int>(dtype.code), " of ", bits, " bits", lanes);
  }
}

std::string shape_text(const TensorView& view) {
  if (view.ndim > kMaxDims) return concat(view.ndim, " axes");
  return list_text(view.shape.data(), view.ndim);
}

std::string strides_text(const TensorView& view) {
  return list_text(view.strides.data(), view.ndim);
}

std::string layout_text(int32_t layout) {
  switch (layout) {
    case CUATTN_LAYOUT_BSHD: return "'bshd'";
    case CUATTN_LAYOUT_BHSD: return "'bhsd'";
    case CUATTN_LAYOUT_NHD: return "'nhd'";
    case CUATTN_LAYOUT_THD: return "'thd'";
    default: return concat("code ", layout);
  }
}

}  // namespace cuattn
