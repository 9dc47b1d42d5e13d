// SPDX-License-Identifier: Apache-2.0
// Statuses of the C ABI as Python exceptions; the message is the library's.
#pragma once

#include <nanobind/nanobind.h>

#include "cuattn/c_api.h"

namespace cuattn::bindings {

namespace nb = nanobind;

inline PyObject* cuda_error = nullptr;           // the class cuattn.CudaError
inline PyObject* out_of_blocks_error = nullptr;  // the class cuattn.OutOfBlocksError
inline PyObject* gradient_wanted = nullptr;      // the class cuattn._core.GradientWanted

// Makes the exception classes of the module.
inline void make_exceptions(nb::module_& m) {
  cuda_error = PyErr_NewExceptionWithDoc(
      "cuattn.CudaError",
      "A CUDA call failed; the message holds the call, the error's name and its text.",
      PyExc_RuntimeError, nullptr);
  out_of_blocks_error = PyErr_NewExceptionWithDoc(
      "cuattn.OutOfBlocksError",
      "A pool has fewer free blocks than asked for; the call has taken none and changed nothing.",
      PyExc_MemoryError, nullptr);
  gradient_wanted = PyErr_NewExceptionWithDoc("cuattn._core.GradientWanted",
                                              "A torch tensor requires grad, torch.func.vmap maps "
                                              "over it, or torch.jit.trace or make_fx records: "
                                              "attention goes through cuattn.torch, the rest has "
                                              "no gradient and no rule.",
                                              PyExc_NotImplementedError, nullptr);
  if (cuda_error == nullptr || out_of_blocks_error == nullptr || gradient_wanted == nullptr)
    throw nb::python_error();
  m.attr("CudaError") = nb::borrow(cuda_error);
  m.attr("OutOfBlocksError") = nb::borrow(out_of_blocks_error);
  m.attr("GradientWanted") = nb::borrow(gradient_wanted);
}

// Throws the Python exception of a failed status.
inline void check(cuattn_status status) {
  if (status == CUATTN_OK) return;
  PyObject* type = PyExc_RuntimeError;
  switch (status) {
    case CUATTN_INVALID_ARGUMENT: type = PyExc_ValueError; break;
    case CUATTN_NOT_IMPLEMENTED: type = PyExc_NotImplementedError; break;
    case CUATTN_CUDA_ERROR: type = cuda_error; break;
    case CUATTN_OUT_OF_MEMORY: type = PyExc_MemoryError; break;
    case CUATTN_OUT_OF_BLOCKS: type = out_of_blocks_error; break;
    default: break;
  }
  PyErr_SetString(type, cuattn_last_error());
  throw nb::python_error();
}

}  // namespace cuattn::bindings
