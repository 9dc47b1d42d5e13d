// SPDX-License-Identifier: Apache-2.0
// Python values as the plain options of the C ABI. Only the Python type is judged here; what a
// value means, and whether it may be, is the library's business. Next: options.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "bindings/call/raise.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {

inline bool parse_bool(const char* op, const char* name, nb::handle value) {
  if (value.ptr() == Py_True) return true;
  if (value.ptr() == Py_False) return false;
  std::string type = class_name(value);
  if (type == "bool" || type == "bool_") return PyObject_IsTrue(value.ptr()) == 1;  // numpy's own
  raise(PyExc_TypeError, op, ": ", name, " must be True or False, got ", text_of(nb::repr(value)),
        "; pass a bool");
}

// Whether it is a truth value or complex: Python, numpy and torch make real numbers of these.
inline bool is_no_real_number(nb::handle value) {
  if (PyBool_Check(value.ptr())) return true;
  if (PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr()) || !nb::hasattr(value, "dtype"))
    return false;
  std::string dtype = text_of(nb::object(value.attr("dtype")));
  return dtype.find("bool") != std::string::npos || dtype.find("complex") != std::string::npos;
}

inline int64_t parse_int(const char* op, const char* name, nb::handle value) {
  nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid() || is_no_real_number(value)) {
    PyErr_Clear();
    raise(PyExc_TypeError, op, ": ", name, " must be an integer, got ", text_of(nb::repr(value)),
          "; pass an int");
  }
  int64_t number = PyLong_AsLongLong(index.ptr());
  if (number == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    raise(PyExc_ValueError, op, ": ", name, " must fit 64 bits, got ", text_of(nb::repr(value)),
          "; pass a smaller one");
  }
  return number;
}

// Note: -1 is no seed in C, and would be taken for none beside a dropout_state. Python has None.
inline int64_t parse_seed(const char* op, const char* name, nb::handle value, bool is_read) {
  int64_t seed = parse_int(op, name, value);
  if (seed == -1 && is_read)
    raise(PyExc_ValueError, op, ": ", name, " must lie in [0, 2^63), got -1; pass another");
  return seed;
}

// A tensor whose gradient would be lost on its way to a number.
inline void refuse_tracked_number(const char* op, const char* name, nb::handle value) {
  nb::object tracked = nb::getattr(value, "requires_grad", nb::none());
  if (tracked.ptr() != Py_True ||
      nb::module_::import_("torch").attr("is_grad_enabled")().ptr() != Py_True)
    return;
  const char* instead = std::strcmp(name, "scale") == 0 ? "multiply q by it, or pass " : "pass ";
  raise(PyExc_NotImplementedError, op, ": ", name,
        " requires grad, but no gradient goes through it; ", instead, name, ".item()");
}

inline double parse_double(const char* op, const char* name, nb::handle value) {
  if (!PyFloat_Check(value.ptr()) && !PyLong_Check(value.ptr()))
    refuse_tracked_number(op, name, value);
  bool is_real = !is_no_real_number(value);
  double number = is_real ? PyFloat_AsDouble(value.ptr()) : -1.0;
  if (!is_real || (number == -1.0 && PyErr_Occurred())) {
    PyErr_Clear();
    raise(PyExc_TypeError, op, ": ", name, " must be a number, got ", text_of(nb::repr(value)),
          "; pass a float");
  }
  return number;
}

inline const char* parse_text(const char* op, const char* name, nb::handle value) {
  const char* text =
      PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), nullptr) : nullptr;
  if (text != nullptr) return text;
  PyErr_Clear();
  raise(PyExc_TypeError, op, ": ", name, " must be a string, got ", text_of(nb::repr(value)),
        "; pass a str");
}

inline int32_t parse_layout(const char* op, nb::handle value) {
  struct Word {
    const char* text;
    int32_t code;
  };
  static const Word kWords[] = {{"bshd", CUATTN_LAYOUT_BSHD},
                                {"bhsd", CUATTN_LAYOUT_BHSD},
                                {"nhd", CUATTN_LAYOUT_NHD},
                                {"thd", CUATTN_LAYOUT_THD}};
  const char* text = parse_text(op, "layout", value);
  for (const Word& word : kWords) {
    if (std::strcmp(text, word.text) == 0) return word.code;
  }
  bool merges = std::strcmp(op, "merge_states") == 0;
  raise(PyExc_ValueError, op, ": layout must be 'bshd'",
        merges ? ", 'bhsd', 'nhd' or 'thd', got '" : " or 'bhsd', got '", text,
        "'; choose one of these");
}

inline int32_t parse_kv_layout(const char* op, nb::handle value) {
  struct Word {
    const char* text;
    int32_t code;
  };
  static const Word kWords[] = {
      {"nhd", CUATTN_KV_NHD}, {"hnd", CUATTN_KV_HND}, {"vllm", CUATTN_KV_VLLM}};
  const char* text = parse_text(op, "kv_layout", value);
  for (const Word& word : kWords) {
    if (std::strcmp(text, word.text) == 0) return word.code;
  }
  raise(PyExc_ValueError, op, ": kv_layout must be 'nhd', 'hnd' or 'vllm', got '", text,
        "'; choose one of these");
}

inline int32_t parse_float8(const char* op, const char* name, const char* what, nb::handle value) {
  const char* text = parse_text(op, name, value);
  if (std::strcmp(text, "float8_e4m3fn") == 0) return CUATTN_KV_DTYPE_E4M3;
  raise(PyExc_ValueError, op, ": ", name, " must be None or 'float8_e4m3fn', got '", text,
        "'; it says what uint8 ", what, " hold, other ", what, " say so themselves");
}

inline int32_t parse_kv_dtype(const char* op, nb::handle value) {
  return parse_float8(op, "kv_dtype", "caches", value);
}

inline int32_t parse_dtype(const char* op, nb::handle value) {
  return parse_float8(op, "dtype", "arrays", value);
}

inline int32_t parse_accumulate(const char* op, nb::handle value) {
  const char* text = parse_text(op, "accumulate", value);
  if (std::strcmp(text, "exact") == 0) return CUATTN_ACCUMULATE_EXACT;
  if (std::strcmp(text, "fast") == 0) return CUATTN_ACCUMULATE_FAST;
  raise(PyExc_ValueError, op, ": accumulate must be 'exact' or 'fast', got '", text,
        "'; choose one of these");
}

inline int32_t parse_int32(const char* op, const char* name, nb::handle value) {
  int64_t number = parse_int(op, name, value);
  if (number != static_cast<int32_t>(number))
    raise(PyExc_ValueError, op, ": ", name, " must fit 32 bits, got ", number,
          "; pass a smaller one");
  return static_cast<int32_t>(number);
}

// A pair of integers, a list or a tuple.
inline void parse_pair(const char* op, const char* name, nb::handle value, int64_t& left,
                       int64_t& right) {
  nb::object pair =
      PyList_Check(value.ptr()) ? nb::steal(PyList_AsTuple(value.ptr())) : nb::borrow(value);
  if (!PyTuple_Check(pair.ptr()) || PyTuple_Size(pair.ptr()) != 2) {
    raise(PyExc_TypeError, op, ": ", name, " must be a pair (left, right), -1 for no limit, got ",
          text_of(nb::repr(value)), "; pass two integers");
  }
  left = parse_int(op, name, PyTuple_GetItem(pair.ptr(), 0));
  right = parse_int(op, name, PyTuple_GetItem(pair.ptr(), 1));
}

}  // namespace cuattn::bindings
