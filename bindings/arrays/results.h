// SPDX-License-Identifier: Apache-2.0
// Results of a call: given by the caller, or allocated in the library of its first array. Next:
// allocate.h.
#pragma once

#include <algorithm>
#include <optional>

#include "bindings/arrays/allocate.h"
#include "bindings/arrays/import.h"
#include "bindings/call/raise.h"

namespace cuattn::bindings {

// One result: `out=` as the caller gave it, or a new array.
struct Result {
  std::optional<Array> given;
  Allocation made;
  DLTensor tensor;
  nb::object object;

  void provide(const char* op, const char* name, nb::handle source, const Array& like,
               const CallStream& stream, const TensorView& wanted) {
    if (is_given(source)) {
      given.emplace().import(op, name, source, stream, &like, true);
      tensor = given->tensor;
      object = nb::borrow(source);
    } else {
      made = allocate(op, name, like, wanted, stream);
      tensor = made.view.dl();
      object = made.object;
    }
  }
};

inline TensorView view_of(DLDataType dtype, int32_t ndim, const int64_t* shape) {
  TensorView view;
  view.dtype = dtype;
  view.ndim = ndim;
  std::copy(shape, shape + ndim, view.shape.begin());
  return view;
}

// The workspace of one call: lent as `workspace=`, or allocated.
struct CallWorkspace : WorkspaceMemory {
  std::optional<Array> lent;

  void place(const char* op, nb::handle source, const Array& like, size_t needed,
             const CallStream& stream) {
    if (is_given(source)) {
      lent.emplace().import(op, "workspace", source, stream, &like, true);
      lend(op, *lent, like);
    } else {
      provide(op, like, needed, stream);
    }
  }
};

}  // namespace cuattn::bindings
