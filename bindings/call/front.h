// SPDX-License-Identifier: Apache-2.0
// cuattn.attention, attention_varlen and paged_attention as builtins: a call pays for the arguments
// it gives, not for all 24. What is out of the ordinary (JAX arrays, quantisation scales, wrong or
// missing names) goes to the Python function of the same signature. Next: module.cpp, paged.cpp.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/import.h"

namespace cuattn::bindings {

template <class Args>
struct Argument {
  const char* name;
  nb::handle Args::* field;
  PyObject* interned = nullptr;
};

// The builtin of one Python function, whose arguments make an `Args`; both live as long as the
// process. kRun gives NotImplemented to decline.
template <class Args, nb::object (*kRun)(Args&)>
struct Front {
  // `positional` stand in their place, `keywords` are given by name, the most usual first.
  static nb::object make(nb::object python_function, const std::string& doc,
                         std::vector<Argument<Args>> positional,
                         std::vector<Argument<Args>> keywords) {
    Front& front = get();
    front.name_ = text_of(nb::object(python_function.attr("__name__")));
    nb::object module(python_function.attr("__module__"));
    front.python_function_ = python_function.release().ptr();
    front.positional_ = std::move(positional);
    front.keywords_ = std::move(keywords);
    for (Argument<Args>& keyword : front.keywords_)
      keyword.interned = PyUnicode_InternFromString(keyword.name);
    front.doc_ = doc;
    front.definition_ = {front.name_.c_str(),
                         reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                         METH_FASTCALL | METH_KEYWORDS, front.doc_.c_str()};
    return nb::steal(PyCFunction_NewEx(&front.definition_, nullptr, module.ptr()));
  }

 private:
  PyObject* python_function_ = nullptr;
  std::string name_, doc_;
  PyMethodDef definition_{};
  std::vector<Argument<Args>> positional_, keywords_;

  static Front& get() {
    static Front* front = new Front();  // never destroyed: the builtin points into it
    return *front;
  }

  // False for a call that the Python function has to judge.
  bool read(Args& args, PyObject* const* values, Py_ssize_t count, PyObject* names) {
    if (count != static_cast<Py_ssize_t>(positional_.size())) return false;
    for (Py_ssize_t i = 0; i < count; ++i) args.*positional_[i].field = values[i];
    Py_ssize_t given = names == nullptr ? 0 : PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < given; ++i) {
      PyObject* name = PyTuple_GetItem(names, i);
      const Argument<Args>* found = nullptr;
      for (const Argument<Args>& keyword : keywords_) {
        if (keyword.interned != name) continue;  // names in a program's text are interned
        found = &keyword;
        break;
      }
      if (found == nullptr) return false;
      args.*found->field = values[count + i];
    }
    return true;
  }

  PyObject* call_python(PyObject* const* values, Py_ssize_t count, PyObject* names) const {
    nb::object arguments = nb::steal(PyTuple_New(count));
    if (!arguments.is_valid()) return nullptr;
    for (Py_ssize_t i = 0; i < count; ++i) {
      Py_INCREF(values[i]);
      PyTuple_SetItem(arguments.ptr(), i, values[i]);
    }
    if (names == nullptr) return PyObject_Call(python_function_, arguments.ptr(), nullptr);
    nb::object keywords_given = nb::steal(PyDict_New());
    if (!keywords_given.is_valid()) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i) {
      if (PyDict_SetItem(keywords_given.ptr(), PyTuple_GetItem(names, i), values[count + i]))
        return nullptr;
    }
    return PyObject_Call(python_function_, arguments.ptr(), keywords_given.ptr());
  }

  static PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t count, PyObject* names) {
    Front& front = get();
    try {
      Args args;
      if (front.read(args, values, count, names)) {
        nb::object result = kRun(args);
        if (result.ptr() != Py_NotImplemented) return result.release().ptr();
      }
      return front.call_python(values, count, names);
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

}  // namespace cuattn::bindings
