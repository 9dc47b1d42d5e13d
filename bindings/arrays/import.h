// SPDX-License-Identifier: Apache-2.0
// Arrays at the border: any Python array object becomes a borrowed DLTensor, with no copy and no
// synchronisation. torch (>= 2.10) and others that publish the DLPack C exchange API are read
// through it, numpy through its C ABI or array interface (numpy.h), the rest through `__dlpack__`;
// docs/design.md has the rule of each library. Next: import.cpp, allocate.h.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "bindings/arrays/loaded.h"
#include "bindings/arrays/numpy.h"
#include "bindings/call/raise.h"
#include "cuattn/dlpack.h"
#include "cuattn/tensor.h"

namespace cuattn::bindings {

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
  bool is_asked_sign = false;  // each tensor, whether it is a negated view: under CUATTN_CHECK
};

// Memory that both sides reach is the device's, too.
inline bool is_cuda_device(int64_t type) { return type == kDLCUDA || type == kDLCUDAManaged; }

namespace detail {

// Looks at a type seen for the first time.
ArrayType classify(const char* op, const char* name, nb::handle object);
// Whether torch is in grad mode.
bool in_grad_mode();
// Whether a torch tensor requires grad.
bool requires_grad(nb::handle object);
// Refuses what would be lost without a word, in torch's grad mode: a gradient.
void refuse_grad(const char* op, const char* name, nb::handle object);
// Whether a level of torch's forward-mode differentiation is open.
bool in_dual_level();
// Refuses what would be lost without a word in such a level: a tangent.
void refuse_tangent(const char* op, const char* name, nb::handle object);
// Refuses what would be recorded without a word, by torch.jit.trace and make_fx: no call at all.
void refuse_recording(const char* op, const char* name);
// Refuses a torch tensor whose memory holds its values negated, as those of `x.conj().imag` are.
void refuse_negated(const char* op, const char* name, nb::handle object);
// Refuses what DLPack's flags say: an output that is read-only, and a copy.
void check_flags(const char* op, const char* name, uint64_t flags, bool output);

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

  // Imports `source` under the argument's name. `stream` is consulted only where the producer must
  // order itself: for arrays of another library than the call's (`home`), which is that of q.
  void import(const char* op, const char* name, nb::handle source, const CallStream& stream,
              const Array* home, bool output = false) {
    object = source;
    type = array_type(op, name, source);
    if (type.is_torch && !is_looked_at_) ask_torch(op, name, home);
    switch (type.library) {
      case Library::jax:
        raise(PyExc_ValueError, op, ": ", name,
              " is a JAX array but the first argument is not; JAX arrays cannot be mixed with "
              "others; convert it first");
      case Library::numpy:
        if (!import_usual_numpy(source, output, view)) import_numpy(op, name, source, output, view);
        break;
      case Library::exchange: import_exchange(op, name, stream, home, output); break;
      default: import_dlpack(op, name, stream, home, output);
    }
    if (view.device.device_type == kDLCUDAHost) view.device = {kDLCPU, 0};
    if (is_cuda_device(view.device.device_type)) view.device.device_type = kDLCUDA;
    if (view.device.device_type != kDLCPU && view.device.device_type != kDLCUDA) {
      raise(PyExc_ValueError, op, ": ", name,
            " must be on the CPU or a CUDA device, got DLPack device type ",
            static_cast<int>(view.device.device_type), "; copy it to one of these");
    }
    // Note: negated memory is every second float of complex numbers, so rows without gaps are none,
    // but for those of torch._neg_view. To ask torch takes 65 ns a tensor, a tenth of a short call.
    if (type.is_torch && (type.is_asked_sign || !has_dense_rows()))
      detail::refuse_negated(op, name, source);
    tensor = view.dl();
  }

  // Takes an answer for `import`: whether torch is in grad mode, where `source` requires no grad.
  void take_grad_mode(bool grad_mode) {
    grad_mode_ = grad_mode;
    is_grad_asked_ = true;
  }

  // Imports what is looked at and not computed with, so that no gradient is lost.
  void describe(const char* op, const char* name, nb::handle source) {
    is_looked_at_ = true;
    import(op, name, source, {}, nullptr);
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
  bool grad_mode_ = false;   // torch's, asked once per call
  bool dual_level_ = false;  // the same
  bool is_grad_asked_ = false;
  bool is_looked_at_ = false;
  DLManagedTensorVersioned* versioned_ = nullptr;
  DLManagedTensor* legacy_ = nullptr;

  // Refuses what a call would lose of a tensor without a word. What is the same for all of the call's
  // is asked for the first.
  void ask_torch(const char* op, const char* name, const Array* home);

  bool has_dense_rows() const {
    int32_t last = view.ndim - 1;
    return last >= 0 && last < kMaxDims && view.strides[last] == 1 && view.shape[last] > 1;
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
      detail::check_flags(op, name, versioned_->flags, output);
      borrow(op, name, versioned_->dl_tensor);
    }
    // An array of another library was made on that library's stream, so here its producer has to
    // order itself.
    if (is_cuda() && home != nullptr && home->type.api != type.api)
      import_dlpack(op, name, stream, home, output);
  }

  void import_dlpack(const char* op, const char* name, const CallStream& stream, const Array* home,
                     bool output);
  bool exports_cuda(const char* op, const char* name) const;
  nb::object export_stream(const char* op, const char* name, const CallStream& stream,
                           const Array* home) const;
  void take(const char* op, const char* name, nb::handle capsule, bool output);
  [[noreturn]] void export_failed(const char* op, const char* name) const;
};

// An array that may be left out, into `to`; nullptr where it is.
inline const DLTensor* import_given(const char* op, const char* name, nb::handle source,
                                    const CallStream& stream, const Array& home,
                                    std::optional<Array>& to, bool output = false) {
  if (!is_given(source)) return nullptr;
  to.emplace().import(op, name, source, stream, &home, output);
  return &to->tensor;
}

}  // namespace cuattn::bindings
