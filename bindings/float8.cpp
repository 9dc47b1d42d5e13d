// SPDX-License-Identifier: Apache-2.0
// Quantisation of the module. Next: python/cuattn/float8.py.
#include "bindings/float8.h"

#include <optional>

#include "bindings/arrays/import.h"
#include "bindings/arrays/results.h"
#include "bindings/arrays/shapes.h"
#include "bindings/call/errors.h"
#include "bindings/call/parse.h"
#include "bindings/call/unlocked.h"
#include "cuattn/c_api_float8.h"

namespace cuattn::bindings {
namespace {

constexpr int64_t kRowBytes = 16;  // sequences that lie side by side are padded to these

// The arrays of one call, whose first decides stream and library.
struct Call {
  const char* op;
  CallStream stream;
  Array x;
  std::optional<Array> scale, mean, shift_mean;
  float number = 1.0f;  // a scale that is no array

  Call(const char* op, nb::handle source, nb::handle stream_arg)
      : op(op), stream(parse_stream(op, stream_arg)) {
    x.import(op, "x", source, stream, nullptr);
    complete_stream(op, x, stream);
    if (x.view.ndim < 3 || x.view.ndim > 4)
      raise(PyExc_ValueError, op, ": x must have 3 or 4 axes, got ", x.view.ndim,
            "; pass [total, heads, dim] or the axes of layout");
  }

  const DLTensor* import(const char* name, nb::handle source, std::optional<Array>& storage) {
    storage.emplace().import(op, name, source, stream, &x);
    return &storage->tensor;
  }

  // A scale that the caller has: an array, or a number on the host.
  DLTensor given_scale(nb::handle source) {
    if (nb::hasattr(source, "__dlpack__")) return *import("scale", source, scale);
    number = static_cast<float>(parse_double(op, "scale", source));
    view_ = TensorView{};
    view_.data = &number;
    view_.dtype = dl_dtype(DType::f32);
    view_.device = {kDLCPU, 0};
    return view_.dl();
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

 private:
  TensorView view_;
};

TensorView float32_of(nb::handle shape) {
  TensorView view;
  view.dtype = dl_dtype(DType::f32);
  view.ndim = static_cast<int32_t>(nb::len(shape));
  for (int32_t axis = 0; axis < view.ndim; ++axis)
    view.shape[axis] = nb::cast<int64_t>(nb::object(shape[axis]));
  return view;
}

// Memory for codes of the shape of x whose sequences lie side by side, padded: [batch, heads, dim,
// rows]. The view of it has x's order of axes.
Allocation allocate_columns(Call& call, int32_t layout) {
  const TensorView& x = call.x.view;
  int32_t last = x.ndim - 1;
  int32_t rows = x.ndim == 3 ? 0 : layout == CUATTN_LAYOUT_BSHD ? 1 : 2;
  int32_t heads = x.ndim == 3 ? 1 : 3 - rows;
  TensorView wanted;
  wanted.dtype = dl_dtype(DType::e4m3);
  wanted.ndim = x.ndim;
  if (x.ndim == 4) wanted.shape[0] = x.shape[0];
  wanted.shape[last - 2] = x.shape[heads];
  wanted.shape[last - 1] = x.shape[last];
  wanted.shape[last] = (x.shape[rows] + kRowBytes - 1) / kRowBytes * kRowBytes;
  Allocation made = allocate(call.op, "codes", call.x, wanted, call.stream);
  TensorView stored = made.view;
  auto put = [&](int32_t axis, int32_t from) {
    made.view.shape[axis] = stored.shape[from];
    made.view.strides[axis] = stored.strides[from];
  };
  put(rows, last);
  put(heads, last - 2);
  put(last, last - 1);
  return made;
}

nb::object quantize(nb::handle x, nb::handle layout, nb::handle hadamard, nb::handle scale,
                    nb::handle channels, nb::handle mean, nb::handle shift_mean, nb::handle columns,
                    nb::handle int8, nb::handle stream) {
  if (array_type("quantize", "x", x).library == Library::jax) return nb::borrow(Py_NotImplemented);
  Call call("quantize", x, stream);
  cuattn_quantize_options options;
  cuattn_quantize_options_init(&options, sizeof options);
  options.layout = parse_layout(call.op, layout);
  options.hadamard = parse_bool(call.op, "hadamard", hadamard);
  options.channels = parse_bool(call.op, "channels", channels);
  options.is_given = !PyTuple_Check(scale.ptr());
  bool makes_mean = PyTuple_Check(mean.ptr());
  options.mean_given = is_given(mean) && !makes_mean;

  Result made_scale, made_mean, made_shift;
  DLTensor scale_tensor;
  if (options.is_given) {
    scale_tensor = call.given_scale(scale);
  } else {
    made_scale.provide(call.op, "scale", nb::none(), call.x, call.stream, float32_of(scale));
    scale_tensor = made_scale.tensor;
  }
  if (makes_mean) {
    made_mean.provide(call.op, "mean", nb::none(), call.x, call.stream, float32_of(mean));
    options.mean = &made_mean.tensor;
  } else if (options.mean_given) {
    options.mean = call.import("mean", mean, call.mean);
  }
  const TensorView& v = call.x.view;
  if (is_given(shift_mean)) {
    options.shift_mean = call.import("shift_mean", shift_mean, call.shift_mean);
    bool is_bhsd = v.ndim == 4 && options.layout == CUATTN_LAYOUT_BHSD;
    int64_t shape[3] = {1, v.shape[1], v.shape[0]};
    if (v.ndim == 4) {
      shape[0] = v.shape[0];
      shape[1] = v.shape[is_bhsd ? 1 : 2];
      shape[2] = v.shape[is_bhsd ? 2 : 1];
    }
    made_shift.provide(call.op, "shift", nb::none(), call.x, call.stream,
                       view_of(dl_dtype(DType::f32), 3, shape));
    options.shift = &made_shift.tensor;
  }
  Allocation codes;
  if (parse_bool(call.op, "columns", columns)) {
    codes = allocate_columns(call, options.layout);
  } else {
    DType dtype = parse_bool(call.op, "int8", int8) ? DType::i8 : DType::e4m3;
    TensorView wanted = view_of(dl_dtype(dtype), v.ndim, v.shape.data());
    codes = allocate(call.op, "codes", call.x, wanted, call.stream);
  }
  DLTensor out = codes.view.dl();
  call.run([&] {
    return cuattn_quantize(&call.x.tensor, &out, &scale_tensor, &options, call.stream.handle);
  });
  auto or_none = [](const Result& result) {
    return result.object.is_valid() ? result.object : nb::none();
  };
  return nb::make_tuple(codes.object, or_none(made_scale), or_none(made_mean), or_none(made_shift));
}

nb::object dequantize(nb::handle x, nb::handle scale, nb::handle layout, nb::handle channels,
                      nb::handle dtype, nb::handle out, nb::handle stream) {
  if (array_type("dequantize", "x", x).library == Library::jax)
    return nb::borrow(Py_NotImplemented);
  Call call("dequantize", x, stream);
  cuattn_quantize_options options;
  cuattn_quantize_options_init(&options, sizeof options);
  options.layout = parse_layout(call.op, layout);
  options.channels = parse_bool(call.op, "channels", channels);
  DLTensor scale_tensor = call.given_scale(scale);
  Result result;
  result.provide(call.op, "out", out, call.x, call.stream,
                 view_of(dtype_named(call.op, dtype), call.x.view.ndim, call.x.view.shape.data()));
  call.run([&] {
    return cuattn_dequantize(&call.x.tensor, &result.tensor, &scale_tensor, &options,
                             call.stream.handle);
  });
  return result.object;
}

}  // namespace

void add_float8(nb::module_& m) {
  m.def(
      "quantize", &quantize, nb::arg("x").none(), nb::arg("layout").none(),
      nb::arg("hadamard").none(), nb::arg("scale").none(), nb::arg("channels"),
      nb::arg("mean").none(), nb::arg("shift_mean").none(), nb::arg("columns"), nb::arg("int8"),
      nb::arg("stream").none(),
      "Codes, scale, mean and shift of cuattn_quantize. A tuple for scale or mean is the shape of "
      "one that is made; columns: codes are [batch, heads, dim, rows], rows padded to 16; int8: "
      "codes "
      "of int8, by rows.");
  m.def("dequantize", &dequantize, nb::arg("x").none(), nb::arg("scale").none(),
        nb::arg("layout").none(), nb::arg("channels").none(), nb::arg("dtype").none(),
        nb::arg("out").none(), nb::arg("stream").none(), "cuattn.dequantize");
}

}  // namespace cuattn::bindings
