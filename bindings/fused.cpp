// SPDX-License-Identifier: Apache-2.0
// Rotary embedding, norms, activations and sampling of the module. Next: python/cuattn/rope.py,
// fused.py, sampling.py.
#include "bindings/fused.h"

#include <cstring>
#include <optional>

#include "bindings/arrays/import.h"
#include "bindings/arrays/results.h"
#include "bindings/arrays/shapes.h"
#include "bindings/call/errors.h"
#include "bindings/call/parse.h"
#include "bindings/call/unlocked.h"
#include "cuattn/c_api_fused.h"

namespace cuattn::bindings {
namespace {

// The arrays of one call, whose first decides stream and library.
class Call {
 public:
  Call(const char* op, const char* name, nb::handle source, nb::handle stream_arg)
      : op(op), stream(parse_stream(op, stream_arg)) {
    first.import(op, name, source, stream, nullptr);
    complete_stream(op, first, stream);
  }

  // An array of the call, or nullptr where it is not given; `storage` keeps it.
  const DLTensor* import(const char* name, nb::handle source, std::optional<Array>& storage,
                         bool output = false) const {
    return import_given(op, name, source, stream, first, storage, output);
  }

  template <class Run>
  void run(Run&& run) const {
    cuattn_status status;
    {
      Unlocked unlocked;
      status = run();
    }
    check(status);
  }

  const char* op;
  CallStream stream;
  Array first;
};

// JAX arrays go to cuattn.jax.
bool is_jax(const char* op, const char* name, nb::handle array) {
  return array_type(op, name, array).library == Library::jax;
}

TensorView like(const Array& array) {
  return view_of(array.view.dtype, array.view.ndim, array.view.shape.data());
}

void require_axes(const char* op, const char* name, const Array& array, int32_t least) {
  if (array.view.ndim >= least && array.view.ndim <= kMaxDims) return;
  raise(PyExc_ValueError, op, ": ", name, " must have from ", least, " to ", kMaxDims,
        " axes, got ", array.view.ndim, "; reshape it");
}

// Queries [num_seqs, heads, dim] of one token a sequence, and their positions, with an axis of
// tokens.
void insert_tokens(Array& array, int32_t ndim) {
  TensorView& view = array.view;
  if (view.ndim != ndim) return;
  for (int32_t axis = ndim; axis > 1; --axis) {
    view.shape[axis] = view.shape[axis - 1];
    view.strides[axis] = view.strides[axis - 1];
  }
  view.shape[1] = 1;
  view.strides[1] = view.strides[0];
  view.ndim = ndim + 1;
  array.tensor = view.dl();
}

nb::object apply_rope(const char* op, const char* name, nb::handle x, nb::handle cos,
                      nb::handle sin, nb::handle positions, nb::handle interleaved,
                      nb::handle inverse, nb::handle offset, const nb::dict& lengths,
                      nb::handle out, nb::handle stream) {
  if (is_jax(op, name, x)) return nb::borrow(Py_NotImplemented);
  Call call(op, name, x, stream);
  require_axes(call.op, name, call.first, 3);
  cuattn_rope_options options;
  cuattn_rope_options_init(&options, sizeof options);
  options.interleaved = parse_bool(call.op, "interleaved", interleaved);
  options.inverse = parse_bool(call.op, "inverse", inverse);
  options.offset = parse_int(call.op, "offset", offset);
  Array cos_array, sin_array;
  std::optional<Array> positions_array, arrays[4];
  cos_array.import(call.op, "cos", cos, call.stream, &call.first);
  sin_array.import(call.op, "sin", sin, call.stream, &call.first);
  options.positions = call.import("positions", positions, positions_array);
  auto given = [&](const char* key) {
    return lengths.contains(key) ? nb::object(lengths[key]) : nb::none();
  };
  const DLTensor** fields[4] = {&options.cu_seqlens_q, &options.cu_seqlens_k, &options.seqused_q,
                                &options.seqused_k};
  const char* names[4] = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"};
  for (int i = 0; i < 4; ++i) *fields[i] = call.import(names[i], given(names[i]), arrays[i]);
  if (lengths.contains("layout")) options.layout = parse_layout(call.op, given("layout"));
  if (lengths.contains("seqlen_k"))
    options.seqlen_k = parse_int(call.op, "seqlen_k", given("seqlen_k"));
  Result result;
  result.provide(call.op, "out", out, call.first, call.stream, like(call.first));
  DLTensor turned = result.tensor;
  TensorView turned_view(turned);
  if (lengths.contains("one_token")) {  // of each sequence
    Array whole;
    whole.view = turned_view;
    insert_tokens(whole, 3);
    turned_view = whole.view;
    turned = turned_view.dl();
    insert_tokens(call.first, 3);
    if (positions_array) insert_tokens(*positions_array, 1);
  }
  call.run([&] {
    return cuattn_apply_rope(&call.first.tensor, &cos_array.tensor, &sin_array.tensor, &options,
                             &turned, call.stream.handle);
  });
  return result.object;
}

// The sum of attention(residual=), without memory: of q's dtype, or of residual's where q is codes.
TensorView sum_like(const char* op, const Array& q, const Array& v, const Array& residual) {
  if (q.view.ndim != 4) {
    raise(PyExc_ValueError, op, ": q must have 4 axes [batch, seqlen, num_heads, head_dim], got ",
          q.view.ndim, "; reshape it");
  }
  require_axes(op, "v", v, 1);
  TensorView sum = like(q);
  if (sum.dtype.bits == 8) sum.dtype = residual.view.dtype;
  sum.shape[sum.ndim - 1] = v.view.shape[v.view.ndim - 1];
  return sum;
}

// Where attention(residual=) has its own result, in float32, and the sum. All is checked as it will
// be added.
nb::object residual_places(const char* op, nb::handle q, nb::handle v, nb::handle residual,
                           nb::handle out, nb::handle lse_out, nb::handle workspace,
                           bool is_rounding, nb::handle stream) {
  if (is_jax(op, "q", q)) return nb::borrow(Py_NotImplemented);
  Call call(op, "q", q, stream);
  Array values, added;
  values.import(op, "v", v, call.stream, &call.first);
  added.import(op, "residual", residual, call.stream, &call.first);
  TensorView sum = sum_like(op, call.first, values, added), wide = sum;
  if (is_rounding && sum.dtype.bits == 16 && call.first.is_cuda()) {
    raise(
        PyExc_NotImplementedError, op,
        ": residual is added to a result in float32, which backends 'naive', 'cublas' and 'tiled' "
        "do not write from 16-bit inputs; use 'auto', or q, k and v in float32");
  }
  wide.dtype = dl_dtype(DType::f32);
  Result result, attended;
  result.provide(op, "out", out, call.first, call.stream, sum);
  std::optional<Array> lse_array, memory_array;
  const DLTensor* lse = call.import("lse_out", lse_out, lse_array, true);
  const DLTensor* memory = call.import("workspace", workspace, memory_array, true);
  bool is_shared = sum.is(DType::f32) && !is_given(out);  // it is added in place
  if (!is_shared) attended.provide(op, "out", nb::none(), call.first, call.stream, wide);
  const Result& from = is_shared ? result : attended;
  call.run([&] {
    return cuattn_check_residual(op, &from.tensor, &added.tensor, &result.tensor, lse, memory);
  });
  return nb::make_tuple(from.object, result.object);
}

// Of arrays or of shapes, which are of `dtype` and lie on CUDA device `shapes_on` (-1: the CPU).
void check_residual_shape(const char* op, nb::handle q, nb::handle v, nb::handle residual,
                          nb::handle dtype, int shapes_on) {
  DLDataType scalars = dtype_named(op, dtype);
  DLDevice device = shapes_on < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, shapes_on};
  Array queries, values, added;
  import_shape(op, "q", q, scalars, device, queries);
  import_shape(op, "v", v, scalars, device, values);
  if (scalars.bits == 8) scalars = dl_dtype(DType::bf16);  // as out of codes is
  import_shape(op, "residual", residual, scalars, device, added);
  TensorView sum = sum_like(op, queries, values, added);
  sum.device = queries.view.device;
  DLTensor shape = sum.dl();
  shape.strides = nullptr;  // contiguous
  check(cuattn_check_residual(op, &shape, &added.tensor, &shape, nullptr, nullptr));
}

nb::object add_residual(const char* op, nb::handle x, nb::handle residual, nb::handle out,
                        nb::handle stream) {
  Call call(op, "out", x, stream);
  Array added, sum;
  added.import(op, "residual", residual, call.stream, &call.first);
  sum.import(op, "out", out, call.stream, &call.first, true);
  call.run([&] {
    return cuattn_add_residual(&call.first.tensor, &added.tensor, &sum.tensor, call.stream.handle);
  });
  return nb::borrow(out);
}

nb::object norm(bool centred, nb::handle x, nb::handle weight, nb::handle bias, nb::handle eps,
                nb::handle weight_offset, nb::handle residual, nb::handle out,
                nb::handle residual_out, nb::handle stream) {
  if (is_jax(centred ? "layer_norm" : "rms_norm", "x", x)) return nb::borrow(Py_NotImplemented);
  Call call(centred ? "layer_norm" : "rms_norm", "x", x, stream);
  require_axes(call.op, "x", call.first, 1);
  cuattn_norm_options options;
  cuattn_norm_options_init(&options, sizeof options);
  options.eps = parse_double(call.op, "eps", eps);
  options.weight_offset = parse_double(call.op, "weight_offset", weight_offset);
  Array weight_array;
  std::optional<Array> bias_array, residual_array, sum_array;
  weight_array.import(call.op, "weight", weight, call.stream, &call.first);
  options.bias = call.import("bias", bias, bias_array);
  bool in_place = is_given(residual) && !is_given(residual_out);
  options.residual = call.import("residual", residual, residual_array, in_place);
  options.residual_out =
      in_place ? options.residual : call.import("residual_out", residual_out, sum_array, true);
  Result result;
  result.provide(call.op, "out", out, call.first, call.stream, like(call.first));
  call.run([&] {
    auto run = centred ? cuattn_layer_norm : cuattn_rms_norm;
    return run(&call.first.tensor, &weight_array.tensor, &options, &result.tensor,
               call.stream.handle);
  });
  if (!is_given(residual)) return result.object;
  return nb::make_tuple(result.object, in_place ? residual : residual_out);
}

int32_t parse_act(const char* op, nb::handle value) {
  const char* text = parse_text(op, "act", value);
  if (std::strcmp(text, "silu") == 0) return CUATTN_ACT_SILU;
  if (std::strcmp(text, "gelu") == 0) return CUATTN_ACT_GELU;
  if (std::strcmp(text, "gelu_tanh") == 0) return CUATTN_ACT_GELU_TANH;
  raise(PyExc_ValueError, op, ": act must be 'silu', 'gelu' or 'gelu_tanh', got '", text,
        "'; choose one of these");
}

nb::object activate(bool gated, nb::handle x, nb::handle bias, nb::handle act, nb::handle out,
                    nb::handle stream) {
  if (is_jax(gated ? "act_mul" : "bias_act", "x", x)) return nb::borrow(Py_NotImplemented);
  Call call(gated ? "act_mul" : "bias_act", "x", x, stream);
  require_axes(call.op, "x", call.first, 1);
  int32_t activation = parse_act(call.op, act);
  std::optional<Array> bias_array;
  const DLTensor* bias_tensor = call.import("bias", bias, bias_array);
  TensorView shape = like(call.first);
  if (gated) shape.shape[shape.ndim - 1] /= 2;
  Result result;
  result.provide(call.op, "out", out, call.first, call.stream, shape);
  call.run([&] {
    auto run = gated ? cuattn_act_mul : cuattn_bias_act;
    return run(&call.first.tensor, bias_tensor, activation, &result.tensor, call.stream.handle);
  });
  return result.object;
}

// An option that is a number or an array.
struct NumberOrArray {
  std::optional<Array> array;
  const DLTensor* tensor = nullptr;

  // True where it is a number.
  bool read(Call& call, const char* name, nb::handle source) {
    if (!nb::hasattr(source, "__dlpack__")) return true;
    tensor = call.import(name, source, array);
    return false;
  }
};

void read_random(Call& call, nb::handle seed, nb::handle offset, NumberOrArray (&arrays)[2],
                 cuattn_sample_options& options) {
  if (is_given(seed) && arrays[0].read(call, "seed", seed))
    options.seed = parse_int(call.op, "seed", seed);
  if (arrays[1].read(call, "offset", offset)) options.offset = parse_int(call.op, "offset", offset);
  options.seeds = arrays[0].tensor;
  options.offsets = arrays[1].tensor;
}

nb::object sample(nb::handle logits, nb::handle temperature, nb::handle top_k, nb::handle top_p,
                  nb::handle min_p, nb::handle joint, nb::handle seed, nb::handle offset,
                  nb::handle out, nb::handle stream) {
  if (is_jax("sample", "logits", logits)) return nb::borrow(Py_NotImplemented);
  Call call("sample", "logits", logits, stream);
  require_axes(call.op, "logits", call.first, 1);
  cuattn_sample_options options;
  cuattn_sample_options_init(&options, sizeof options);
  NumberOrArray temperatures, top_ks, top_ps, min_ps, random[2];
  if (temperatures.read(call, "temperature", temperature))
    options.temperature = parse_double(call.op, "temperature", temperature);
  if (is_given(top_k) && top_ks.read(call, "top_k", top_k))
    options.top_k = parse_int(call.op, "top_k", top_k);
  if (is_given(top_p) && top_ps.read(call, "top_p", top_p))
    options.top_p = parse_double(call.op, "top_p", top_p);
  if (is_given(min_p) && min_ps.read(call, "min_p", min_p))
    options.min_p = parse_double(call.op, "min_p", min_p);
  options.temperatures = temperatures.tensor;
  options.top_ks = top_ks.tensor;
  options.top_ps = top_ps.tensor;
  options.min_ps = min_ps.tensor;
  options.joint = parse_bool(call.op, "joint", joint);
  read_random(call, seed, offset, random, options);
  Result result;
  result.provide(call.op, "out", out, call.first, call.stream,
                 view_of({kDLInt, 32, 1}, 1, call.first.view.shape.data()));
  call.run([&] {
    return cuattn_sample(&call.first.tensor, &options, &result.tensor, call.stream.handle);
  });
  return result.object;
}

nb::object speculative_verify(nb::handle draft_probs, nb::handle target_probs,
                              nb::handle draft_tokens, nb::handle seed, nb::handle offset,
                              nb::handle out, nb::handle accepted_out, nb::handle stream) {
  if (is_jax("speculative_verify", "target_probs", target_probs))
    return nb::borrow(Py_NotImplemented);
  Call call("speculative_verify", "target_probs", target_probs, stream);
  require_axes(call.op, "target_probs", call.first, 2);
  cuattn_sample_options options;
  cuattn_sample_options_init(&options, sizeof options);
  Array draft, tokens;
  draft.import(call.op, "draft_probs", draft_probs, call.stream, &call.first);
  tokens.import(call.op, "draft_tokens", draft_tokens, call.stream, &call.first);
  NumberOrArray random[2];
  read_random(call, seed, offset, random, options);
  Result result, accepted;
  const int64_t* shape = call.first.view.shape.data();
  result.provide(call.op, "out", out, call.first, call.stream, view_of({kDLInt, 32, 1}, 2, shape));
  accepted.provide(call.op, "accepted_out", accepted_out, call.first, call.stream,
                   view_of({kDLInt, 32, 1}, 1, shape));
  call.run([&] {
    return cuattn_speculative_verify(&draft.tensor, &call.first.tensor, &tokens.tensor, &options,
                                     &result.tensor, &accepted.tensor, call.stream.handle);
  });
  return nb::make_tuple(result.object, accepted.object);
}

}  // namespace

void add_fused(nb::module_& m) {
  // All arguments may be None; the Python functions have the defaults.
  m.def("apply_rope", &apply_rope, nb::arg("op"), nb::arg("name"), nb::arg("x").none(),
        nb::arg("cos").none(), nb::arg("sin").none(), nb::arg("positions").none(),
        nb::arg("interleaved").none(), nb::arg("inverse").none(), nb::arg("offset").none(),
        nb::arg("lengths"), nb::arg("out").none(), nb::arg("stream").none(),
        "cuattn.apply_rope, and the rotation of q of op; lengths: the fields of "
        "cuattn_rope_options of these names, and one_token.");
  m.def("residual_places", &residual_places, nb::arg("op"), nb::arg("q").none(),
        nb::arg("v").none(), nb::arg("residual").none(), nb::arg("out").none(),
        nb::arg("lse_out").none(), nb::arg("workspace").none(), nb::arg("is_rounding"),
        nb::arg("stream").none(),
        "Where attention(residual=) has its result and the sum; NotImplemented for JAX arrays.");
  m.def("check_residual_shape", &check_residual_shape, nb::arg("op"), nb::arg("q").none(),
        nb::arg("v").none(), nb::arg("residual").none(), nb::arg("dtype").none(),
        nb::arg("shapes_on"), "Refuses what attention(residual=) would, for explain.");
  m.def("add_residual", &add_residual, nb::arg("op"), nb::arg("x"), nb::arg("residual"),
        nb::arg("out"), nb::arg("stream").none(), "x + residual, rounded once, into out");
  m.def("norm", &norm, nb::arg("centred"), nb::arg("x").none(), nb::arg("weight").none(),
        nb::arg("bias").none(), nb::arg("eps").none(), nb::arg("weight_offset").none(),
        nb::arg("residual").none(), nb::arg("out").none(), nb::arg("residual_out").none(),
        nb::arg("stream").none(), "cuattn.layer_norm, where centred, else cuattn.rms_norm");
  m.def("activate", &activate, nb::arg("gated"), nb::arg("x").none(), nb::arg("bias").none(),
        nb::arg("act").none(), nb::arg("out").none(), nb::arg("stream").none(),
        "cuattn.act_mul, where gated, else cuattn.bias_act");
  m.def("sample", &sample, nb::arg("logits").none(), nb::arg("temperature").none(),
        nb::arg("top_k").none(), nb::arg("top_p").none(), nb::arg("min_p").none(),
        nb::arg("joint").none(), nb::arg("seed").none(), nb::arg("offset").none(),
        nb::arg("out").none(), nb::arg("stream").none(), "cuattn.sample");
  m.def("speculative_verify", &speculative_verify, nb::arg("draft_probs").none(),
        nb::arg("target_probs").none(), nb::arg("draft_tokens").none(), nb::arg("seed").none(),
        nb::arg("offset").none(), nb::arg("out").none(), nb::arg("accepted_out").none(),
        nb::arg("stream").none(), "cuattn.speculative_verify");
}

}  // namespace cuattn::bindings
