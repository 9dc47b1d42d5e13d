// SPDX-License-Identifier: Apache-2.0
// numpy's arrays as borrowed views, without a Python call for the usual ones; and what of numpy and
// of Python's names is looked up once. Next: numpy.cpp.
#pragma once

#include "bindings/arrays/loaded.h"
#include "cuattn/tensor.h"

namespace cuattn::bindings {

// Interned names, numpy functions and dtypes.
struct Python {
  nb::object numpy_empty, numpy_ndarray;
  nb::object float32, float16, uint8, int8, int32, int64;
  nb::object bfloat16, float8;  // ml_dtypes' dtype objects, known after the first array of the type
  // Of torch, known after the first tensor: is_grad_enabled, the descriptor of Tensor.requires_grad and
  // its reader, the names of autograd.forward_ad, _C._is_tracing, the names of utils._python_dispatch.
  nb::object grad_enabled, requires_grad, forward_ad, is_tracing, dispatch;
  descrgetfunc read_requires_grad;
  void* const* numpy_api;   // numpy's table of C functions
  bool reads_numpy_object;  // numpy's arrays are NumpyArrayObjects
  PyObject *array_struct, *dtype, *dlpack, *dlpack_device, *current_level;
  PyObject* in_dispatch_mode;

  Python();
};

constexpr int kNumpyWritable = 0x400;

// The head of a numpy array object as numpy's C ABI fixes it, which every extension module built
// against numpy has compiled in. Read in place of the capsule, which numpy allocates for each call.
struct NumpyArrayObject {
  PyObject object;
  void* data;
  int ndim;
  Py_intptr_t* shape;
  Py_intptr_t* strides;  // in bytes
  PyObject* base;
  PyObject* dtype;
  int flags;
};

// The usual array, read where it lies; false for one that needs a closer look (or a refusal).
inline bool import_usual_numpy(nb::handle object, bool output, TensorView& view) {
  Python& py = the<Python>();
  if (!py.reads_numpy_object) return false;
  const auto* a = reinterpret_cast<const NumpyArrayObject*>(object.ptr());
  if (a->dtype == py.float32.ptr()) {
    view.dtype = {kDLFloat, 32, 1};
  } else if (a->dtype == py.float16.ptr()) {
    view.dtype = {kDLFloat, 16, 1};
  } else if (a->dtype == py.bfloat16.ptr()) {
    view.dtype = {kDLBfloat, 16, 1};
  } else if (a->dtype == py.int32.ptr()) {
    view.dtype = {kDLInt, 32, 1};
  } else if (a->dtype == py.int64.ptr()) {
    view.dtype = {kDLInt, 64, 1};
  } else {
    return false;
  }
  if (a->ndim > kMaxDims || (output && !(a->flags & kNumpyWritable))) return false;
  int shift = view.dtype.bits / 32 + 1;  // log2 of the item size: a division takes longer
  view.data = a->data;
  view.ndim = a->ndim;
  for (int i = 0; i < a->ndim; ++i) {
    Py_intptr_t elements = a->strides[i] >> shift;
    if (elements << shift != a->strides[i]) return false;
    view.shape[i] = a->shape[i];
    view.strides[i] = elements;
  }
  return true;
}

// Any other: fills `view` but for its device. Raises for what is not an array of numbers in native order.
void import_numpy(const char* op, const char* name, nb::handle object, bool output,
                  TensorView& view);

}  // namespace cuattn::bindings
