// SPDX-License-Identifier: Apache-2.0
// How a kernel runs: the blocks of a grid one after another, the threads of a block as fibers of
// one host thread. A fiber runs until it must wait for others: a warp's lanes at a collective, a
// block's threads at a barrier. Shared memory is poisoned with 0xFF (NaN of every float type, -1)
// before every block. What breaks a rule ends the launch with cudaErrorLaunchFailure and a text
// that names kernel, block and thread. Next: warp.h, ptx.h (the callers), ../../block.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulate {

// A line of the source that a thread runs.
struct Place {
  const char* file;
  int line;
  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Launches.
struct Config {
  dim3 grid, block;
  size_t smem_bytes;
  cudaStream_t stream;
  Config(dim3 grid, dim3 block, size_t smem_bytes = 0, cudaStream_t stream = nullptr)
      : grid(grid), block(block), smem_bytes(smem_bytes), stream(stream) {}
};

// `body(arguments)` is one thread. Sets the last error.
void run_grid(const Config& config, const void* kernel, void (*body)(const void*),
              const void* arguments);

template <class... Parameters, class... Arguments>
void launch(const Config& config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<std::remove_cv_t<Parameters>...> values;
  } call{kernel, {static_cast<Parameters>(arguments)...}};
  run_grid(
      config, reinterpret_cast<const void*>(kernel),
      [](const void* call) {
        const Call& made = *static_cast<const Call*>(call);
        std::apply(made.kernel, made.values);
      },
      &call);
}

// Called by every thread as its kernel begins; the name is the kernel's in error texts.
void enter(const char* kernel);

// Ends the launch; in host code the process.
[[noreturn]] void fail(const char* text, Place place = Place::here());

// Shared memory. A variable takes its place at the first thread's arrival.
constexpr uint32_t kDynamicBegin = 1024;             // its address: 0 is none
constexpr uint32_t kStaticBegin = 512 << 10;         // of variables of fixed size
constexpr uint32_t kStaticBytes = 48 << 10;          // and the most of them
constexpr uint32_t kMostSharedBytes = 227 << 10;     // of a block
void* place_shared(const void* key, size_t bytes, size_t align);
void* dynamic_place(size_t align);
// The memory behind an address of the shared window, and the address of such memory.
void* at_shared(uint32_t address, uint32_t bytes, const char* what, Place place);
uint32_t shared_address(const void* pointer);

template <class T, size_t align, class Key>
T& shared() {
  static const char key = 0;
  return *static_cast<T*>(place_shared(&key, sizeof(T), align > alignof(T) ? align : alignof(T)));
}
template <class T, size_t align>
T* dynamic_shared() {
  return static_cast<T*>(dynamic_place(align > alignof(T) ? align : alignof(T)));
}

// Meetings. The last lane of `mask` to arrive calls `complete` with what each lane brought
// (nullptr: not in the mask, or its thread has ended), and all go on.
using Complete = void (*)(void* (&lanes)[32]);
void meet(uint32_t mask, const char* what, Place place, void* brought, Complete complete);

// The same with an object for each lane.
template <class Lane, class Function>
void meet_as(uint32_t mask, const char* what, Place place, Lane& lane, Function) {
  meet(mask, what, place, &lane, [](void* (&lanes)[32]) {
    Lane* typed[32];
    for (int i = 0; i < 32; ++i) typed[i] = static_cast<Lane*>(lanes[i]);
    Function()(typed);
  });
}

constexpr uint32_t kAllLanes = 0xffffffffu;
int lane();           // of this thread
uint32_t live_lanes();  // of its warp

// Barrier `id` of the block: `threads` of them, or with 0 all that have not ended. Returns the sum
// of `value` over the threads. With `waits` false the thread arrives and goes on.
int barrier(int id, int threads, int value, const char* what, Place place, bool waits = true);

// Copies in flight of this thread, in groups: they happen when waited for, until then the
// destination is poison.
void start_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t read, Place place);
void commit_copies();
void wait_copies(int pending);

}  // namespace emulate
