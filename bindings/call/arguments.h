// SPDX-License-Identifier: Apache-2.0
// How the arguments of a function are listed: `Args` is a struct of handles, one for each. The
// lists are generated: options.h.
#pragma once

#include <vector>

#include "bindings/call/raise.h"
#include "cuattn/dlpack.h"

namespace cuattn::bindings {

template <class Args>
struct Argument {
  const char* name;
  nb::handle Args::* field;
};

// What an array holds, where explain is given its shape alone.
enum class Holds { like_q, float32, int32, int64 };

// An option that is an array; with a `number`, it may be one instead.
template <class Args, class Options>
struct ArrayOption {
  const char* name;
  nb::handle Args::* source;
  const DLTensor* Options::* tensor;
  Holds holds;
  bool is_output = false;
  double Options::* number = nullptr;
};

// Names as a program's text has them: interned, so that they compare as pointers.
template <class Args>
class Names {
 public:
  Names() = default;
  template <class Arguments>
  explicit Names(const Arguments& arguments) {
    for (const Argument<Args>& argument : arguments)
      entries_.push_back({PyUnicode_InternFromString(argument.name), argument.field});
  }

  // The field of a name; nullptr if it is unknown, or not interned.
  nb::handle Args::* field(PyObject* name) const {
    for (const Entry& entry : entries_) {
      if (entry.name == name) return entry.field;
    }
    return nullptr;
  }

 private:
  struct Entry {
    PyObject* name;
    nb::handle Args::* field;
  };
  std::vector<Entry> entries_;
};

// The arguments that a dict has by name; other names than those of `Function` are left out.
template <class Function>
Function::Args read_arguments(const nb::dict& given) {
  using Args = Function::Args;
  static const auto* names = new Names<Args>(Function::kAll);  // never destroyed
  Args args;
  for (auto [key, value] : given) {
    PyObject* name = key.ptr();
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    if (nb::handle Args::* field = names->field(name)) args.*field = value;
    Py_DECREF(name);
  }
  return args;
}

}  // namespace cuattn::bindings
