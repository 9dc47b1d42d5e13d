// SPDX-License-Identifier: Apache-2.0
// What is found in the interpreter: modules that are loaded, and tables made of them once. Next:
// numpy.h, import.h.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

namespace cuattn::bindings {

namespace nb = nanobind;

// An imported module or None: this package never imports an array library on its own.
inline nb::object loaded_module(const char* name) {
  nb::str key(name);
  PyObject* module = PyImport_GetModule(key.ptr());
  if (module == nullptr) PyErr_Clear();
  return module == nullptr ? nb::none() : nb::steal(module);
}

// The process's only `Table`, filled at its first use and never destroyed: the interpreter may be
// gone by then. Needs the interpreter lock.
// Note: filling a table runs Python code, which may lend the lock to another thread. A function's
// own `static Table table` would then hang the process: that thread waits for the first to leave
// the initialiser, and the first for the lock. Here both fill one, and the first stored is kept.
template <class Table>
Table& the() {
  static Table* stored = nullptr;
  if (stored != nullptr) return *stored;
  Table filled;
  if (stored == nullptr) stored = new Table(std::move(filled));
  return *stored;
}

}  // namespace cuattn::bindings
