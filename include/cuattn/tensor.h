// SPDX-License-Identifier: Apache-2.0
// TensorView: a borrowed array, made from a DLTensor or by hand. Strides and offsets are 64-bit, in
// elements.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "cuattn/dlpack.h"
#include "cuattn/params.h"

namespace cuattn {

constexpr int kMaxDims = 6;

// DLPack's type codes for the dtypes of the library.
inline DLDataType dl_dtype(DType dtype) {
  switch (dtype) {
    case DType::f32: return {kDLFloat, 32, 1};
    case DType::f16: return {kDLFloat, 16, 1};
    case DType::bf16: return {kDLBfloat, 16, 1};
    case DType::e4m3: return {kDLFloat8_e4m3fn, 8, 1};
    case DType::boolean: return {kDLBool, 8, 1};
    case DType::i32: return {kDLInt, 32, 1};
    case DType::i64: return {kDLInt, 64, 1};
  }
  return {kDLOpaqueHandle, 0, 0};
}

struct TensorView {
  void* data = nullptr;  // the first element
  DLDevice device{kDLCPU, 0};
  DLDataType dtype{kDLFloat, 32, 1};
  int32_t ndim = 0;
  std::array<int64_t, kMaxDims> shape{};
  std::array<int64_t, kMaxDims> strides{};  // in elements

  TensorView() = default;

  // A contiguous row-major array of `shape`. More than kMaxDims axes are not representable: ndim is
  // kept, the axes are dropped, and every rank check refuses the view.
  TensorView(void* data, DType dtype, std::initializer_list<int64_t> extents,
             DLDevice device = {kDLCPU, 0})
      : data(data),
        device(device),
        dtype(dl_dtype(dtype)),
        ndim(static_cast<int32_t>(extents.size())) {
    if (ndim > kMaxDims) return;
    int32_t i = 0;
    for (int64_t extent : extents) shape[i++] = extent;
    int64_t stride = 1;
    for (i = ndim - 1; i >= 0; --i) {
      strides[i] = stride;
      stride *= shape[i];
    }
  }

  // Borrows the DLTensor's memory; axes as above.
  explicit TensorView(const DLTensor& t)
      : data(t.data == nullptr ? nullptr : static_cast<char*>(t.data) + t.byte_offset),
        device(t.device),
        dtype(t.dtype),
        ndim(t.ndim) {
    if (ndim > kMaxDims) return;
    int64_t stride = 1;
    for (int32_t i = ndim - 1; i >= 0; --i) {
      shape[i] = t.shape[i];
      strides[i] = t.strides != nullptr ? t.strides[i] : stride;
      stride *= t.shape[i];
    }
  }

  // The same view as a DLTensor; it points into this object, which must outlive it.
  DLTensor dl() const {
    return DLTensor{data,
                    device,
                    ndim,
                    dtype,
                    const_cast<int64_t*>(shape.data()),
                    const_cast<int64_t*>(strides.data()),
                    0};
  }

  int64_t size() const {
    int64_t n = 1;
    for (int32_t i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
  bool is(DType t) const {
    DLDataType want = dl_dtype(t);
    return dtype.code == want.code && dtype.bits == want.bits && dtype.lanes == 1;
  }
};

}  // namespace cuattn
