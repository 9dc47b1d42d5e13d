// SPDX-License-Identifier: Apache-2.0
// How the arguments of a function are listed: `Args` is a struct of handles, one for each. The
// lists are generated: options.h.
#pragma once

#include <cstddef>
#include <cstdint>

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

// Names as a program's text has them: interned, so that they compare as pointers, and are found by
// their address: a list would make the last name take longer than the first.
template <class Args>
class Names {
 public:
  Names() = default;
  template <size_t kCount>
  explicit Names(const Argument<Args> (&arguments)[kCount]) {
    static_assert(kCount < kSlots, "a slot must stay free, where a search ends");
    for (const Argument<Args>& argument : arguments) {
      PyObject* name = PyUnicode_InternFromString(argument.name);
      size_t slot = first_slot(name);
      while (entries_[slot].name != nullptr) slot = (slot + 1) % kSlots;
      entries_[slot] = {name, argument.field};
    }
  }

  // The field of a name; nullptr if it is unknown, or not interned.
  nb::handle Args::* field(PyObject* name) const {
    size_t slot = first_slot(name);
    while (entries_[slot].name != nullptr && entries_[slot].name != name)
      slot = (slot + 1) % kSlots;
    return entries_[slot].field;
  }

 private:
  static constexpr size_t kSlots = 128;  // more than twice the names of any function
  struct Entry {
    PyObject* name = nullptr;
    nb::handle Args::* field = nullptr;
  };
  Entry entries_[kSlots];

  static size_t first_slot(PyObject* name) {
    return reinterpret_cast<uintptr_t>(name) / 16 % kSlots;  // Python aligns objects to 16 bytes
  }
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
