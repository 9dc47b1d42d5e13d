// SPDX-License-Identifier: Apache-2.0
// How each library's arrays come in, but for numpy's: numpy.cpp.
#include "bindings/arrays/import.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "bindings/call/errors.h"

namespace cuattn::bindings {

namespace detail {
namespace {

// The exchange table of major version 1 that `type` publishes, or nullptr.
const DLPackExchangeAPI* exchange_api(nb::handle type) {
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (capsule.is_none() || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* header = static_cast<DLPackExchangeAPIHeader*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION)
    header = header->prev_api;
  return reinterpret_cast<const DLPackExchangeAPI*>(header);
}

bool is_subclass(nb::handle type, nb::handle base) {
  int answer = base.is_none() ? 0 : PyObject_IsSubclass(type.ptr(), base.ptr());
  if (answer < 0) throw nb::python_error();
  return answer != 0;
}

// What calls with tensors ask of torch.
void look_up_torch(nb::handle torch, Python& py) {
  py.grad_enabled = torch.attr("is_grad_enabled");
  py.requires_grad = torch.attr("Tensor").attr("requires_grad");
  py.read_requires_grad = reinterpret_cast<descrgetfunc>(
      PyType_GetSlot(Py_TYPE(py.requires_grad.ptr()), Py_tp_descr_get));
  py.forward_ad = torch.attr("autograd").attr("forward_ad").attr("__dict__");
  py.is_tracing = torch.attr("_C").attr("_is_tracing");
  py.dispatch = torch.attr("utils").attr("_python_dispatch").attr("__dict__");
}

// Whether CUATTN_CHECK is on: not where it is unset, empty or 0.
bool is_check_on() {
  const char* value = std::getenv("CUATTN_CHECK");
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

// Whether a question without arguments is answered by True. Note: a call by nanobind takes longer.
bool is_true(nb::handle question) {
  PyObject* answer = PyObject_CallNoArgs(question.ptr());
  if (answer == nullptr) throw nb::python_error();
  Py_DECREF(answer);  // True or False, which stay
  return answer == Py_True;
}

// Whether make_fx records what this thread does, behind torch's dispatch or before it; asked while any
// thread is in a dispatch mode.
bool is_in_proxy_mode() {
  nb::object torch = loaded_module("torch"), core = torch.attr("_C");
  nb::object proxy = core.attr("_TorchDispatchModeKey").attr("PROXY");
  nb::object before = torch.attr("_ops").attr("_get_dispatch_mode_pre_dispatch");
  return !nb::object(core.attr("_get_dispatch_mode")(proxy)).is_none() ||
         !nb::object(before(proxy)).is_none();
}

}  // namespace

ArrayType classify(const char* op, const char* name, nb::handle object) {
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
    look_up_torch(torch, the<Python>());
    const DLPackExchangeAPI* api = exchange_api(type);
    return {api != nullptr ? Library::exchange : Library::torch, api, true, is_check_on()};
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

bool in_grad_mode() { return is_true(the<Python>().grad_enabled); }

// Note: PyObject_GetAttr would look for the descriptor in the type and its bases each time.
bool requires_grad(nb::handle object) {
  const Python& py = the<Python>();
  PyObject* flag = py.read_requires_grad(py.requires_grad.ptr(), object.ptr(),
                                         reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
  if (flag == nullptr) throw nb::python_error();
  Py_DECREF(flag);  // True or False, which stay
  return flag == Py_True;
}

void refuse_grad(const char* op, const char* name, nb::handle object) {
  if (!requires_grad(object)) return;
  raise(gradient_wanted, op, ": ", name, " requires grad, but no gradient goes through ", op,
        "; call it under torch.no_grad() or pass ", name, ".detach()");
}

bool in_dual_level() {
  const Python& py = the<Python>();
  PyObject* level = PyDict_GetItemWithError(py.forward_ad.ptr(), py.current_level);
  return level != nullptr && PyLong_AsLong(level) >= 0;
}

void refuse_tangent(const char* op, const char* name, nb::handle object) {
  try {
    auto pair = nb::module_::import_("torch.autograd.forward_ad").attr("unpack_dual")(object);
    if (pair.attr("tangent").is_none()) return;
  } catch (const nb::python_error& error) {  // below a dispatch mode or a graph there are none
    if (!error.matches(PyExc_RuntimeError)) throw;
    return;
  }
  raise(PyExc_NotImplementedError, op, ": ", name,
        " has a tangent of forward-mode differentiation, which no op of cuattn carries on; use "
        "reverse mode (backward, torch.func.vjp), or pass torch.autograd.forward_ad.unpack_dual(",
        name, ").primal");
}

void refuse_recording(const char* op, const char* name) {
  const Python& py = the<Python>();
  if (!is_true(py.is_tracing)) {
    PyObject* in_mode = PyDict_GetItemWithError(py.dispatch.ptr(), py.in_dispatch_mode);
    if (in_mode != Py_True || !is_in_proxy_mode()) return;
  }
  raise(gradient_wanted, op, ": ", name,
        " is of torch.jit.trace or make_fx, which record the memory of a result and no call of ",
        op, "; call it outside of what they trace, or trace cuattn.torch.attention");
}

// What torch.func has made of a tensor, by one of its own questions.
bool is_in_transform(nb::handle object, const char* question) {
  nb::object functorch = nb::getattr(loaded_module("torch").attr("_C"), "_functorch", nb::none());
  nb::object asks = nb::getattr(functorch, question, nb::none());
  return !asks.is_none() && nb::cast<bool>(asks(object));
}

void refuse_negated(const char* op, const char* name, nb::handle object) {
  if (!nb::cast<bool>(object.attr("is_neg")())) return;
  raise(PyExc_ValueError, op, ": ", name,
        " is a negated view, whose memory holds the values with the other sign; pass ", name,
        ".resolve_neg()");
}

void check_flags(const char* op, const char* name, uint64_t flags, bool output) {
  if (output && (flags & DLPACK_FLAG_BITMASK_READ_ONLY)) {
    raise(PyExc_ValueError, op, ": ", name, " is read-only; pass a writable array");
  }
  // Note: a copy dies with its deleter, which runs while the kernel may still read it.
  if (flags & DLPACK_FLAG_BITMASK_IS_COPIED) {
    raise(PyExc_ValueError, op, ": ", name,
          " is exported as a copy by its library; pass a plain strided array");
  }
}

}  // namespace detail

void Array::ask_torch(const char* op, const char* name, const Array* home) {
  bool is_first = home == nullptr || !home->type.is_torch;
  if (is_first) detail::refuse_recording(op, name);
  if (!is_grad_asked_) {
    grad_mode_ = is_first ? detail::in_grad_mode() : home->grad_mode_;
    if (grad_mode_) detail::refuse_grad(op, name, object);
  }
  dual_level_ = is_first ? detail::in_dual_level() : home->dual_level_;
  if (dual_level_) detail::refuse_tangent(op, name, object);
}

void Array::import_dlpack(const char* op, const char* name, const CallStream& stream,
                          const Array* home, bool output) {
  Python& py = the<Python>();
  // torch's own export refuses a tensor that requires grad even where grad mode is off.
  nb::object source = type.is_torch ? nb::object(object.attr("detach")()) : nb::borrow(object);
  nb::object method = nb::steal(PyObject_GetAttr(source.ptr(), py.dlpack));
  if (!method.is_valid()) export_failed(op, name);
  nb::dict options;
  bool on_cuda = type.library == Library::cupy || exports_cuda(op, name);
  if (on_cuda) options["stream"] = export_stream(op, name, stream, home);
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
  if (!on_cuda && is_cuda_device(view.device.device_type)) {  // its producer was told no stream
    raise(PyExc_ValueError, op, ": ", name,
          " must say by __dlpack_device__ that it is on a CUDA device, got memory of one by "
          "__dlpack__; pass what its library makes");
  }
}

bool Array::exports_cuda(const char* op, const char* name) const {
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
  return is_cuda_device(kind);
}

// What to tell the producer: -1 (no synchronisation) within one library, else the stream of the
// launch.
nb::object Array::export_stream(const char* op, const char* name, const CallStream& stream,
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
  return nb::int_(handle == 0 ? uintptr_t{1} : handle);  // DLPack calls the legacy default stream 1
}

void Array::take(const char* op, const char* name, nb::handle capsule, bool output) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* managed = static_cast<DLManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != DLPACK_MAJOR_VERSION) {
      raise(PyExc_ValueError, op, ": ", name, " is exported as DLPack ", managed->version.major,
            ".x, but cuattn reads 1.x; update cuattn");
    }
    detail::check_flags(op, name, managed->flags, output);
    borrow(op, name, managed->dl_tensor);
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    if (versioned_ != nullptr && versioned_->deleter != nullptr) versioned_->deleter(versioned_);
    versioned_ = managed;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    borrow(op, name, managed->dl_tensor);
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    legacy_ = managed;
  } else {
    raise(PyExc_ValueError, op, ": ", name,
          " gave no DLPack capsule from __dlpack__; pass a dense array");
  }
}

// The library itself refuses to show its memory (sparse, meta, quantised, ...): says so under the
// argument's name. What torch.func.vmap maps over goes where a gradient is wanted: to the registered
// ops, which have rules for both.
void Array::export_failed(const char* op, const char* name) const {
  nb::python_error cause;
  if (!cause.matches(PyExc_Exception)) throw cause;
  if (type.is_torch && detail::is_in_transform(object, "is_batchedtensor")) {
    raise(gradient_wanted, op, ": ", name, " is batched by torch.func.vmap, which has no rule for ",
          op, "; make the mapped axis a part of the batch, or call ", op, " in a loop");
  }
  if (type.is_torch && detail::is_in_transform(object, "is_gradtrackingtensor")) {
    raise(gradient_wanted, op, ": ", name,
          " is of torch.func.grad, jvp or another that "
          "differentiates, and no gradient goes through ",
          op, "; make ", name, " outside of it");
  }
  std::string reason = text_of(cause.value());
  reason.resize(std::min(reason.find('\n'), reason.size()));  // drops torch's C++ backtrace
  nb::raise_from(cause, PyExc_ValueError,
                 "%s: %s must be a dense array in memory; its library says: %s", op, name,
                 reason.c_str());
}

}  // namespace cuattn::bindings
