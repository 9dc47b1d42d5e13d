// SPDX-License-Identifier: Apache-2.0
// TensorView: a borrowed array, made from a DLTensor or by hand, and what every DLTensor must obey.
// Strides and offsets are 64-bit, in elements.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "cuattn/dlpack.h"
#include "cuattn/params/types.h"

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
    case DType::i8: return {kDLInt, 8, 1};
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
  // kept, the axes are dropped, and every call refuses the view.
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

  // Borrows the DLTensor's memory; axes as above, and fewer than none where it has no shape.
  explicit TensorView(const DLTensor& t)
      : data(t.data == nullptr
                 ? nullptr
                 : reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(t.data) + t.byte_offset)),
        device(t.device),
        dtype(t.dtype),
        ndim(t.shape == nullptr && t.ndim > 0 ? -1 : t.ndim) {
    if (ndim < 0 || ndim > kMaxDims) return;
    uint64_t stride = 1;  // extents of no array may overflow here: check_tensor refuses them
    for (int32_t i = ndim - 1; i >= 0; --i) {
      shape[i] = t.shape[i];
      strides[i] = t.strides != nullptr ? t.strides[i] : static_cast<int64_t>(stride);
      stride *= static_cast<uint64_t>(t.shape[i]);
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

// Whether check_tensor has nothing to say, told from a few bits, as it can be of most tensors: the
// extents of up to 4 axes have 14 each, the strides 40, an element 5.
inline bool is_small(const DLTensor& t) {
  if (t.ndim < 0 || t.ndim > 4 || t.shape == nullptr || t.strides == nullptr) return false;
  uint64_t extents = 0, strides = 0;
  for (int32_t i = 0; i < t.ndim; ++i) {
    extents |= static_cast<uint64_t>(t.shape[i]);
    strides |= static_cast<uint64_t>(t.strides[i]);
  }
  uint64_t address = reinterpret_cast<uintptr_t>(t.data) | t.byte_offset;
  return extents >> 14 == 0 && strides >> 40 == 0 && t.dtype.lanes <= 1 && address >> 62 == 0;
}

// Holds what a producer has written against what every array obeys, so that no size, offset or
// address computed from it overflows. `refuse(parts of the message...)` must not return.
template <class Refuse>
void check_tensor(const DLTensor& t, Refuse&& refuse) {
  if (t.ndim > kMaxDims)
    refuse(" must have at most ", kMaxDims, " axes, got ", t.ndim, "; reshape it");
  if (t.ndim < 0 || (t.ndim > 0 && t.shape == nullptr))
    refuse(" must have a shape, got ", t.shape == nullptr ? "NULL for " : "", t.ndim,
           " axes; pass what its library makes");
  const int64_t item = (int64_t{t.dtype.bits} * t.dtype.lanes + 7) / 8;
  int64_t bytes = item;          // of the axes behind axis i
  int64_t below = 0, above = 0;  // how far from the first element others begin
  for (int32_t i = t.ndim - 1; i >= 0; --i) {
    const int64_t extent = t.shape[i];
    if (extent < 0)
      refuse(" must have extents >= 0, got ", extent, " on axis ", i,
             "; pass what its library makes");
    if (extent <= 1) continue;
    int64_t step = bytes, reach = 0;
    bool overflows = t.strides != nullptr && __builtin_mul_overflow(t.strides[i], item, &step);
    overflows |= __builtin_mul_overflow(extent - 1, step, &reach);
    int64_t& side = reach < 0 ? below : above;
    overflows |= __builtin_add_overflow(side, reach, &side);
    overflows |= __builtin_mul_overflow(bytes, extent, &bytes);
    if (overflows)
      refuse(" must have bytes that 64 bits can count, got extent ", extent, " and stride ",
             t.strides != nullptr ? std::to_string(t.strides[i]) : "NULL", " on axis ", i,
             "; make it smaller");
  }
  if (t.data == nullptr) return;
  uintptr_t first, last;
  if (__builtin_add_overflow(reinterpret_cast<uintptr_t>(t.data), t.byte_offset, &first) ||
      __builtin_add_overflow(first, static_cast<uintptr_t>(above + item), &last) ||
      first < uintptr_t{0} - static_cast<uintptr_t>(below)) {
    refuse(" must lie in memory, got byte_offset ", t.byte_offset, " and elements from ", below,
           " to ", above, " bytes behind the first; pass what its library makes");
  }
}

}  // namespace cuattn
