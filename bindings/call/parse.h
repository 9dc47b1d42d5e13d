// SPDX-License-Identifier: Apache-2.0
// Python values as the plain options of the C ABI. Only the Python type is judged here; what a
// value means, and whether it may be, is the library's business. Next: module.cpp.
#pragma once

#include <cstring>
#include <string>

#include "bindings/arrays/import.h"
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

inline int64_t parse_int(const char* op, const char* name, nb::handle value) {
  nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid() || PyBool_Check(value.ptr())) {
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

inline double parse_double(const char* op, const char* name, nb::handle value) {
  // numpy turns a complex number into a real one with no more than a warning.
  bool is_complex = !PyFloat_Check(value.ptr()) && nb::hasattr(value, "dtype") &&
                    text_of(nb::object(value.attr("dtype"))).find("complex") != std::string::npos;
  double number = is_complex ? -1.0 : PyFloat_AsDouble(value.ptr());
  if (is_complex || (number == -1.0 && PyErr_Occurred())) {
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
  raise(PyExc_ValueError, op,
        ": layout must be 'bshd' or 'bhsd' (merge_states: or 'nhd', 'thd'), got '", text,
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

inline int32_t parse_int32(const char* op, const char* name, nb::handle value) {
  int64_t number = parse_int(op, name, value);
  if (number != static_cast<int32_t>(number))
    raise(PyExc_ValueError, op, ": ", name, " must fit 32 bits, got ", number,
          "; pass a smaller one");
  return static_cast<int32_t>(number);
}

// The arguments that attention, attention_varlen and explain share, as Python hands them over; an
// invalid handle is an argument that was not given.
struct AttentionArgs {
  nb::handle q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k;
  nb::handle layout, causal, window, scale, softcap, alibi_slopes, sinks, bias, seqused_q,
      seqused_k;
  nb::handle num_splits, batch_invariant, return_lse, backend;
  nb::handle out, lse_out, workspace, stream;
  nb::handle block_tables{}, kv_layout{};
};

// Given, and not None, for the arguments whose default is None.
inline bool is_given(nb::handle value) { return value.is_valid() && !value.is_none(); }

inline void parse_window(const char* op, nb::handle value, cuattn_attention_options& options) {
  nb::object window =
      PyList_Check(value.ptr()) ? nb::steal(PyList_AsTuple(value.ptr())) : nb::borrow(value);
  if (!PyTuple_Check(window.ptr()) || PyTuple_Size(window.ptr()) != 2) {
    raise(PyExc_TypeError, op, ": window must be a pair (left, right), -1 for no limit, got ",
          text_of(nb::repr(value)), "; pass two integers");
  }
  options.window_left = parse_int(op, "window", PyTuple_GetItem(window.ptr(), 0));
  options.window_right = parse_int(op, "window", PyTuple_GetItem(window.ptr(), 1));
}

// Options that were not given keep the defaults of the C ABI, which are those of the package.
inline cuattn_attention_options parse_options(const char* op, const AttentionArgs& args) {
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  if (args.layout.is_valid()) options.layout = parse_layout(op, args.layout);
  if (args.causal.is_valid()) options.causal = parse_bool(op, "causal", args.causal);
  if (args.window.is_valid()) parse_window(op, args.window, options);
  options.has_scale = is_given(args.scale);
  if (options.has_scale) options.scale = parse_double(op, "scale", args.scale);
  if (args.softcap.is_valid()) options.softcap = parse_double(op, "softcap", args.softcap);
  if (args.num_splits.is_valid())
    options.num_splits = parse_int32(op, "num_splits", args.num_splits);
  if (args.batch_invariant.is_valid())
    options.batch_invariant = parse_bool(op, "batch_invariant", args.batch_invariant);
  if (args.return_lse.is_valid())
    options.return_lse = parse_bool(op, "return_lse", args.return_lse);
  if (args.backend.is_valid()) options.backend = parse_text(op, "backend", args.backend);
  if (args.kv_layout.is_valid()) options.kv_layout = parse_kv_layout(op, args.kv_layout);
  if (is_given(args.max_seqlen_q))
    options.max_seqlen_q = parse_int(op, "max_seqlen_q", args.max_seqlen_q);
  if (is_given(args.max_seqlen_k))
    options.max_seqlen_k = parse_int(op, "max_seqlen_k", args.max_seqlen_k);
  return options;
}

}  // namespace cuattn::bindings
