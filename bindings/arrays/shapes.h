// SPDX-License-Identifier: Apache-2.0
// What stands for an array where nothing is computed: its shape, and its dtype by name. Next:
// ../explain.cpp.
#pragma once

#include <algorithm>
#include <string>

#include "bindings/arrays/import.h"
#include "bindings/call/parse.h"

namespace cuattn::bindings {

struct DtypeWord {
  const char* text;
  DLDataType dtype;
};

inline DLDataType dtype_named(const char* op, nb::handle value, const char* name = "dtype",
                              const char* way_out = "pass one of these names") {
  static const DtypeWord kWords[] = {
      {"float32", {kDLFloat, 32, 1}},   {"float16", {kDLFloat, 16, 1}},
      {"bfloat16", {kDLBfloat, 16, 1}}, {"float64", {kDLFloat, 64, 1}},
      {"int32", {kDLInt, 32, 1}},       {"int64", {kDLInt, 64, 1}},
      {"bool", {kDLBool, 8, 1}},        {"float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}}};
  std::string text = parse_text(op, name, value);
  for (const DtypeWord& word : kWords) {
    if (text == word.text) return word.dtype;
  }
  raise(PyExc_ValueError, op, ": ", name, " must be float32, float16 or bfloat16, got ", text, "; ",
        way_out);
}

// An array may also be of a dtype that none may have in its place, which its own rule then says.
inline DLDataType parse_array_dtype(const char* op, const char* name, nb::handle value) {
  static const DtypeWord kWords[] = {{"uint8", {kDLUInt, 8, 1}},
                                     {"int8", {kDLInt, 8, 1}},
                                     {"int16", {kDLInt, 16, 1}},
                                     {"uint32", {kDLUInt, 32, 1}}};
  std::string text = parse_text(op, name, value);
  for (const DtypeWord& word : kWords) {
    if (text == word.text) return word.dtype;
  }
  return dtype_named(op, value, name, "cast it");
}

// explain takes shapes as well as arrays: a tuple of extents, led by a dtype or not, is a
// contiguous array without memory. `has_gradient`: of an op that takes arrays that require grad.
inline void import_shape(const char* op, const char* name, nb::handle source, DLDataType dtype,
                         DLDevice device, Array& array, bool has_gradient = false) {
  if (!PyTuple_Check(source.ptr())) {
    has_gradient ? array.describe(op, name, source) : array.import(op, name, source, {}, nullptr);
    return;
  }
  auto items = nb::borrow<nb::tuple>(source);
  int first = !items.empty() && PyUnicode_Check(nb::handle(items[0]).ptr()) ? 1 : 0;
  int64_t extents[kMaxDims];
  DLTensor shape{};
  shape.device = device;
  shape.dtype = first == 1 ? parse_array_dtype(op, name, items[0]) : dtype;
  shape.ndim = static_cast<int32_t>(items.size()) - first;
  shape.shape = extents;
  for (int i = 0; i < std::min(shape.ndim, kMaxDims); ++i)
    extents[i] = parse_int(op, name, items[i + first]);
  array.borrow(op, name, shape);
  array.tensor = array.view.dl();
}

}  // namespace cuattn::bindings
