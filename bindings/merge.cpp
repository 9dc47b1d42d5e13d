// SPDX-License-Identifier: Apache-2.0
// merge_states of the module. Next: python/cuattn/merge.py.
#include "bindings/merge.h"

#include "bindings/arrays/import.h"
#include "bindings/arrays/results.h"
#include "bindings/call/errors.h"
#include "bindings/call/parse.h"
#include "bindings/call/unlocked.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {
namespace {

nb::object merge_states(nb::handle out_a, nb::handle lse_a, nb::handle out_b, nb::handle lse_b,
                        nb::handle layout_arg, nb::handle out, nb::handle lse_out,
                        nb::handle stream_arg) {
  const char* op = "merge_states";
  bool stacked = out_b.is_none();
  const char* out_name = stacked ? "outs" : "out_a";
  const char* lse_name = stacked ? "lses" : "lse_a";
  if (array_type(op, out_name, out_a).library == Library::jax) return nb::borrow(Py_NotImplemented);
  CallStream stream = parse_stream(op, stream_arg);
  Array a, la, b, lb;
  a.import(op, out_name, out_a, stream, nullptr);
  complete_stream(op, a, stream);
  la.import(op, lse_name, lse_a, stream, &a);
  if (!stacked) {
    b.import(op, "out_b", out_b, stream, &a);
    lb.import(op, "lse_b", lse_b, stream, &a);
  }
  int skip = stacked ? 1 : 0;  // the axis of the parts
  int32_t ndim = a.view.ndim - skip;
  if (ndim != 3 && ndim != 4) {
    raise(PyExc_ValueError, op, ": ", out_name, " must have ", 3 + skip, " or ", 4 + skip,
          " axes, got ", a.view.ndim, "; reshape it");
  }
  if (la.view.ndim != a.view.ndim - 1) {
    raise(PyExc_ValueError, op, ": ", lse_name, " must have one axis less than ", out_name, " (",
          a.view.ndim - 1, "), got ", la.view.ndim, "; reshape it");
  }
  int32_t layout = ndim == 4 ? CUATTN_LAYOUT_BSHD : CUATTN_LAYOUT_NHD;
  if (!layout_arg.is_none()) layout = parse_layout(op, layout_arg);

  Result merged, lse;
  merged.provide(op, "out", out, a, stream,
                 view_of(a.view.dtype, ndim, a.view.shape.data() + skip));
  lse.provide(op, "lse_out", lse_out, a, stream,
              view_of({kDLFloat, 32, 1}, ndim - 1, la.view.shape.data() + skip));
  cuattn_status status;
  {
    Unlocked unlocked;
    status = stacked ? cuattn_merge_many(&a.tensor, &la.tensor, &merged.tensor, &lse.tensor, layout,
                                         stream.handle)
                     : cuattn_merge_states(&a.tensor, &la.tensor, &b.tensor, &lb.tensor,
                                           &merged.tensor, &lse.tensor, layout, stream.handle);
  }
  check(status);
  return nb::make_tuple(merged.object, lse.object);
}

}  // namespace

void add_merge(nb::module_& m) {
  m.def("merge_states", &merge_states,
        nb::sig("def merge_states(out_a: object, lse_a: object, out_b: object, lse_b: object, "
                "layout: str | None, "
                "out: object, lse_out: object, stream: object) -> object"),
        nb::arg("out_a").none(), nb::arg("lse_a").none(), nb::arg("out_b").none(),
        nb::arg("lse_b").none(), nb::arg("layout").none(), nb::arg("out").none(),
        nb::arg("lse_out").none(), nb::arg("stream").none(),
        "cuattn.merge_states; out_b = lse_b = None: the parts are stacked on the first axis of "
        "out_a and lse_a.");
}

}  // namespace cuattn::bindings
