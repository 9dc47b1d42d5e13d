// SPDX-License-Identifier: Apache-2.0
// Arrays at the border: any Python array object becomes a borrowed DLTensor, with no copy and no
// synchronisation. torch (>= 2.10) and others that publish the DLPack C exchange API are read
// through it, numpy through its C ABI or array interface, the rest through `__dlpack__`;
// docs/design.md has the rule of each library. Next: allocate.h.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "cuattn/error.h"
#include "cuattn/tensor.h"

namespace cuattn::bindings {

namespace nb = nanobind;

// Sets a Python exception and throws it; the message is built like that of CUATTN_REQUIRE.
template <class... Parts>
[[noreturn]] void raise(PyObject* exception, const Parts&... parts) {
  PyErr_SetString(exception, concat(parts...).c_str());
  throw nb::python_error();
}

inline std::string text_of(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

inline std::string class_name(nb::handle object) {
  return text_of(nb::object(object.type().attr("__name__")));
}

// An imported module or None: this package never imports an array library on its own.
inline nb::object loaded_module(const char* name) {
  nb::str key(name);
  PyObject* module = PyImport_GetModule(key.ptr());
  if (module == nullptr) PyErr_Clear();
  return module == nullptr ? nb::none() : nb::steal(module);
}

// Whose array it is, which decides how it is imported, on which stream the call runs and who
// allocates the results.
enum class Library {
  numpy,
  exchange,  // publishes the C exchange API: torch >= 2.10 and others
  torch,     // older torch
  cupy,
  jax,   // never imported: goes through cuattn.jax
  other  // only `__dlpack__`
};

struct ArrayType {
  Library library = Library::other;
  const DLPackExchangeAPI* api = nullptr;
  bool is_torch = false;
};

namespace detail {

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
constexpr int kNumpyNativeOrder = 0x200, kNumpyWritable = 0x400;

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

  // Whether the numpy at hand lays its arrays out so, tried on `array`, which is not contiguous.
  static bool is_layout_of(nb::handle array) {
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
};

}  // namespace detail

// The process's only `Table`, filled at its first use and never destroyed: the interpreter may be
// gone by then. Needs the interpreter lock.
// Note: filling a table runs Python code, which may lend the lock to another thread. A function's
// own `static Table table` would then hang the process: that thread waits for the first to leave
// the initialiser, and the first for the lock. Here both fill one, and the first stored is kept.
template <class Table>
Table& the() {
  static Table* stored = nullptr;
  if (stored != nullptr) return *stored;
  Table filled;
  if (stored == nullptr) stored = new Table(std::move(filled));
  return *stored;
}

// Interned names, numpy functions and dtypes.
struct Python {
  nb::object numpy_empty, numpy_ndarray;
  nb::object float32, float16, uint8, int32, int64;
  nb::object bfloat16;      // ml_dtypes' dtype object, known after the first array of that type
  nb::object grad_enabled;  // torch.is_grad_enabled, known after the first tensor
  void* const* numpy_api;   // numpy's table of C functions
  bool reads_numpy_object;  // numpy's arrays are NumpyArrayObjects
  PyObject *array_struct, *dtype, *requires_grad, *dlpack, *dlpack_device;

  Python() {
    nb::module_ numpy = nb::module_::import_("numpy");
    numpy_empty = numpy.attr("empty");
    numpy_ndarray = numpy.attr("ndarray");
    float32 = numpy.attr("dtype")("float32");
    float16 = numpy.attr("dtype")("float16");
    uint8 = numpy.attr("dtype")("uint8");
    int32 = numpy.attr("dtype")("int32");
    int64 = numpy.attr("dtype")("int64");
    nb::object sample = numpy.attr("zeros")(nb::make_tuple(2, 3), float16).attr("T");
    reads_numpy_object = detail::NumpyArrayObject::is_layout_of(sample);
    nb::object core = loaded_module("numpy._core._multiarray_umath");
    if (core.is_none()) core = loaded_module("numpy.core._multiarray_umath");  // numpy 1
    nb::object capsule = core.attr("_ARRAY_API");
    numpy_api = static_cast<void* const*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    if (numpy_api == nullptr) throw nb::python_error();
    array_struct = PyUnicode_InternFromString("__array_struct__");
    dtype = PyUnicode_InternFromString("dtype");
    requires_grad = PyUnicode_InternFromString("requires_grad");
    dlpack = PyUnicode_InternFromString("__dlpack__");
    dlpack_device = PyUnicode_InternFromString("__dlpack_device__");
  }
};

namespace detail {

// The exchange table of major version 1 that `type` publishes, or nullptr.
inline const DLPackExchangeAPI* exchange_api(nb::handle type) {
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (capsule.is_none() || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* header = static_cast<DLPackExchangeAPIHeader*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION)
    header = header->prev_api;
  return reinterpret_cast<const DLPackExchangeAPI*>(header);
}

inline bool is_subclass(nb::handle type, nb::handle base) {
  int answer = base.is_none() ? 0 : PyObject_IsSubclass(type.ptr(), base.ptr());
  if (answer < 0) throw nb::python_error();
  return answer != 0;
}

// Looks at a type seen for the first time.
inline ArrayType classify(const char* op, const char* name, nb::handle object) {
  nb::handle type = object.type();
  if (is_subclass(type, the<Python>().numpy_ndarray)) {
    if (is_subclass(type, nb::getattr(loaded_module("numpy.ma"), "MaskedArray", nb::none()))) {
      raise(PyExc_TypeError, op, ": ", name,
            " must be a plain array, got a numpy MaskedArray, whose mask would be ignored; pass "
            "bias= instead");
    }
    return {Library::numpy};
  }
  nb::object jax = nb::getattr(loaded_module("jax"), "Array", nb::none());
  if (!jax.is_none() && nb::isinstance(object, jax)) return {Library::jax};

  nb::object torch = loaded_module("torch");
  if (is_subclass(type, nb::getattr(torch, "Tensor", nb::none()))) {
    if (!type.attr("__torch_dispatch__").is(torch.attr("Tensor").attr("__torch_dispatch__"))) {
      raise(PyExc_TypeError, op, ": ", name, " must be a plain torch tensor, got a ",
            class_name(object),
            ", which has no memory of its own; call cuattn.torch.attention, a registered op, "
            "instead");
    }
    the<Python>().grad_enabled = torch.attr("is_grad_enabled");
    const DLPackExchangeAPI* api = exchange_api(type);
    return {api != nullptr ? Library::exchange : Library::torch, api, true};
  }
  if (is_subclass(type, nb::getattr(loaded_module("cupy"), "ndarray", nb::none())))
    return {Library::cupy};
  if (const DLPackExchangeAPI* api = exchange_api(type)) return {Library::exchange, api};
  if (nb::hasattr(type, "__dlpack__") && nb::hasattr(type, "__dlpack_device__"))
    return {Library::other};
  raise(PyExc_TypeError, op, ": ", name,
        " must be an array (numpy, torch, CuPy, JAX or any object with __dlpack__), got ",
        class_name(object), "; convert it first");
}

}  // namespace detail

// The kind of array that `object` is; answers come from a short list of the types seen lately.
inline ArrayType array_type(const char* op, const char* name, nb::handle object) {
  struct Entry {
    PyObject* type;  // owned: an address is not reused while it stands here
    ArrayType info;
  };
  constexpr int kEntries = 16;  // more types than one program mixes
  static Entry entries[kEntries] = {};
  static int oldest = 0;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  for (const Entry& entry : entries) {
    if (entry.type == type) return entry.info;
  }
  ArrayType info = detail::classify(op, name, object);
  Py_INCREF(type);
  PyObject* replaced = std::exchange(entries[oldest], {type, info}).type;
  oldest = (oldest + 1) % kEntries;
  Py_XDECREF(replaced);  // last: the end of a type may run Python code, which may come here
  return info;
}

// The stream of a call: given by the caller, or the current one of q's library once q is imported.
struct CallStream {
  void* handle = nullptr;
  bool is_explicit = false;
};

// Refuses what would be lost without a word, in torch's grad mode: a gradient.
inline void refuse_grad(const char* op, const char* name, nb::handle object) {
  Python& py = the<Python>();
  PyObject* flag = PyObject_GetAttr(object.ptr(), py.requires_grad);
  if (flag == nullptr) throw nb::python_error();
  bool wanted = flag == Py_True;
  Py_DECREF(flag);
  if (!wanted) return;
  raise(
      PyExc_NotImplementedError, op, ": ", name,
      " requires grad, but cuattn has no backward pass yet; call it under torch.no_grad() or pass ",
      name, ".detach()");
}

// One argument, borrowed for one call: the view, and what must be given back.
class Array {
 public:
  TensorView view;
  DLTensor tensor;  // of `view`, for the C ABI
  ArrayType type;
  nb::handle object;

  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() {
    if (versioned_ != nullptr && versioned_->deleter != nullptr) versioned_->deleter(versioned_);
    if (legacy_ != nullptr && legacy_->deleter != nullptr) legacy_->deleter(legacy_);
  }

  bool is_cuda() const { return view.device.device_type == kDLCUDA; }

  // Imports `object` under the argument's name. `stream` is consulted only where the producer must
  // order itself: for arrays of another library than the call's (`home`), which is that of q.
  void import(const char* op, const char* name, nb::handle source, const CallStream& stream,
              const Array* home, bool output = false) {
    object = source;
    type = array_type(op, name, source);
    if (type.is_torch) {
      bool asked = home != nullptr && home->type.is_torch;
      grad_mode_ = asked ? home->grad_mode_ : the<Python>().grad_enabled().ptr() == Py_True;
      if (grad_mode_) refuse_grad(op, name, source);
    }
    switch (type.library) {
      case Library::jax:
        raise(PyExc_ValueError, op, ": ", name,
              " is a JAX array but the first argument is not; JAX arrays cannot be mixed with "
              "others; convert it first");
      case Library::numpy: import_numpy(op, name, output); break;
      case Library::exchange: import_exchange(op, name, stream, home, output); break;
      default: import_dlpack(op, name, stream, home, output);
    }
    if (view.device.device_type == kDLCUDAHost) view.device = {kDLCPU, 0};
    if (view.device.device_type == kDLCUDAManaged) view.device.device_type = kDLCUDA;
    if (view.device.device_type != kDLCPU && view.device.device_type != kDLCUDA) {
      raise(PyExc_ValueError, op, ": ", name,
            " must be on the CPU or a CUDA device, got DLPack device type ",
            static_cast<int>(view.device.device_type), "; copy it to one of these");
    }
    tensor = view.dl();
  }

  // Makes `view` one of memory that someone else describes.
  void borrow(const char* op, const char* name, const DLTensor& source) {
    if (!is_small(source)) {
      check_tensor(
          source, [&](const auto&... parts) { raise(PyExc_ValueError, op, ": ", name, parts...); });
    }
    new (&view) TensorView(source);  // in place: a copy would wait for the stores of the original
  }

 private:
  bool grad_mode_ = false;  // torch's, asked once per call
  DLManagedTensorVersioned* versioned_ = nullptr;
  DLManagedTensor* legacy_ = nullptr;

  static void check_flags(const char* op, const char* name, uint64_t flags, bool output) {
    if (output && (flags & DLPACK_FLAG_BITMASK_READ_ONLY)) {
      raise(PyExc_ValueError, op, ": ", name, " is read-only; pass a writable array");
    }
    // Note: a copy dies with its deleter, which runs while the kernel may still read it.
    if (flags & DLPACK_FLAG_BITMASK_IS_COPIED) {
      raise(PyExc_ValueError, op, ": ", name,
            " is exported as a copy by its library; pass a plain strided array");
    }
  }

  void import_numpy(const char* op, const char* name, bool output) {
    Python& py = the<Python>();
    if (py.reads_numpy_object && import_numpy_object(output)) return;
    nb::object capsule = nb::steal(PyObject_GetAttr(object.ptr(), py.array_struct));
    if (!capsule.is_valid()) throw nb::python_error();
    auto* a = static_cast<detail::NumpyArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    if (a == nullptr) throw nb::python_error();
    if (a->ndim > kMaxDims) {
      raise(PyExc_ValueError, op, ": ", name, " must have at most ", kMaxDims, " axes, got ",
            a->ndim, "; reshape it");
    }
    if (output && !(a->flags & detail::kNumpyWritable)) {
      raise(PyExc_ValueError, op, ": ", name, " is read-only; pass a writable array");
    }
    view.data = a->data;
    view.ndim = a->ndim;
    view.dtype = numpy_dtype(op, name, a->kind, a->itemsize);
    if (!(a->flags & detail::kNumpyNativeOrder)) {
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

  // The usual array, read where it lies; false for one that needs a closer look (or a refusal).
  bool import_numpy_object(bool output) {
    Python& py = the<Python>();
    const auto* a = reinterpret_cast<const detail::NumpyArrayObject*>(object.ptr());
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
    if (a->ndim > kMaxDims || (output && !(a->flags & detail::kNumpyWritable))) return false;
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

  DLDataType numpy_dtype(const char* op, const char* name, char kind, int itemsize) {
    auto bits = static_cast<uint8_t>(std::min(itemsize * 8, 255));
    switch (kind) {
      case 'f':
        if (bits == 8) return extension_dtype(op, name, bits);
        return {kDLFloat, bits, 1};
      case 'i': return {kDLInt, bits, 1};
      case 'u': return {kDLUInt, bits, 1};
      case 'b': return {kDLBool, 8, 1};
      case 'c': return {kDLComplex, bits, 1};
      case 'V': return extension_dtype(op, name, bits);
      default: break;
    }
    raise(PyExc_ValueError, op, ": ", name, " must hold numbers, got dtype ",
          text_of(nb::object(object.attr("dtype"))), "; cast it");
  }

  // numpy shows the types of ml_dtypes as raw bytes; their identity is the dtype object.
  DLDataType extension_dtype(const char* op, const char* name, uint8_t bits) const {
    Python& py = the<Python>();
    nb::object dtype = nb::steal(PyObject_GetAttr(object.ptr(), py.dtype));
    if (!dtype.is_valid()) throw nb::python_error();
    if (dtype.is(py.bfloat16)) return {kDLBfloat, 16, 1};
    std::string text = text_of(dtype);
    if (text_of(nb::object(dtype.attr("type").attr("__module__"))) == "ml_dtypes") {
      if (text == "bfloat16") {
        if (!py.bfloat16.is_valid()) py.bfloat16 = std::move(dtype);
        return {kDLBfloat, 16, 1};
      }
      if (text == "float8_e4m3fn") return {kDLFloat8_e4m3fn, bits, 1};
      if (text == "float8_e5m2") return {kDLFloat8_e5m2, bits, 1};
    }
    raise(PyExc_ValueError, op, ": ", name,
          " must be float32, float16 or bfloat16 (ml_dtypes), got dtype ", text, "; cast it");
  }

  void import_exchange(const char* op, const char* name, const CallStream& stream,
                       const Array* home, bool output) {
    if (type.api->dltensor_from_py_object_no_sync != nullptr && (type.is_torch || !output)) {
      DLTensor borrowed;
      if (type.api->dltensor_from_py_object_no_sync(object.ptr(), &borrowed) != 0)
        export_failed(op, name);
      borrow(op, name, borrowed);
    } else {
      if (type.api->managed_tensor_from_py_object_no_sync(object.ptr(), &versioned_) != 0)
        export_failed(op, name);
      check_flags(op, name, versioned_->flags, output);
      borrow(op, name, versioned_->dl_tensor);
    }
    // An array of another library was made on that library's stream, so here its producer has to
    // order itself.
    if (is_cuda() && home != nullptr && home->type.api != type.api)
      import_dlpack(op, name, stream, home, output);
  }

  void import_dlpack(const char* op, const char* name, const CallStream& stream, const Array* home,
                     bool output) {
    Python& py = the<Python>();
    // torch's own export refuses a tensor that requires grad even where grad mode is off.
    nb::object source = type.is_torch ? nb::object(object.attr("detach")()) : nb::borrow(object);
    nb::object method = nb::steal(PyObject_GetAttr(source.ptr(), py.dlpack));
    if (!method.is_valid()) export_failed(op, name);
    nb::dict options;
    if (type.library == Library::cupy || exports_cuda(op, name)) {
      options["stream"] = export_stream(op, name, stream, home);
    }
    options["max_version"] = nb::make_tuple(DLPACK_MAJOR_VERSION, 1);
    nb::object capsule = nb::steal(PyObject_Call(method.ptr(), nb::tuple().ptr(), options.ptr()));
    if (!capsule.is_valid() &&
        PyErr_ExceptionMatches(PyExc_TypeError)) {  // a producer older than DLPack 1.0
      PyErr_Clear();
      PyObject_DelItemString(options.ptr(), "max_version");
      capsule = nb::steal(PyObject_Call(method.ptr(), nb::tuple().ptr(), options.ptr()));
    }
    if (!capsule.is_valid()) export_failed(op, name);
    take(op, name, capsule, output);
  }

  bool exports_cuda(const char* op, const char* name) const {
    nb::object device =
        nb::steal(PyObject_CallMethodObjArgs(object.ptr(), the<Python>().dlpack_device, nullptr));
    if (!device.is_valid()) export_failed(op, name);
    nb::object pair = nb::steal(PySequence_Tuple(device.ptr()));
    bool is_pair = pair.is_valid() && PyTuple_Size(pair.ptr()) == 2 &&
                   PyIndex_Check(PyTuple_GetItem(pair.ptr(), 0)) &&
                   PyIndex_Check(PyTuple_GetItem(pair.ptr(), 1));
    if (!is_pair) {
      PyErr_Clear();
      raise(PyExc_TypeError, op, ": ", name,
            " must give a pair of integers by __dlpack_device__, got ", text_of(nb::repr(device)),
            "; pass what its library makes");
    }
    Py_ssize_t kind = PyNumber_AsSsize_t(PyTuple_GetItem(pair.ptr(), 0), nullptr);
    if (kind == -1 && PyErr_Occurred()) export_failed(op, name);
    return kind == kDLCUDA || kind == kDLCUDAManaged;
  }

  // What to tell the producer: -1 (no synchronisation) within one library, else the stream of the
  // launch.
  nb::object export_stream(const char* op, const char* name, const CallStream& stream,
                           const Array* home) const {
    bool at_home = home == nullptr
                       ? type.library != Library::other
                       : home->type.library == type.library && type.library != Library::other;
    if (at_home) return nb::int_(-1);
    if (home == nullptr && !stream.is_explicit) {
      raise(PyExc_ValueError, op, ": stream must be given, because the current stream of ",
            class_name(object), " (", name, ") is not known; pass stream= and out=");
    }
    auto handle = reinterpret_cast<uintptr_t>(stream.handle);
    return nb::int_(handle == 0 ? uintptr_t{1}
                                : handle);  // DLPack calls the legacy default stream 1
  }

  void take(const char* op, const char* name, nb::handle capsule, bool output) {
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
      auto* managed = static_cast<DLManagedTensorVersioned*>(
          PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
      if (managed->version.major != DLPACK_MAJOR_VERSION) {
        raise(PyExc_ValueError, op, ": ", name, " is exported as DLPack ", managed->version.major,
              ".x, but cuattn reads 1.x; update cuattn");
      }
      check_flags(op, name, managed->flags, output);
      borrow(op, name, managed->dl_tensor);
      PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
      if (versioned_ != nullptr && versioned_->deleter != nullptr) versioned_->deleter(versioned_);
      versioned_ = managed;
    } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
      auto* managed =
          static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
      borrow(op, name, managed->dl_tensor);
      PyCapsule_SetName(capsule.ptr(), "used_dltensor");
      legacy_ = managed;
    } else {
      raise(PyExc_ValueError, op, ": ", name,
            " gave no DLPack capsule from __dlpack__; pass a dense array");
    }
  }

  // The library itself refuses to show its memory (sparse, meta, quantised, ...): says so under the
  // argument's name.
  [[noreturn]] static void export_failed(const char* op, const char* name) {
    nb::python_error cause;
    if (!cause.matches(PyExc_Exception)) throw cause;
    std::string reason = text_of(cause.value());
    reason.resize(std::min(reason.find('\n'), reason.size()));  // drops torch's C++ backtrace
    nb::raise_from(cause, PyExc_ValueError,
                   "%s: %s must be a dense array in memory; its library says: %s", op, name,
                   reason.c_str());
  }
};

}  // namespace cuattn::bindings
