// SPDX-License-Identifier: Apache-2.0
// flex_attention and its gradients: the arrays and options of attention, and what a mask or score
// function became. Next: python/cuattn/flex/attention.py, backward.py.
#include "bindings/flex.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <deque>
#include <iterator>
#include <vector>

#include "bindings/arrays/import.h"
#include "bindings/arrays/optional.h"
#include "bindings/arrays/results.h"
#include "bindings/arrays/shapes.h"
#include "bindings/backward.h"
#include "bindings/call/errors.h"
#include "bindings/call/options.h"
#include "bindings/call/unlocked.h"
#include "bindings/xla/functors.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {
namespace {

constexpr const char* kOp = "flex_attention";
constexpr const char* kBackwardOp = "flex_attention_backward";

// One argument by name; None where there is none.
nb::handle argument(const nb::dict& arguments, const char* name) {
  PyObject* value = PyDict_GetItemString(arguments.ptr(), name);
  return value != nullptr ? nb::handle(value) : nb::handle(Py_None);
}

// An array of an XLA call that is not made yet, as dtype and shape: its memory is at an address that
// is aligned as XLA's, and nobody reads.
void place_shape(const char* op, const char* name, nb::handle source, DLDevice device,
                 Array& array) {
  constexpr uintptr_t kNowhere = 256;
  import_shape(op, name, source, dl_dtype(DType::f32), device, array);
  if (PyTuple_Check(source.ptr())) array.view.data = reinterpret_cast<void*>(kNowhere);
  array.tensor = array.view.dl();
}

// What Python found in the functions, by name; what is None or missing stays NULL.
struct FlexArrays {
  const char* op;
  cuattn_flex_options options;
  std::deque<Array> storage;  // never moves what it holds
  std::vector<const DLTensor*> captured, gradients;

  const DLTensor* import(const char* name, nb::handle source, const CallStream& stream,
                         const Array& home, bool is_written = false) {
    Array& array = storage.emplace_back();
    if (PyTuple_Check(source.ptr())) {  // of flex_workspace
      place_shape(op, name, source, home.view.device, array);
    } else {
      array.import(op, name, source, stream, &home, is_written);
    }
    return &array.tensor;
  }

  void import(const nb::dict& found, const CallStream& stream, const Array& home) {
    cuattn_flex_options_init(&options, sizeof options);
    const struct {
      const char* name;
      const DLTensor* cuattn_flex_options::* field;
    } kArrays[] = {{"row_begin", &cuattn_flex_options::row_begin},
                   {"row_end", &cuattn_flex_options::row_end},
                   {"score_program", &cuattn_flex_options::score_program},
                   {"mask_program", &cuattn_flex_options::mask_program},
                   {"score_gradient", &cuattn_flex_options::score_gradient},
                   {"block_starts", &cuattn_flex_options::block_starts},
                   {"block_entries", &cuattn_flex_options::block_entries},
                   {"numbers", &cuattn_flex_options::numbers}};
    for (const auto& [name, field] : kArrays) {
      nb::handle source = argument(found, name);
      if (is_given(source)) options.*field = import(name, source, stream, home);
    }
    nb::handle arrays = argument(found, "arrays");
    if (is_given(arrays)) {
      for (nb::handle source : arrays)
        captured.push_back(import("a captured array", source, stream, home));
    }
    options.arrays = captured.data();
    options.num_arrays = static_cast<int64_t>(captured.size());
    nb::handle wanted = argument(found, "array_gradients");
    if (is_given(wanted)) {
      for (nb::handle to : wanted) {
        gradients.push_back(
            is_given(to) ? import("a captured array's gradient", to, stream, home, true) : nullptr);
      }
      options.array_gradients = gradients.data();
    }
    nb::handle query_block = argument(found, "query_block");
    nb::handle key_block = argument(found, "key_block");
    if (is_given(query_block)) options.query_block = parse_int32(op, "query_block", query_block);
    if (is_given(key_block)) options.key_block = parse_int32(op, "key_block", key_block);
    nb::handle functor = argument(found, "functor");
    if (is_given(functor)) options.functor = nb::cast<int64_t>(functor);
  }
};

nb::object flex_attention(const nb::dict& arguments, const nb::dict& found) {
  AttentionArgs args = read_arguments<Attention>(arguments);
  if (array_type(kOp, "q", args.q).library == Library::jax) return nb::borrow(Py_NotImplemented);
  CallStream stream;
  if (is_given(args.stream)) stream = parse_stream(kOp, args.stream);
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  parse_options(kOp, args, options);
  if (is_given(args.lse_out)) options.return_lse = 1;
  Array q, k, v;
  q.import(kOp, "q", args.q, stream, nullptr);
  complete_stream(kOp, q, stream);
  k.import(kOp, "k", args.k, stream, &q);
  v.import(kOp, "v", args.v, stream, &q);
  OptionalArrays<std::size(kAttentionArrays)> optional;
  optional.import(kOp, kAttentionArrays, args, stream, q, options);
  FlexArrays flex{kOp, {}, {}, {}, {}};
  flex.import(found, stream, q);

  cuattn_attention_call call;
  check(cuattn_flex_prepare(&q.tensor, &k.tensor, &v.tensor, &options, &flex.options, &call));
  AttentionOutputs outputs(kOp, call, args, options.return_lse != 0, q, stream);
  cuattn_status status;
  {
    Unlocked unlocked;
    status = outputs.run(cuattn_attention_run, call, stream.handle);
  }
  check(status);
  return outputs.object();
}

nb::object flex_attention_backward(const nb::dict& arguments, const nb::dict& found) {
  const char* op = kBackwardOp;
  BackwardArguments args(arguments, op);
  const AttentionArgs& forward = args.forward;
  if (array_type(op, "q", forward.q).library == Library::jax) return nb::borrow(Py_NotImplemented);
  CallStream stream;
  if (is_given(forward.stream)) stream = parse_stream(op, forward.stream);
  BackwardInputs inputs(op, args, stream);
  const Array& q = inputs.q;
  FlexArrays flex{op, {}, {}, {}, {}};
  flex.import(found, stream, q);
  cuattn_backward_arrays arrays = inputs.arrays();
  cuattn_backward_call call;
  check(cuattn_flex_backward_prepare(&arrays, &args.options, &args.backward_options, &flex.options,
                                     &call));
  return run_backward(op, args, inputs, stream, call);
}

// The bytes of workspace of a forward or, where there is dout, a backward call whose arrays are
// dtypes and shapes on CUDA device `number` (-1: the CPU, which reads lists: leave them out).
size_t flex_workspace(const nb::dict& arguments, const nb::dict& found, int number) {
  bool is_backward = is_given(argument(arguments, "dout"));
  const char* op = is_backward ? kBackwardOp : kOp;
  DLDevice device = number < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, number};
  std::deque<Array> arrays;
  auto place = [&](const char* name) -> const DLTensor* {
    nb::handle source = argument(arguments, name);
    if (!is_given(source)) return nullptr;
    place_shape(op, name, source, device, arrays.emplace_back());
    return &arrays.back().tensor;
  };
  BackwardArguments args(arguments, op);
  for (const auto& option : kAttentionArrays) {
    nb::handle source = argument(arguments, option.name);
    if (option.number != nullptr && is_given(source) && !PyTuple_Check(source.ptr())) {
      args.options.*option.number = parse_double(op, option.name, source);
    } else {
      args.options.*option.tensor = place(option.name);
    }
  }
  const DLTensor *q = place("q"), *k = place("k"), *v = place("v");
  FlexArrays flex{op, {}, {}, {}, {}};
  flex.import(found, {}, arrays[arrays.size() - 3]);
  if (!is_backward) {
    cuattn_attention_call call;
    check(cuattn_flex_prepare(q, k, v, &args.options, &flex.options, &call));
    return call.workspace_bytes;
  }
  cuattn_backward_arrays given{place("dout"), q, k, v, place("out"), place("lse")};
  args.backward_options.dlse = place("dlse");
  cuattn_backward_call call;
  check(cuattn_flex_backward_prepare(&given, &args.options, &args.backward_options, &flex.options,
                                     &call));
  return call.workspace_bytes;
}

}  // namespace

int64_t add_functor(const nb::bytes& image, int32_t packed_heads, bool reads_blocks) {
  int64_t functor = 0;
  check(cuattn_flex_add_functor(image.data(), image.size(), packed_heads, reads_blocks, &functor));
  return functor;
}

void add_flex(nb::module_& m) {
  m.def("add_functor", &add_functor, nb::arg("image"), nb::arg("packed_heads"),
        nb::arg("reads_blocks"),
        "Keep machine code of a mask and a score function, compiled for so many query heads in a "
        "tile "
        "and for keys in blocks or not; return its number.");
  m.def("flex_attention", &flex_attention, nb::arg("arguments"), nb::arg("found"),
        nb::sig("def flex_attention(arguments: dict[str, object], found: dict[str, object]) -> "
                "object"),
        "cuattn.flex_attention of its arguments by name, and of what its functions became. "
        "NotImplemented for JAX arrays.");
  m.def("name_functor", &xla::name_functor, nb::arg("name"), nb::arg("functor"),
        "Give the machine code of a number a name, by which XLA's calls find it.");
  m.def(
      "flex_workspace", &flex_workspace, nb::arg("arguments"), nb::arg("found"), nb::arg("device"),
      nb::sig("def flex_workspace(arguments: dict[str, object], found: dict[str, object], device: "
              "int) -> int"),
      "The bytes of workspace of a call, forward or with dout backward, whose arrays are tuples "
      "of dtype and extents on a CUDA device (-1: the CPU).");
  m.def("flex_attention_backward", &flex_attention_backward, nb::arg("arguments"), nb::arg("found"),
        nb::sig("def flex_attention_backward(arguments: dict[str, object], found: dict[str, "
                "object]) -> object"),
        "Gradients of cuattn.flex_attention: a list of what `need` names. Those of captured arrays "
        "are written into `array_gradients` of found. NotImplemented for JAX arrays.");
}

}  // namespace cuattn::bindings
