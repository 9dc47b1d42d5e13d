// SPDX-License-Identifier: Apache-2.0
// A stack of its own for each emulated thread, and the switch between two. On x86-64 a dozen
// instructions; elsewhere ucontext, whose system calls make it a hundred times slower.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulate {

#ifdef __x86_64__
// It ends with a jump: a processor expects a `ret` to go back to where its `call` was.
extern "C" void emulate_switch(void** save, void* load);
asm(R"(
.text
.globl emulate_switch
.hidden emulate_switch
.type emulate_switch, @function
emulate_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  pop %rcx
  jmp *%rcx
.size emulate_switch, . - emulate_switch
)");
#endif

// One that has not begun, runs, or waits for its next switch_in.
class Fiber {
 public:
  static constexpr size_t kStackBytes = 256 << 10, kGuardBytes = 4096;

  // Stacks begin at different places of their pages: at the same one, the tops of all lanes would
  // share a few sets of the cache, and push each other out at every switch.
  explicit Fiber(size_t number) : skipped_(number % 61 * 576) {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) std::abort();
    stack_ = static_cast<char*>(memory);
  }
  Fiber(const Fiber&) = delete;

  // The next switch_in calls `function`, which must not return.
#ifdef __x86_64__
  void begin(void (*function)()) {
    auto* top = reinterpret_cast<void**>(stack_ + kStackBytes - 16 - skipped_);
    *--top = nullptr;  // where `function` would return to; rsp is then 8 below a multiple of 16
    *--top = reinterpret_cast<void*>(function);
    own_ = top - 6;
  }
  void switch_in() { emulate_switch(&host_, own_); }
  void switch_out() { emulate_switch(&own_, host_); }
#else
  void begin(void (*function)()) {
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_ + kGuardBytes;
    own_.uc_stack.ss_size = kStackBytes - kGuardBytes - skipped_;
    own_.uc_link = nullptr;
    makecontext(&own_, function, 0);
  }
  void switch_in() { swapcontext(&host_, &own_); }
  void switch_out() { swapcontext(&own_, &host_); }
#endif

 private:
  char* stack_;
  size_t skipped_;  // a multiple of 64
#ifdef __x86_64__
  void *own_ = nullptr, *host_ = nullptr;
#else
  ucontext_t own_, host_;
#endif
};

}  // namespace emulate
