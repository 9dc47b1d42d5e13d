// SPDX-License-Identifier: Apache-2.0
// How a refusal becomes a Python exception, and what Python objects are called in its message.
// Next: parse.h.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "cuattn/error.h"

namespace cuattn::bindings {

namespace nb = nanobind;

// Sets a Python exception and throws it; the message is built like that of CUATTN_REQUIRE.
template <class... Parts>
[[noreturn]] void raise(PyObject* exception, const Parts&... parts) {
  PyErr_SetString(exception, concat(parts...).c_str());
  throw nb::python_error();
}

inline std::string text_of(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

inline std::string class_name(nb::handle object) {
  return text_of(nb::object(object.type().attr("__name__")));
}

// Given, and not None, for the arguments whose default is None.
inline bool is_given(nb::handle value) { return value.is_valid() && !value.is_none(); }

}  // namespace cuattn::bindings
