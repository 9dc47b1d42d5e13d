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
  nb::object float32, float16, uint8, int32, int64;
  nb::object bfloat16;      // ml_dtypes' dtype object, known after the first array of that type
  nb::object grad_enabled;  // torch.is_grad_enabled, known after the first tensor
  void* const* numpy_api;   // numpy's table of C functions
  bool reads_numpy_object;  // numpy's arrays are NumpyArrayObjects
  PyObject *array_struct, *dtype, *requires_grad, *dlpack, *dlpack_device;

  Python();
};

// Fills `view` but for its device. Raises for what is not an array of numbers in native order.
void import_numpy(const char* op, const char* name, nb::handle object, bool output,
                  TensorView& view);

}  // namespace cuattn::bindings
