// SPDX-License-Identifier: Apache-2.0
// attention_backward and attention_varlen_backward: import, prepare, allocate what is needed in the
// library of q, run. Next: python/cuattn/backward.py.
#include "bindings/backward.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>

#include "bindings/arrays/allocate.h"
#include "bindings/arrays/import.h"
#include "bindings/arrays/results.h"
#include "bindings/call/errors.h"
#include "bindings/call/parse.h"
#include "bindings/call/unlocked.h"
#include "bindings/explain.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {
namespace {

// One argument by name; invalid where there is none.
nb::handle argument(const nb::dict& arguments, const char* name) {
  return PyDict_GetItemString(arguments.ptr(), name);
}

struct Gradient {
  const char* name;
  int32_t bit;
  const DLTensor* cuattn_gradients::* field;
};
constexpr Gradient kGradients[] = {{"dq", CUATTN_NEED_DQ, &cuattn_gradients::dq},
                                   {"dk", CUATTN_NEED_DK, &cuattn_gradients::dk},
                                   {"dv", CUATTN_NEED_DV, &cuattn_gradients::dv},
                                   {"dbias", CUATTN_NEED_DBIAS, &cuattn_gradients::dbias},
                                   {"dsinks", CUATTN_NEED_DSINKS, &cuattn_gradients::dsinks},
                                   {"dslopes", CUATTN_NEED_DSLOPES, &cuattn_gradients::dslopes}};
constexpr int kNumGradients = 6;

// The arrays of one backward pass and the C options that point at them. `Import` makes an Array of
// an argument: of memory, or of a shape.
struct BackwardInputs {
  Array dout, q, k, v, out, lse, dlse, alibi_slopes, sinks, bias, seqused_q, seqused_k,
      cu_seqlens_q, cu_seqlens_k, dropout_state;
  cuattn_backward_arrays arrays;
  cuattn_attention_options options;
  cuattn_backward_options backward_options;

  template <class Import>
  void read(const char* op, const nb::dict& arguments, Import&& import) {
    auto given = [&](const char* name, const char* dtype, Array& array) -> const DLTensor* {
      nb::handle source = argument(arguments, name);
      if (!is_given(source)) return nullptr;
      import(name, source, dtype, array);
      return &array.tensor;
    };
    auto required = [&](const char* name, const char* dtype, Array& array) {
      nb::handle source = argument(arguments, name);
      import(name, source.is_valid() ? source : nb::handle(Py_None), dtype, array);
      return &array.tensor;
    };
    arrays.q = required("q", nullptr, q);  // the others are held against it
    arrays.dout = required("dout", nullptr, dout);
    arrays.k = required("k", nullptr, k);
    arrays.v = required("v", nullptr, v);
    arrays.out = required("out", nullptr, out);
    arrays.lse = required("lse", "float32", lse);

    AttentionArgs args{};
    args.layout = argument(arguments, "layout");
    args.causal = argument(arguments, "causal");
    args.window = argument(arguments, "window");
    args.scale = argument(arguments, "scale");
    args.softcap = argument(arguments, "softcap");
    args.batch_invariant = argument(arguments, "batch_invariant");
    args.backend = argument(arguments, "backend");
    args.max_seqlen_q = argument(arguments, "max_seqlen_q");
    args.max_seqlen_k = argument(arguments, "max_seqlen_k");
    options = parse_options(op, args);
    options.alibi_slopes = given("alibi_slopes", "float32", alibi_slopes);
    options.sinks = given("sinks", "float32", sinks);
    options.bias = given("bias", nullptr, bias);
    options.seqused_q = given("seqused_q", "int32", seqused_q);
    options.seqused_k = given("seqused_k", "int32", seqused_k);
    options.cu_seqlens_q = given("cu_seqlens_q", "int32", cu_seqlens_q);
    options.cu_seqlens_k = given("cu_seqlens_k", "int32", cu_seqlens_k);
    read_dropout(op, arguments, import);

    cuattn_backward_options_init(&backward_options, sizeof backward_options);
    backward_options.dlse = given("dlse", "float32", dlse);
    nb::handle deterministic = argument(arguments, "deterministic");
    if (is_given(deterministic))
      backward_options.deterministic = parse_bool(op, "deterministic", deterministic);
    backward_options.need = 0;
    for (nb::handle name : nb::borrow<nb::tuple>(argument(arguments, "need"))) {
      for (const Gradient& gradient : kGradients) {
        if (std::strcmp(parse_text(op, "need", name), gradient.name) == 0)
          backward_options.need |= gradient.bit;
      }
    }
  }

 private:
  template <class Import>
  void read_dropout(const char* op, const nb::dict& arguments, Import&& import) {
    nb::handle p = argument(arguments, "dropout_p");
    if (is_given(p)) options.dropout_p = parse_double(op, "dropout_p", p);
    nb::handle seed = argument(arguments, "dropout_seed");
    if (is_given(seed) && (PyLong_Check(seed.ptr()) || PyIndex_Check(seed.ptr())) &&
        !nb::hasattr(seed, "__dlpack__")) {
      options.has_dropout_seed = 1;
      options.dropout_seed = parse_int(op, "dropout_seed", seed);
    } else if (is_given(seed)) {
      import("dropout_seed", seed, "int64", dropout_state);
      options.dropout_state = &dropout_state.tensor;
    }
    nb::handle offset = argument(arguments, "dropout_offset");
    if (is_given(offset)) options.dropout_offset = parse_int(op, "dropout_offset", offset);
  }
};

const char* function_of(const nb::dict& arguments) {
  return argument(arguments, "cu_seqlens_q").is_valid() ? "attention_varlen_backward"
                                                        : "attention_backward";
}

nb::object attention_backward(nb::dict arguments) {
  const char* op = function_of(arguments);
  nb::handle q = argument(arguments, "q");
  if (array_type(op, "q", q).library == Library::jax) return nb::borrow(Py_NotImplemented);
  CallStream stream;
  nb::handle stream_given = argument(arguments, "stream");
  if (is_given(stream_given)) stream = parse_stream(op, stream_given);
  BackwardInputs inputs;
  inputs.read(op, arguments, [&](const char* name, nb::handle source, const char*, Array& array) {
    bool is_first = &array == &inputs.q;
    array.import(op, name, source, stream, is_first ? nullptr : &inputs.q);
    if (is_first) complete_stream(op, array, stream);
  });

  cuattn_backward_call call;
  check(cuattn_attention_backward_prepare(&inputs.arrays, &inputs.options, &inputs.backward_options,
                                          &call));

  const Array* like[] = {&inputs.q,    &inputs.k,     &inputs.v,
                         &inputs.bias, &inputs.sinks, &inputs.alibi_slopes};
  Result results[kNumGradients];
  cuattn_gradients gradients{};
  for (int i = 0; i < kNumGradients; ++i) {
    const Gradient& gradient = kGradients[i];
    if ((inputs.backward_options.need & gradient.bit) == 0) continue;
    const TensorView& view = like[i]->view;
    results[i].provide(op, gradient.name, argument(arguments, gradient.name), inputs.q, stream,
                       view_of(view.dtype, view.ndim, view.shape.data()));
    gradients.*gradient.field = &results[i].tensor;
  }
  CallWorkspace memory;
  memory.place(op, argument(arguments, "workspace"), inputs.q, call.workspace_bytes, stream);
  cuattn_status status;
  {
    Unlocked unlocked;
    status =
        cuattn_attention_backward_run(&call, &gradients, memory.data, memory.bytes, stream.handle);
  }
  check(status);
  nb::list made;
  for (nb::handle name : nb::borrow<nb::tuple>(argument(arguments, "need"))) {
    for (int i = 0; i < kNumGradients; ++i) {
      if (std::strcmp(parse_text(op, "need", name), kGradients[i].name) == 0)
        made.append(results[i].object);
    }
  }
  return made;
}

nb::dict explain_backward(nb::dict arguments, nb::handle dtype, int shapes_on, nb::handle device) {
  const char* op = function_of(arguments);
  DLDataType scalars = parse_dtype(op, dtype);
  DLDevice place = shapes_on < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, shapes_on};
  BackwardInputs inputs;
  inputs.read(op, arguments,
              [&](const char* name, nb::handle source, const char* of_dtype, Array& array) {
                DLDataType own = of_dtype == nullptr ? scalars : parse_dtype(op, nb::str(of_dtype));
                import_shape(op, name, source, own, place, array);
              });
  cuattn_device made_up;
  if (!device.is_none()) made_up = parse_device(device);
  cuattn_plan plan;
  check(cuattn_attention_backward_explain(&inputs.arrays, &inputs.options, &inputs.backward_options,
                                          device.is_none() ? nullptr : &made_up, &plan));
  return plan_dict(plan);
}

}  // namespace

void add_backward(nb::module_& m) {
  m.def("attention_backward", &attention_backward, nb::arg("arguments"),
        nb::sig("def attention_backward(arguments: dict[str, object]) -> object"),
        "cuattn.attention_backward, or attention_varlen_backward where cu_seqlens_q is among them, "
        "of its arguments by name. A list of what `need` names, or NotImplemented for JAX arrays.");
  m.def("explain_backward", &explain_backward, nb::arg("arguments"), nb::arg("dtype"),
        nb::arg("shapes_on"), nb::arg("device").none(),
        nb::sig("def explain_backward(arguments: dict[str, object], dtype: str, shapes_on: int, "
                "device: dict[str, object] | None) -> dict[str, object]"),
        "The plan of a backward pass.");
}

}  // namespace cuattn::bindings
