// SPDX-License-Identifier: Apache-2.0
// Turns a signal that a kernel causes into the end of its launch. Used by block.cpp.
#pragma once

#include <setjmp.h>
#include <signal.h>

namespace emulate {

// While one lives, a signal calls `crash` and, where that answers true, jumps to `end`.
class CrashReport {
 public:
  static inline sigjmp_buf end;

  explicit CrashReport(bool (*crash)(const char* text)) {
    crash_ = crash;
    static char stack[64 << 10];  // that of a fiber may be full
    stack_t alternate = {stack, 0, sizeof stack};
    sigaltstack(&alternate, &stack_before_);
    struct sigaction action = {};
    action.sa_handler = handle;
    action.sa_flags = SA_ONSTACK;
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~CrashReport() {
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &before_[i], nullptr);
    sigaltstack(&stack_before_, nullptr);
  }
  CrashReport(const CrashReport&) = delete;

 private:
  static void handle(int number) {
    // -fsanitize=alignment traps with SIGILL.
    if (crash_(number == SIGILL ? "a load or store that is not aligned to the size of its type"
                                : "an access of memory that is not there, or a full stack")) {
      siglongjmp(end, 1);
    }
    signal(number, SIG_DFL);
    raise(number);
  }

  static inline bool (*crash_)(const char* text);
  static constexpr int kCount = 3, kSignals[kCount] = {SIGSEGV, SIGBUS, SIGILL};
  struct sigaction before_[kCount];
  stack_t stack_before_;
};

}  // namespace emulate
