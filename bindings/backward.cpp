// SPDX-License-Identifier: Apache-2.0
// attention_backward and attention_varlen_backward: import, prepare, allocate what is needed in the
// library of q, run. Next: python/cuattn/backward.py.
#include "bindings/backward.h"

#include "bindings/arrays/results.h"
#include "bindings/call/errors.h"
#include "bindings/call/unlocked.h"

namespace cuattn::bindings {

BackwardInputs::BackwardInputs(const char* op, BackwardArguments& args, CallStream& stream) {
  const AttentionArgs& forward = args.forward;
  q.import(op, "q", forward.q, stream, nullptr);
  complete_stream(op, q, stream);
  dout.import(op, "dout", args.own.dout, stream, &q);
  k.import(op, "k", forward.k, stream, &q);
  v.import(op, "v", forward.v, stream, &q);
  out.import(op, "out", args.own.out, stream, &q);
  lse.import(op, "lse", args.own.lse, stream, &q);
  optional.import(op, kAttentionArrays, forward, stream, q, args.options);
  if (!is_given(args.own.dlse)) return;
  dlse.import(op, "dlse", args.own.dlse, stream, &q);
  args.backward_options.dlse = &dlse.tensor;
}

nb::object run_backward(const char* op, const BackwardArguments& args, const BackwardInputs& inputs,
                        const CallStream& stream, cuattn_backward_call& call) {
  const DLTensor* like[kNumGradients] = {&inputs.q.tensor,   &inputs.k.tensor,
                                         &inputs.v.tensor,   args.options.bias,
                                         args.options.sinks, args.options.alibi_slopes};
  Result results[kNumGradients];
  cuattn_gradients gradients{};
  for (int i = 0; i < kNumGradients; ++i) {
    const Gradient& gradient = kGradients[i];
    if ((args.backward_options.need & gradient.bit) == 0) continue;
    results[i].provide(op, gradient.name, args.own.*gradient.given, inputs.q, stream,
                       view_of(like[i]->dtype, like[i]->ndim, like[i]->shape));
    gradients.*gradient.field = &results[i].tensor;
  }
  CallWorkspace memory;
  memory.place(op, args.forward.workspace, inputs.q, call.workspace_bytes, stream);
  cuattn_status status;
  {
    Unlocked unlocked;
    status =
        cuattn_attention_backward_run(&call, &gradients, memory.data, memory.bytes, stream.handle);
  }
  check(status);
  nb::list found;
  for (nb::handle name : args.need) found.append(results[gradient_of(op, name)].object);
  return found;
}

namespace {

nb::object attention_backward(const nb::dict& arguments) {
  BackwardArguments args(arguments);
  const AttentionArgs& forward = args.forward;
  const char* op = args.op;
  if (array_type(op, "q", forward.q).library == Library::jax) return nb::borrow(Py_NotImplemented);
  CallStream stream;
  if (is_given(forward.stream)) stream = parse_stream(op, forward.stream);
  BackwardInputs inputs(op, args, stream);
  cuattn_backward_arrays arrays = inputs.arrays();
  cuattn_backward_call call;
  check(cuattn_attention_backward_prepare(&arrays, &args.options, &args.backward_options, &call));
  return run_backward(op, args, inputs, stream, call);
}

}  // namespace

void add_backward(nb::module_& m) {
  m.def("attention_backward", &attention_backward, nb::arg("arguments"),
        nb::sig("def attention_backward(arguments: dict[str, object]) -> object"),
        "cuattn.attention_backward, or attention_varlen_backward where cu_seqlens_q is among them, "
        "of its arguments by name. A list of what `need` names, or NotImplemented for JAX arrays.");
}

}  // namespace cuattn::bindings
