// SPDX-License-Identifier: Apache-2.0
// cuattn.attention as a builtin: a call pays for the arguments it gives, not for all 24. What is
// out of the ordinary (JAX arrays, quantisation scales, wrong or missing names) goes to the Python
// function of the same signature. Next: module.cpp.
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "options.h"

namespace cuattn::bindings {

// One builtin in front of one Python function; both live as long as the process.
struct Front {
  using Run = nb::object (*)(AttentionArgs& args);  // gives NotImplemented to decline

  struct Keyword {
    const char* name;
    nb::handle AttentionArgs::* field;
    PyObject* interned = nullptr;
  };

  static nb::object make(nb::object python_function, Run run, const char* name,
                         const std::string& doc) {
    Front& front = get();
    front.python_function = python_function.release().ptr();
    front.run = run;
    for (Keyword& keyword : front.keywords)
      keyword.interned = PyUnicode_InternFromString(keyword.name);
    front.doc = doc;
    front.definition = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)),
                        METH_FASTCALL | METH_KEYWORDS, front.doc.c_str()};
    nb::object module = nb::handle(front.python_function).attr("__module__");
    return nb::steal(PyCFunction_NewEx(&front.definition, nullptr, module.ptr()));
  }

 private:
  PyObject* python_function = nullptr;
  Run run = nullptr;
  std::string doc;
  PyMethodDef definition{};
  Keyword keywords[18] = {{"causal", &AttentionArgs::causal},
                          {"out", &AttentionArgs::out},
                          {"scale", &AttentionArgs::scale},
                          {"window", &AttentionArgs::window},
                          {"return_lse", &AttentionArgs::return_lse},
                          {"layout", &AttentionArgs::layout},
                          {"softcap", &AttentionArgs::softcap},
                          {"sinks", &AttentionArgs::sinks},
                          {"alibi_slopes", &AttentionArgs::alibi_slopes},
                          {"bias", &AttentionArgs::bias},
                          {"seqused_q", &AttentionArgs::seqused_q},
                          {"seqused_k", &AttentionArgs::seqused_k},
                          {"lse_out", &AttentionArgs::lse_out},
                          {"num_splits", &AttentionArgs::num_splits},
                          {"batch_invariant", &AttentionArgs::batch_invariant},
                          {"workspace", &AttentionArgs::workspace},
                          {"backend", &AttentionArgs::backend},
                          {"stream", &AttentionArgs::stream}};

  static Front& get() {
    static Front* front = new Front();  // never destroyed: the builtin points into it
    return *front;
  }

  // False for a call that the Python function has to judge.
  bool read(AttentionArgs& args, PyObject* const* values, Py_ssize_t positional, PyObject* names) {
    if (positional != 3) return false;
    args.q = values[0];
    args.k = values[1];
    args.v = values[2];
    Py_ssize_t given = names == nullptr ? 0 : PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < given; ++i) {
      PyObject* name = PyTuple_GetItem(names, i);
      const Keyword* found = nullptr;
      for (const Keyword& keyword : keywords) {
        if (keyword.interned != name) continue;  // names in a program's text are interned
        found = &keyword;
        break;
      }
      if (found == nullptr) return false;
      args.*found->field = values[3 + i];
    }
    return true;
  }

  PyObject* call_python(PyObject* const* values, Py_ssize_t positional, PyObject* names) const {
    nb::object arguments = nb::steal(PyTuple_New(positional));
    if (!arguments.is_valid()) return nullptr;
    for (Py_ssize_t i = 0; i < positional; ++i) {
      Py_INCREF(values[i]);
      PyTuple_SetItem(arguments.ptr(), i, values[i]);
    }
    if (names == nullptr) return PyObject_Call(python_function, arguments.ptr(), nullptr);
    nb::object keywords_given = nb::steal(PyDict_New());
    if (!keywords_given.is_valid()) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i) {
      if (PyDict_SetItem(keywords_given.ptr(), PyTuple_GetItem(names, i), values[positional + i]))
        return nullptr;
    }
    return PyObject_Call(python_function, arguments.ptr(), keywords_given.ptr());
  }

  static PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t positional,
                        PyObject* names) {
    Front& front = get();
    try {
      AttentionArgs args;
      if (front.read(args, values, positional, names)) {
        nb::object result = front.run(args);
        if (result.ptr() != Py_NotImplemented) return result.release().ptr();
      }
      return front.call_python(values, positional, names);
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
