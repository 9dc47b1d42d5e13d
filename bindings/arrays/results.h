// SPDX-License-Identifier: Apache-2.0
// Results of a call: given by the caller, or allocated in the library of its first array. Next:
// allocate.h.
#pragma once

#include <algorithm>
#include <optional>

#include "bindings/arrays/allocate.h"
#include "bindings/arrays/import.h"
#include "bindings/call/raise.h"
#include "cuattn/c_api.h"

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

// What a prepared attention call writes: out, lse where it is wanted, its workspace. `args` has
// out, lse_out and workspace; `like` is the first array of the call.
struct AttentionOutputs {
  Result out;
  std::optional<Result> lse;
  CallWorkspace memory;

  template <class Args>
  AttentionOutputs(const char* op, const cuattn_attention_call& call, const Args& args,
                   bool wants_lse, const Array& like, const CallStream& stream) {
    out.provide(op, "out", args.out, like, stream,
                view_of(call.out_dtype, call.out_ndim, call.out_shape));
    if (wants_lse) {
      lse.emplace().provide(op, "lse_out", args.lse_out, like, stream,
                            view_of({kDLFloat, 32, 1}, call.lse_ndim, call.lse_shape));
    }
    memory.place(op, args.workspace, like, call.workspace_bytes, stream);
  }

  // Runs the call by cuattn_attention_run or one of its kind, or checks it.
  template <class Run>
  cuattn_status run(Run* run, cuattn_attention_call& call, void* stream) const {
    return run(&call, &out.tensor, lse ? &lse->tensor : nullptr, memory.data, memory.bytes, stream);
  }
  // What the caller gets.
  nb::object object() const {
    if (!lse) return out.object;
    return nb::make_tuple(out.object, lse->object);
  }
};

}  // namespace cuattn::bindings
