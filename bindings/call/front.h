// SPDX-License-Identifier: Apache-2.0
// The functions of cuattn as builtins: a call pays for the arguments it gives, not for all that
// there are. What is out of the ordinary (JAX arrays, quantisation scales, wrong or missing names)
// goes to the Python function of the same signature, and what autograd is to see to cuattn.torch, as
// it was given. Next: ../attention.cpp, ../paged.cpp.
#pragma once

#include <exception>
#include <iterator>
#include <new>
#include <string>

#include "bindings/call/arguments.h"
#include "bindings/call/errors.h"

namespace cuattn::bindings {

// The builtin of one Python function; both live as long as the process. `Function` is one of
// options.h. kRun gives NotImplemented to decline, and the class GradientWanted to leave the call to
// what differentiates it.
template <class Function, auto kRun>
struct Front {
  using Args = Function::Args;

  // `refuse_names` is called with op and keywords when the Python function raised a TypeError, and
  // raises a clearer one if a name is unknown. `find_gradient` is called with op when a gradient is
  // first wanted, and returns the function that makes one.
  static nb::object make(nb::object python_function, const std::string& doc,
                         nb::object refuse_names, nb::object find_gradient) {
    Front& front = get();
    front.refuse_names_ = refuse_names.release().ptr();
    front.find_gradient_ = find_gradient.release().ptr();
    front.name_ = text_of(nb::object(python_function.attr("__name__")));
    nb::object module(python_function.attr("__module__"));
    front.python_function_ = python_function.release().ptr();
    front.keywords_ = Names<Args>(Function::kKeywords);
    front.doc_ = doc;
    front.definition_ = {front.name_.c_str(),
                         reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                         METH_FASTCALL | METH_KEYWORDS, front.doc_.c_str()};
    return nb::steal(PyCFunction_NewEx(&front.definition_, nullptr, module.ptr()));
  }

 private:
  PyObject *python_function_ = nullptr, *refuse_names_ = nullptr;
  PyObject *find_gradient_ = nullptr, *differentiable_ = nullptr;
  std::string name_, doc_;
  PyMethodDef definition_{};
  Names<Args> keywords_;

  static Front& get() {
    static Front* front = new Front();  // never destroyed: the builtin points into it
    return *front;
  }

  // False for a call that the Python function has to judge.
  bool read(Args& args, PyObject* const* values, Py_ssize_t count, PyObject* names) {
    constexpr Py_ssize_t kCount = std::size(Function::kPositional);
    if (count != kCount) return false;
    for (Py_ssize_t i = 0; i < kCount; ++i) args.*Function::kPositional[i].field = values[i];
    Py_ssize_t given = names == nullptr ? 0 : PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < given; ++i) {
      nb::handle Args::* field = keywords_.field(PyTuple_GetItem(names, i));
      if (field == nullptr) return false;
      args.*field = values[count + i];
    }
    return true;
  }

  // The arguments of a call as a tuple and a dict; the dict is invalid where no name was given.
  struct Given {
    nb::object positional, keywords;

    Given(PyObject* const* values, Py_ssize_t count, PyObject* names)
        : positional(nb::steal(PyTuple_New(count))) {
      if (!positional.is_valid()) throw nb::python_error();
      for (Py_ssize_t i = 0; i < count; ++i) {
        Py_INCREF(values[i]);
        PyTuple_SetItem(positional.ptr(), i, values[i]);
      }
      if (names == nullptr) return;
      keywords = nb::steal(PyDict_New());
      if (!keywords.is_valid()) throw nb::python_error();
      for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i) {
        if (PyDict_SetItem(keywords.ptr(), PyTuple_GetItem(names, i), values[count + i]))
          throw nb::python_error();
      }
    }

    PyObject* call(PyObject* function) const {
      return PyObject_Call(function, positional.ptr(), keywords.ptr());
    }
  };

  [[gnu::noinline]] PyObject* call_python(const Given& given) const {
    PyObject* result = given.call(python_function_);
    bool may_be_named_wrong =
        result == nullptr && given.keywords.is_valid() && PyErr_ExceptionMatches(PyExc_TypeError);
    if (!may_be_named_wrong) return result;
    nb::python_error refusal;
    nb::object refuse_names = nb::borrow(refuse_names_);
    refuse_names(name_, given.keywords);
    refusal.restore();
    return nullptr;
  }

  [[gnu::noinline]] PyObject* call_differentiable(const Given& given) {
    if (differentiable_ == nullptr) {
      nb::object find_gradient = nb::borrow(find_gradient_);
      PyObject* found = nb::object(find_gradient(name_)).release().ptr();
      if (differentiable_ == nullptr) differentiable_ = found;  // another thread may be first
    }
    return given.call(differentiable_);
  }

  static PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t count, PyObject* names) {
    Front& front = get();
    try {
      Args args;
      if (front.read(args, values, count, names)) {
        nb::object result = kRun(args);
        if (result.ptr() == gradient_wanted)
          return front.call_differentiable(Given(values, count, names));
        if (result.ptr() != Py_NotImplemented) return result.release().ptr();
      }
      return front.call_python(Given(values, count, names));
    } catch (nb::python_error& error) {
      error.restore();
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
  }
};

// Adds to the module `NAME(arguments)`, which runs the arguments of a dict by kRun, and
// `NAME_front(python_function, ...)`, which makes the builtin of kGiven.
template <class Function, auto kGiven, auto kRun = kGiven>
void add_function(nb::module_& m) {
  std::string name = Function::kName, front = name + "_front";
  std::string run_signature = "def " + name + "(arguments: dict[str, object]) -> object";
  std::string front_signature =
      "def " + front +
      "(python_function: object, doc: str, refuse_names: object, find_gradient: object) -> object";
  std::string run_doc = "cuattn." + name +
                        " of its arguments by name. NotImplemented for JAX arrays, which go through"
                        " cuattn.jax.";
  std::string front_doc = "The builtin cuattn." + name +
                          ", which serves what it can and leaves the rest to `python_function`.";
  m.def(
      name.c_str(),
      [](const nb::dict& arguments) {
        auto args = read_arguments<Function>(arguments);
        return kRun(args);
      },
      nb::arg("arguments"), nb::sig(run_signature.c_str()), run_doc.c_str());
  m.def(front.c_str(), &Front<Function, kGiven>::make, nb::arg("python_function"), nb::arg("doc"),
        nb::arg("refuse_names"), nb::arg("find_gradient"), nb::sig(front_signature.c_str()),
        front_doc.c_str());
}

}  // namespace cuattn::bindings
