// SPDX-License-Identifier: Apache-2.0
// Results in the caller's own library: which stream a call runs on, and who allocates its output
// and workspace. The libraries without a C allocator are reached through cuattn._arrays. Next:
// ../attention.cpp.
#pragma once

#include <algorithm>
#include <new>
#include <string>

#include "bindings/arrays/import.h"

namespace cuattn::bindings {

// The functions of cuattn._arrays.
struct ArraysModule {
  nb::object current_stream, empty;

  ArraysModule() {
    nb::module_ module = nb::module_::import_("cuattn._arrays");
    current_stream = module.attr("current_stream");
    empty = module.attr("empty");
  }
};

inline const char* library_name(const Array& array) {
  switch (array.type.library) {
    case Library::numpy: return "numpy";
    case Library::cupy: return "cupy";
    default: return array.type.is_torch ? "torch" : "other";
  }
}

// What `stream=` holds: an integer (the raw pointer) or an object with cuda_stream, ptr or
// __cuda_stream__.
inline CallStream parse_stream(const char* op, nb::handle stream) {
  if (stream.is_none()) return {};
  nb::object value = nb::borrow(stream);
  if (!PyLong_Check(stream.ptr())) {
    if (nb::hasattr(stream, "cuda_stream")) {
      value = stream.attr("cuda_stream");
    } else if (nb::hasattr(stream, "ptr")) {
      value = stream.attr("ptr");
    } else if (nb::hasattr(stream, "__cuda_stream__")) {
      value = nb::object(stream.attr("__cuda_stream__")()[1]);
    }
  }
  if (PyLong_Check(value.ptr()) && !PyBool_Check(value.ptr())) {
    long long pointer = PyLong_AsLongLong(value.ptr());
    if (pointer >= 0) return {reinterpret_cast<void*>(pointer), true};
    PyErr_Clear();
    raise(PyExc_ValueError, op,
          ": stream must be a stream handle, not a negative or too large number, got ",
          text_of(value), "; pass it as its library gives it");
  }
  raise(PyExc_TypeError, op,
        ": stream must be None, an integer or an object with cuda_stream, ptr or __cuda_stream__, "
        "got ",
        class_name(stream), "; pass the stream of your library");
}

// Completes the stream of a call once its first array is known.
inline void complete_stream(const char* op, const Array& first, CallStream& stream) {
  if (!first.is_cuda()) {
    if (stream.is_explicit) {
      raise(PyExc_ValueError, op,
            ": stream must be None for arrays on the CPU, which run at once; leave it out");
    }
    return;
  }
  if (stream.is_explicit) return;
  if (first.type.api != nullptr) {
    const DLDevice& device = first.view.device;
    if (first.type.api->current_work_stream(device.device_type, device.device_id, &stream.handle) !=
        0) {
      throw nb::python_error();
    }
    return;
  }
  nb::object handle =
      the<ArraysModule>().current_stream(library_name(first), first.view.device.device_id);
  stream.handle = reinterpret_cast<void*>(nb::cast<uintptr_t>(handle));
}

// Memory for one result, owned by `object`.
struct Allocation {
  nb::object object;
  TensorView view;
};

namespace detail {

struct AllocatorError {
  std::string kind, message;
  static void set(void* context, const char* kind, const char* message) {
    *static_cast<AllocatorError*>(context) = {kind == nullptr ? "" : kind,
                                              message == nullptr ? "" : message};
  }
};

inline nb::object shape_tuple(const TensorView& wanted) {
  nb::object shape = nb::steal(PyTuple_New(wanted.ndim));
  if (!shape.is_valid()) throw nb::python_error();
  for (int i = 0; i < wanted.ndim; ++i)
    PyTuple_SetItem(shape.ptr(), i, PyLong_FromLongLong(wanted.shape[i]));
  return shape;
}

inline const char* dtype_word(DLDataType dtype) {
  if (dtype.code == kDLBfloat) return "bfloat16";
  if (dtype.code == kDLUInt) return "uint8";
  if (dtype.code == kDLInt) return dtype.bits == 8 ? "int8" : "int32";
  if (dtype.code == kDLFloat8_e4m3fn) return "float8_e4m3fn";
  return dtype.bits == 16 ? "float16" : "float32";
}

inline nb::object ml_dtype(const char* word) {
  return nb::module_::import_("cuattn._memory").attr("ml_dtype")(word);
}

inline nb::object numpy_dtype(DLDataType dtype) {
  Python& py = the<Python>();
  if (dtype.code == kDLUInt) return py.uint8;
  if (dtype.code == kDLInt) return dtype.bits == 8 ? py.int8 : py.int32;
  if (dtype.code == kDLFloat) return dtype.bits == 16 ? py.float16 : py.float32;
  if (dtype.code == kDLFloat8_e4m3fn) {
    if (!py.float8.is_valid()) py.float8 = ml_dtype("float8_e4m3fn");
    return py.float8;
  }
  if (!py.bfloat16.is_valid()) py.bfloat16 = ml_dtype("bfloat16");
  return py.bfloat16;
}

// torch's own factories.
struct TorchModule {
  nb::object tensor_type, empty, empty_like;
  nb::object float32, float16, bfloat16, float8, uint8, int8, int32;
  PyObject* device = PyUnicode_InternFromString("device");

  TorchModule() {
    nb::object torch = loaded_module("torch");
    tensor_type = torch.attr("Tensor");
    empty = torch.attr("empty");
    empty_like = torch.attr("empty_like");
    float32 = torch.attr("float32");
    float16 = torch.attr("float16");
    bfloat16 = torch.attr("bfloat16");
    float8 = nb::getattr(torch, "float8_e4m3fn", nb::none());  // from 2.1 on
    uint8 = torch.attr("uint8");
    int8 = torch.attr("int8");
    int32 = torch.attr("int32");
  }

  nb::object dtype(DLDataType wanted) const {
    if (wanted.code == kDLBfloat) return bfloat16;
    if (wanted.code == kDLUInt) return uint8;
    if (wanted.code == kDLInt) return wanted.bits == 8 ? int8 : int32;
    if (wanted.code == kDLFloat8_e4m3fn) return float8;
    return wanted.bits == 16 ? float16 : float32;
  }
};

// Whether empty_like of `like` is a plain dense tensor of `wanted`'s shape and dtype.
inline bool is_like(const Array& like, const TensorView& wanted) {
  const TensorView& have = like.view;
  if (have.dtype.code != wanted.dtype.code || have.dtype.bits != wanted.dtype.bits ||
      have.ndim != wanted.ndim) {
    return false;
  }
  int64_t stride = 1;
  for (int i = wanted.ndim - 1; i >= 0; --i) {
    if (have.shape[i] != wanted.shape[i] || have.strides[i] != stride) return false;
    stride *= wanted.shape[i];
  }
  return true;
}

// Note: the allocator of torch's exchange table asks the driver whose memory it has just handed
// out, which on CUDA takes longer than everything else in a call; torch.empty does not.
inline Allocation allocate_torch(const Array& like, const TensorView& wanted) {
  const TorchModule& torch = the<TorchModule>();
  Allocation result;
  if (reinterpret_cast<PyObject*>(Py_TYPE(like.object.ptr())) == torch.tensor_type.ptr() &&
      is_like(like, wanted)) {
    result.object = torch.empty_like(like.object);
  } else {
    nb::object device = nb::steal(PyObject_GetAttr(like.object.ptr(), torch.device));
    if (!device.is_valid()) throw nb::python_error();
    // By name: torch takes a third longer to tell a tuple in the first place from its overloads.
    result.object =
        torch.empty(nb::arg("size") = shape_tuple(wanted),
                    nb::arg("dtype") = torch.dtype(wanted.dtype), nb::arg("device") = device);
  }
  DLTensor made;
  if (like.type.api->dltensor_from_py_object_no_sync(result.object.ptr(), &made) != 0)
    throw nb::python_error();
  new (&result.view) TensorView(made);
  return result;
}

// numpy.empty without its reading of arguments.
inline nb::object numpy_empty(const TensorView& wanted) {
  using Empty = PyObject* (*)(int, const Py_intptr_t*, PyObject* dtype, int fortran_order);
  constexpr int kEmpty = 184;  // PyArray_Empty's place in the table, which numpy's ABI fixes
  auto empty = reinterpret_cast<Empty>(the<Python>().numpy_api[kEmpty]);
  Py_intptr_t shape[kMaxDims];
  std::copy_n(wanted.shape.begin(), wanted.ndim, shape);
  nb::object dtype = numpy_dtype(wanted.dtype);
  nb::object array = nb::steal(empty(wanted.ndim, shape, dtype.release().ptr(), 0));
  if (!array.is_valid()) throw nb::python_error();
  return array;
}

inline Allocation allocate_exchange(const DLPackExchangeAPI* api, TensorView& wanted) {
  DLTensor prototype = wanted.dl();
  prototype.strides = nullptr;
  DLManagedTensorVersioned* managed = nullptr;
  AllocatorError error;
  if (api->managed_tensor_allocator(&prototype, &managed, &error, AllocatorError::set) != 0) {
    if (PyErr_Occurred()) throw nb::python_error();
    error.message.resize(std::min(error.message.find('\n'), error.message.size()));
    raise(error.kind == "MemoryError" ? PyExc_MemoryError : PyExc_RuntimeError, error.message);
  }
  Allocation result;
  result.view = TensorView(managed->dl_tensor);
  void* object = nullptr;
  if (api->managed_tensor_to_py_object_no_sync(managed, &object) != 0) throw nb::python_error();
  result.object = nb::steal(static_cast<PyObject*>(object));
  return result;
}

}  // namespace detail

// A new array of `wanted`'s shape and dtype in the library and on the device of `like`.
inline Allocation allocate(const char* op, const char* name, const Array& like, TensorView wanted,
                           const CallStream& stream) {
  wanted.device = like.view.device;
  Allocation result;
  if (like.type.library == Library::numpy) {
    result.object = detail::numpy_empty(wanted);
  } else if (like.type.api != nullptr && !stream.is_explicit) {
    return like.type.is_torch ? detail::allocate_torch(like, wanted)
                              : detail::allocate_exchange(like.type.api, wanted);
  } else {
    // Note: on a stream that is not the library's current one the memory must come from that
    // stream's pool: the current stream may still be working on whatever its own pool hands out.
    nb::object handle = stream.is_explicit
                            ? nb::object(nb::int_(reinterpret_cast<uintptr_t>(stream.handle)))
                            : nb::object(nb::none());
    result.object = the<ArraysModule>().empty(
        op, name, like.object, library_name(like), detail::shape_tuple(wanted),
        detail::dtype_word(wanted.dtype), wanted.device.device_id, handle);
  }
  Array imported;
  imported.import(op, name, result.object, stream, &like, true);
  result.view = imported.view;
  return result;
}

// The workspace of one call: lent by the caller, or allocated in the caller's library; aligned to
// 256 bytes.
struct WorkspaceMemory {
  static constexpr size_t kAlignment = 256;  // what every kernel may rely on
  nb::object owner;
  void* data = nullptr;
  size_t bytes = 0;

  void align_own() {
    size_t skip = (kAlignment - reinterpret_cast<uintptr_t>(data) % kAlignment) % kAlignment;
    data = static_cast<char*>(data) + skip;
    bytes -= skip;
  }

  void provide(const char* op, const Array& like, size_t needed, const CallStream& stream) {
    if (needed == 0) return;
    TensorView wanted(nullptr, DType::f32, {static_cast<int64_t>(needed + kAlignment)});
    wanted.dtype = {kDLUInt, 8, 1};
    if (like.is_cuda()) {
      Allocation memory = allocate(op, "workspace", like, wanted, stream);
      owner = memory.object;
      data = memory.view.data;
    } else {  // host memory is host memory, and the call ends before it is given back
      owner = the<Python>().numpy_empty(needed + kAlignment, the<Python>().uint8);
      Array bytes_array;
      bytes_array.import(op, "workspace", owner, stream, &like, true);
      data = bytes_array.view.data;
    }
    bytes = needed + kAlignment;
    align_own();
  }

  void lend(const char* op, const Array& lent, const Array& like) {
    const TensorView& view = lent.view;
    if (view.device.device_type != like.view.device.device_type ||
        view.device.device_id != like.view.device.device_id) {
      raise(PyExc_ValueError, op, ": workspace must be on the device of q; allocate it there");
    }
    int64_t dense = 1;
    for (int i = view.ndim - 1; i >= 0; --i) {
      // Note: numpy gives an array without elements strides of 0.
      if (view.size() != 0 && view.shape[i] != 1 && view.strides[i] != dense) {
        raise(PyExc_ValueError, op,
              ": workspace must be contiguous; pass a one-dimensional uint8 array");
      }
      dense *= view.shape[i];
    }
    data = view.data;
    bytes = static_cast<size_t>(dense) * view.dtype.bits * view.dtype.lanes / 8;
  }
};

}  // namespace cuattn::bindings
