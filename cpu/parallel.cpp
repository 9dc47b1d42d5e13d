// SPDX-License-Identifier: Apache-2.0
// The thread pool behind parallel_for: workers join an open region, take indices from one atomic
// counter, and leave. A worker that sleeps is never waited for: a region ends when its indices are
// taken and those inside have left. Next: flash_units.cpp.
#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/cgroup.h"
#include "cuattn/error.h"

namespace cuattn::cpu {
namespace {

// 10 to 40 us: longer than the gap between two calls of a model, far shorter than a scheduler's
// slice.
constexpr int32_t kSpins = 1000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr long kMostThreads = 1024;

int32_t usable_cpus() {
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) return CPU_COUNT(&mask);
  unsigned hardware = std::thread::hardware_concurrency();
  return hardware > 0 ? static_cast<int32_t>(hardware) : 1;
}

int32_t count_threads() {
  const char* text = std::getenv("CUATTN_NUM_THREADS");
  if (text == nullptr || *text == '\0') return std::min(usable_cpus(), cgroup_cpus());
  char* end = nullptr;
  long wanted = std::strtol(text, &end, 10);
  CUATTN_REQUIRE(*end == '\0' && wanted >= 1 && wanted <= kMostThreads,
                 "CUATTN_NUM_THREADS must be a whole number from 1 to ", kMostThreads, ", got '",
                 text, "'; leave it unset for the CPUs that this process may use");
  return static_cast<int32_t>(wanted);
}

thread_local bool inside_region = false;  // nobody may try to lock what he has locked

class Pool {
 public:
  explicit Pool(int32_t threads) {
    try {
      for (int32_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      // The system grants no more threads; those that started, or the caller alone, do the work.
    }
  }

  // Runs the region, or returns false when another thread's region holds the pool.
  bool run(int64_t count, RegionBody body, void* context) {
    std::unique_lock<std::mutex> owner(busy_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    body_ = body;
    context_ = context;
    count_ = count;
    failed_.store(false, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    open();
    take_indices();
    close();
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
    return true;
  }

  void stop() {
    {
      std::lock_guard<std::mutex> guard(sleep_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

 private:
  void open() {
    epoch_.fetch_add(1);
    if (sleepers_.load() == 0) return;
    {
      std::lock_guard<std::mutex> guard(sleep_);
    }  // whoever counted itself is now asleep, or has seen the new epoch
    wake_.notify_all();
  }

  // A worker adds itself to inside_ and then reads epoch_; we change epoch_ and then read inside_.
  // All four are sequentially consistent, so one sees the other, and no worker touches the region
  // after this returns.
  void close() {
    epoch_.fetch_add(1);
    for (int32_t spin = 0; inside_.load() != 0; ++spin) {
      if (spin < kSpins) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

  void take_indices() {
    inside_region = true;
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
      if (failed_.load(std::memory_order_relaxed)) break;
      try {
        body_(context_, i);
      } catch (...) {
        if (!failed_.exchange(true)) error_ = std::current_exception();
      }
    }
    inside_region = false;
  }

  void work() {
    uint64_t last = 0;  // the epoch this worker took part in
    auto is_new = [&](uint64_t epoch) { return epoch % 2 == 1 && epoch != last; };
    for (;;) {
      for (int32_t spin = 0; spin < kSpins && !is_new(epoch_.load()); ++spin) pause();
      if (!is_new(epoch_.load())) {
        std::unique_lock<std::mutex> guard(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(guard, [&] { return is_new(epoch_.load()) || stopping_.load(); });
        sleepers_.fetch_sub(1);
      }
      if (stopping_.load()) return;
      inside_.fetch_add(1);
      uint64_t epoch = epoch_.load();
      if (is_new(epoch)) {
        last = epoch;
        take_indices();
      }
      inside_.fetch_sub(1);
    }
  }

  std::mutex busy_;  // held by the thread whose region runs
  RegionBody body_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  std::exception_ptr error_;

  // A line each: waiting workers read epoch_ while the others count in next_.
  alignas(64) std::atomic<uint64_t> epoch_{0};  // odd while a region is open
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int32_t> inside_{0};  // workers that may touch the region
  std::atomic<bool> failed_{false};
  std::atomic<bool> stopping_{false};

  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int32_t> sleepers_{0};

  std::vector<std::thread> workers_;  // last: they use all of the above
};

std::atomic<Pool*> current_pool{nullptr};

// A forked child has the pool's memory but none of its threads: it leaves that pool alone and makes
// its own.
void forget_pool() {
  current_pool.store(nullptr);
  inside_region = false;
}

// As the library is loaded: no thread can be in the middle of it when another forks.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, forget_pool);

Pool& pool() {
  Pool* found = current_pool.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  Pool* made = new Pool(num_threads());
  if (current_pool.compare_exchange_strong(found, made)) return *made;
  made->stop();
  delete made;
  return *found;
}

// Joins the workers when the library is unloaded. The pool itself is not freed: a thread that is
// still calling finds it intact and runs alone.
struct StopAtExit {
  ~StopAtExit() {
    if (Pool* left = current_pool.load()) left->stop();
  }
} stop_at_exit;

}  // namespace

// Note: two threads may both count. The guard of a static, held by a thread that a fork leaves
// behind, would hang the child.
int32_t num_threads() {
  static std::atomic<int32_t> known{0};
  int32_t threads = known.load(std::memory_order_relaxed);
  if (threads == 0) {
    threads = count_threads();
    known.store(threads, std::memory_order_relaxed);
  }
  return threads;
}

void run_region(int64_t count, double flops, RegionBody body, void* context) {
  if (count > 1 && flops >= kSerialFlops && num_threads() > 1 && !inside_region &&
      pool().run(count, body, context)) {
    return;
  }
  for (int64_t i = 0; i < count; ++i) body(context, i);
}

}  // namespace cuattn::cpu
