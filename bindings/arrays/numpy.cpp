// SPDX-License-Identifier: Apache-2.0
// numpy's arrays, read in place where numpy's C ABI allows it.
#include "bindings/arrays/numpy.h"

#include <algorithm>
#include <string>
#include <utility>

#include "bindings/call/raise.h"

namespace cuattn::bindings {
namespace {

// What numpy's `__array_struct__` capsule points to (numpy's "array interface", version 3).
struct NumpyArrayStruct {
  int two;  // always 2
  int ndim;
  char kind;
  int itemsize;
  int flags;
  Py_intptr_t* shape;
  Py_intptr_t* strides;  // in bytes
  void* data;
  PyObject* description;
};
constexpr int kNumpyNativeOrder = 0x200;

// Whether the numpy at hand lays its arrays out so, tried on `array`, which is not contiguous.
bool has_known_layout(nb::handle array) {
  nb::object capsule(array.attr("__array_struct__"));
  auto* want = static_cast<NumpyArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  auto* have = reinterpret_cast<NumpyArrayObject*>(array.ptr());
  if (want == nullptr) throw nb::python_error();
  return have->data == want->data && have->ndim == want->ndim &&
         std::equal(want->shape, want->shape + want->ndim, have->shape) &&
         std::equal(want->strides, want->strides + want->ndim, have->strides) &&
         have->dtype == nb::object(array.attr("dtype")).ptr() &&
         (have->flags & kNumpyWritable) == (want->flags & kNumpyWritable);
}

// numpy shows the types of ml_dtypes as raw bytes; their identity is the dtype object.
DLDataType extension_dtype(const char* op, const char* name, nb::handle object, uint8_t bits) {
  Python& py = the<Python>();
  nb::object dtype = nb::steal(PyObject_GetAttr(object.ptr(), py.dtype));
  if (!dtype.is_valid()) throw nb::python_error();
  if (dtype.is(py.bfloat16)) return {kDLBfloat, 16, 1};
  if (dtype.is(py.float8)) return {kDLFloat8_e4m3fn, bits, 1};
  std::string text = text_of(dtype);
  if (text_of(nb::object(dtype.attr("type").attr("__module__"))) == "ml_dtypes") {
    if (text == "bfloat16") {
      if (!py.bfloat16.is_valid()) py.bfloat16 = std::move(dtype);
      return {kDLBfloat, 16, 1};
    }
    if (text == "float8_e4m3fn") {
      if (!py.float8.is_valid()) py.float8 = std::move(dtype);
      return {kDLFloat8_e4m3fn, bits, 1};
    }
    if (text == "float8_e5m2") return {kDLFloat8_e5m2, bits, 1};
  }
  raise(PyExc_ValueError, op, ": ", name,
        " must be float32, float16 or bfloat16 (ml_dtypes), got dtype ", text, "; cast it");
}

DLDataType dtype_of(const char* op, const char* name, nb::handle object, char kind, int itemsize) {
  auto bits = static_cast<uint8_t>(std::min(itemsize * 8, 255));
  switch (kind) {
    case 'f':
      if (bits == 8) return extension_dtype(op, name, object, bits);
      return {kDLFloat, bits, 1};
    case 'i': return {kDLInt, bits, 1};
    case 'u': return {kDLUInt, bits, 1};
    case 'b': return {kDLBool, 8, 1};
    case 'c': return {kDLComplex, bits, 1};
    case 'V': return extension_dtype(op, name, object, bits);
    default: break;
  }
  raise(PyExc_ValueError, op, ": ", name, " must hold numbers, got dtype ",
        text_of(nb::object(object.attr("dtype"))), "; cast it");
}

}  // namespace

Python::Python() {
  nb::module_ numpy = nb::module_::import_("numpy");
  numpy_empty = numpy.attr("empty");
  numpy_ndarray = numpy.attr("ndarray");
  float32 = numpy.attr("dtype")("float32");
  float16 = numpy.attr("dtype")("float16");
  uint8 = numpy.attr("dtype")("uint8");
  int8 = numpy.attr("dtype")("int8");
  int32 = numpy.attr("dtype")("int32");
  int64 = numpy.attr("dtype")("int64");
  nb::object sample = numpy.attr("zeros")(nb::make_tuple(2, 3), float16).attr("T");
  reads_numpy_object = has_known_layout(sample);
  nb::object core = loaded_module("numpy._core._multiarray_umath");
  if (core.is_none()) core = loaded_module("numpy.core._multiarray_umath");  // numpy 1
  nb::object capsule = core.attr("_ARRAY_API");
  numpy_api = static_cast<void* const*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (numpy_api == nullptr) throw nb::python_error();
  array_struct = PyUnicode_InternFromString("__array_struct__");
  dtype = PyUnicode_InternFromString("dtype");
  dlpack = PyUnicode_InternFromString("__dlpack__");
  dlpack_device = PyUnicode_InternFromString("__dlpack_device__");
  current_level = PyUnicode_InternFromString("_current_level");
  in_dispatch_mode = PyUnicode_InternFromString("_is_in_torch_dispatch_mode");
}

void import_numpy(const char* op, const char* name, nb::handle object, bool output,
                  TensorView& view) {
  nb::object capsule = nb::steal(PyObject_GetAttr(object.ptr(), the<Python>().array_struct));
  if (!capsule.is_valid()) throw nb::python_error();
  auto* a = static_cast<NumpyArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (a == nullptr) throw nb::python_error();
  if (a->ndim > kMaxDims) {
    raise(PyExc_ValueError, op, ": ", name, " must have at most ", kMaxDims, " axes, got ", a->ndim,
          "; reshape it");
  }
  if (output && !(a->flags & kNumpyWritable)) {
    raise(PyExc_ValueError, op, ": ", name, " is read-only; pass a writable array");
  }
  view.data = a->data;
  view.ndim = a->ndim;
  view.dtype = dtype_of(op, name, object, a->kind, a->itemsize);
  if (!(a->flags & kNumpyNativeOrder)) {
    raise(PyExc_ValueError, op, ": ", name, " must be in native byte order; call ", name,
          ".astype(", name, ".dtype.newbyteorder('='))");
  }
  for (int i = 0; i < a->ndim; ++i) {
    view.shape[i] = a->shape[i];
    view.strides[i] = a->strides[i] / a->itemsize;
    if (a->strides[i] % a->itemsize != 0 && a->shape[i] > 1) {
      raise(PyExc_ValueError, op, ": ", name,
            " must have strides that are multiples of its item size ", a->itemsize, ", got ",
            a->strides[i], " bytes on axis ", i, "; pass numpy.ascontiguousarray(", name, ")");
    }
  }
}

}  // namespace cuattn::bindings
