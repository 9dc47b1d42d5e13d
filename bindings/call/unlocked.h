// SPDX-License-Identifier: Apache-2.0
// Work without the interpreter lock, so that other threads of Python run meanwhile. Next:
// ../attention.cpp.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace cuattn::bindings {

// Gives the interpreter lock up for its lifetime.
// Note: Python before 3.14 ends a thread that asks for the lock after the interpreter's end by
// pthread_exit. That unwinds the stack: the destructors on it would run Python without the lock,
// and the first noexcept function aborts the process. Such a thread sleeps here instead until the
// process is gone, as 3.14 lets it by itself.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding of pthread_exit, which may be caught but not ended
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace cuattn::bindings
