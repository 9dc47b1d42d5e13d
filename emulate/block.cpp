// SPDX-License-Identifier: Apache-2.0
// One block at a time: its threads, who waits for whom, shared memory. Next: fiber.h.
#include <cuda_runtime.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulate/crash.h"
#include "emulate/fiber.h"
#include "emulate/runtime.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulate {
namespace {

constexpr uint32_t kArenaBytes = 1 << 20, kCanaryBytes = 4096;
constexpr int kPoison = 0xff;
constexpr int kMaxBarriers = 16;

struct Fault {};  // thrown by fail(), caught where the thread began

struct Copy {
  uint32_t to, bytes, read;
  const void* from;
  Place place;
};

enum class State { ready, waits, ended };

struct Thread {
  explicit Thread(size_t number) : fiber(number) {}

  Fiber fiber;
  uint3 index;
  State state;
  int result;        // of its last barrier
  const char* what;  // it waits at, and where
  Place place;
  std::vector<Copy> open;                // copies since the last commit
  std::deque<std::vector<Copy>> groups;  // committed
};

// Lanes that wait for the rest of one mask.
struct Meeting {
  uint32_t mask, arrived;
  const char* what;
  Place place;
  Complete complete;
  void* lanes[32];
};

struct Warp {
  uint32_t live;
  std::vector<Meeting> meetings;
};

struct Barrier {
  int arrived, threads, sum;  // threads: 0 is all that have not ended
  std::vector<int> waiting;
};

struct Variable {
  uint32_t begin, bytes;
};

std::string describe(Place place) {
  return place.file == nullptr
             ? ""
             : std::string(" at ") + place.file + ":" + std::to_string(place.line);
}

class Block {
 public:
  void run(const Config& config, uint3 index, void (*body)(const void*), const void* arguments) {
    begin(config, index, body, arguments);
    while (num_live_ > 0 && fault_.empty()) {
      bool moved = false;
      // The order of warps and lanes changes from pass to pass and from block to block, so that
      // what only works in one order is found.
      uint32_t order = random();
      for (int i = 0; i < num_warps() && fault_.empty(); ++i) {
        int warp = static_cast<int>((i + order / 2) % num_warps());
        while (fault_.empty() && run_warp(order & 1 ? num_warps() - 1 - warp : warp)) moved = true;
      }
      if (!moved && fault_.empty()) report_deadlock();
    }
    if (fault_.empty()) check_canary();
  }
  const std::string& fault() const { return fault_; }

  // Of the thread that runs.
  Thread& thread() { return *threads_[current_]; }
  Warp& warp() { return warps_[current_ / 32]; }
  int current() const { return current_; }
  bool is_running() const { return current_ >= 0; }
  void wait(const char* what, Place place) {
    Thread& self = thread();
    self.state = State::waits;
    self.what = what;
    self.place = place;
    self.fiber.switch_out();
  }
  void name_kernel(const char* name) { kernel_ = name; }

  void set_fault(const std::string& text, Place place) {
    fault_ = text + describe(place) + "; block (" + std::to_string(blockIdx.x) + ", " +
             std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) + ")";
    if (is_running()) fault_ += ", thread " + std::to_string(current_);
    fault_ += std::string(" of ") + kernel_;
  }

  void crash(const char* text) {
    set_fault(text, {nullptr, 0});
    current_ = -1;
  }

  void meet(uint32_t mask, const char* what, Place place, void* brought, Complete complete);
  void try_complete(Warp& warp, int first_lane);
  int arrive(int id, int threads, int value, const char* what, Place place, bool waits);
  void try_release(Barrier& barrier);

  // Shared memory.
  char* arena() { return arena_; }
  void* place_variable(const void* key, size_t bytes, size_t align);
  bool holds(uint32_t address, uint32_t bytes) const {
    if (address >= kDynamicBegin && address + bytes <= kDynamicBegin + smem_bytes_) return true;
    return address >= kStaticBegin && address + bytes <= kStaticBegin + static_bytes_;
  }

 private:
  int num_warps() const { return static_cast<int>(warps_.size()); }
  uint32_t random() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(random_ >> 40);
  }

  void begin(const Config& config, uint3 index, void (*body)(const void*), const void* arguments);
  bool run_warp(int warp);
  static void thread_main();
  void end_thread();
  void report_deadlock();
  void check_canary();

  std::vector<std::unique_ptr<Thread>> threads_;  // kept from block to block, for their stacks
  std::vector<Warp> warps_;
  std::array<Barrier, kMaxBarriers> barriers_;
  int num_threads_ = 0, num_live_ = 0, current_ = -1;
  void (*body_)(const void*) = nullptr;
  const void* arguments_ = nullptr;
  const char* kernel_ = "a kernel";
  std::string fault_;
  uint64_t random_ = 0;
  char* arena_ = static_cast<char*>(
      mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  uint32_t smem_bytes_ = 0, static_bytes_ = kStaticBytes;
  std::map<const void*, Variable> variables_;
};

Block& block() {
  static Block* one = new Block;  // never destroyed: threads of the process may still run
  return *one;
}

void Block::begin(const Config& config, uint3 index, void (*body)(const void*),
                  const void* arguments) {
  num_threads_ = num_live_ = static_cast<int>(config.block.count());
  body_ = body;
  arguments_ = arguments;
  fault_.clear();
  blockIdx = index;
  random_ = (uint64_t{index.x} << 32) + index.y * 65537u + index.z;
  while (static_cast<int>(threads_.size()) < num_threads_)
    threads_.push_back(std::make_unique<Thread>(threads_.size()));
  warps_.assign(static_cast<size_t>(num_threads_ + 31) / 32, {});
  for (int i = 0; i < num_threads_; ++i) {
    Thread& thread = *threads_[i];
    auto n = static_cast<unsigned>(i);
    thread.index = {n % config.block.x, n / config.block.x % config.block.y,
                    n / config.block.x / config.block.y};
    thread.state = State::ready;
    thread.open.clear();
    thread.groups.clear();
    thread.fiber.begin(thread_main);
    warps_[i / 32].live |= 1u << i % 32;
  }
  for (Barrier& barrier : barriers_) barrier = {0, 0, 0, {}};
  std::memset(arena_ + kDynamicBegin, kPoison, smem_bytes_ + kCanaryBytes);  // of the last block
  std::memset(arena_ + kStaticBegin, kPoison, static_bytes_ + kCanaryBytes);
  smem_bytes_ = static_cast<uint32_t>(config.smem_bytes);
  std::memset(arena_ + kDynamicBegin, kPoison, smem_bytes_ + kCanaryBytes);
  static_bytes_ = 0;
  variables_.clear();
}

// Runs the lanes that can; whether there was one.
bool Block::run_warp(int warp) {
  bool moved = false, backward = random() & 1;
  int first = 32 * warp, count = std::min(32, num_threads_ - first);
  for (int i = 0; i < count && fault_.empty(); ++i) {
    current_ = first + (backward ? count - 1 - i : i);
    if (thread().state != State::ready) continue;
    moved = true;
    threadIdx = thread().index;
    thread().fiber.switch_in();
  }
  current_ = -1;
  return moved;
}

void Block::thread_main() {
  Block& self = block();
  try {
    self.body_(self.arguments_);
    self.end_thread();
  } catch (const Fault&) {
  }
  self.thread().state = State::ended;
  self.thread().fiber.switch_out();
}

// Those who wait for this thread need not any more.
void Block::end_thread() {
  --num_live_;
  warp().live &= ~(1u << current_ % 32);
  try_complete(warp(), current_ / 32 * 32);
  for (Barrier& barrier : barriers_) try_release(barrier);
}

// Within its only caller: after a switch, each return is one that the processor has not foreseen.
[[gnu::always_inline]] inline void Block::meet(uint32_t mask, const char* what, Place place,
                                               void* brought, Complete complete) {
  uint32_t bit = 1u << current_ % 32;
  if ((mask & bit) == 0)
    fail((std::string(what) + " by a lane that is not in its mask").c_str(), place);
  Warp& mine = warp();
  Meeting* meeting = nullptr;
  for (Meeting& other : mine.meetings) {
    if (other.mask == mask) meeting = &other;
  }
  if (meeting == nullptr) {
    mine.meetings.push_back({mask, 0, what, place, complete, {}});
    meeting = &mine.meetings.back();
  }
  bool is_same = meeting->what == what || std::strcmp(meeting->what, what) == 0;
  if (!is_same || meeting->place.line != place.line || meeting->complete != complete) {
    std::string text = std::string("the lanes of a warp part: some are at ") + meeting->what +
                       describe(meeting->place) + ", this one at " + what;
    fail(text.c_str(), place);
  }
  meeting->arrived |= bit;
  meeting->lanes[current_ % 32] = brought;
  thread().state = State::waits;
  if ((mask & mine.live & ~meeting->arrived) == 0) try_complete(mine, current_ / 32 * 32);
  if (thread().state == State::waits) wait(what, place);
}

void Block::try_complete(Warp& warp, int first_lane) {
  for (size_t i = 0; i < warp.meetings.size();) {
    const Meeting& waiting = warp.meetings[i];
    if (waiting.arrived == 0 || (waiting.mask & warp.live & ~waiting.arrived) != 0) {
      ++i;
      continue;
    }
    Meeting meeting = waiting;
    warp.meetings.erase(warp.meetings.begin() + static_cast<std::ptrdiff_t>(i));
    if (meeting.what[0] == 'm' || meeting.what[0] == 'l') {  // mma, ldmatrix, movmatrix: .aligned
      if (meeting.arrived != kAllLanes) {
        fail((std::string(meeting.what) + " without all 32 lanes of the warp").c_str(),
             meeting.place);
      }
    }
    meeting.complete(meeting.lanes);
    for (int at = 0; at < 32; ++at) {
      if (meeting.arrived >> at & 1) threads_[first_lane + at]->state = State::ready;
    }
  }
}

int Block::arrive(int id, int threads, int value, const char* what, Place place, bool waits) {
  if (id < 0 || id >= kMaxBarriers) fail("a block has barriers 0 to 15", place);
  if (threads % 32 != 0 || threads > num_threads_)
    fail("a barrier takes whole warps, no more than the block has", place);
  Barrier& barrier = barriers_[id];
  if (barrier.arrived > 0 && barrier.threads != threads)
    fail("threads arrive at one barrier with different counts", place);
  barrier.threads = threads;
  ++barrier.arrived;
  barrier.sum += value;
  if (!waits) {
    try_release(barrier);
    return 0;
  }
  barrier.waiting.push_back(current_);
  Thread& self = thread();
  self.state = State::waits;
  try_release(barrier);
  if (self.state == State::waits) wait(what, place);
  return self.result;
}

void Block::try_release(Barrier& barrier) {
  int needed = barrier.threads > 0 ? barrier.threads : num_live_;
  if (barrier.arrived == 0 || barrier.arrived < needed) return;
  for (int waiting : barrier.waiting) {
    threads_[waiting]->result = barrier.sum;
    threads_[waiting]->state = State::ready;
  }
  barrier = {0, 0, 0, {}};
}

// Neighbours that wait at one place are one entry.
void Block::report_deadlock() {
  std::string text = "deadlock:";
  const char* mark = " threads ";
  for (int i = 0; i < num_threads_;) {
    const Thread& first = *threads_[i];
    int end = i + 1;
    auto same = [&](const Thread& other) {
      return other.state == first.state &&
             (first.state == State::ended ||
              (other.place.line == first.place.line && std::strcmp(other.what, first.what) == 0));
    };
    while (end < num_threads_ && same(*threads_[end])) ++end;
    text += mark + std::to_string(i) + "-" + std::to_string(end - 1);
    text += first.state == State::ended
                ? " have ended"
                : std::string(" wait at ") + first.what + describe(first.place);
    mark = ", threads ";
    i = end;
    if (text.size() > 1500) break;
  }
  set_fault(text, {nullptr, 0});
}

void Block::check_canary() {
  auto check = [&](uint32_t begin, const char* what) {
    const char* bytes = arena_ + begin;  // all alike, mostly
    if (static_cast<unsigned char>(bytes[0]) == kPoison &&
        std::memcmp(bytes, bytes + 1, kCanaryBytes - 1) == 0)
      return;
    for (uint32_t i = 0; i < kCanaryBytes; ++i) {
      if (static_cast<unsigned char>(arena_[begin + i]) != kPoison && fault_.empty()) {
        set_fault(std::string("bytes beyond ") + what + " shared memory were written, " +
                      std::to_string(i) + " behind its end",
                  {nullptr, 0});
      }
    }
  };
  check(kDynamicBegin + smem_bytes_, "dynamic");
  check(kStaticBegin + static_bytes_, "static");
}

void* Block::place_variable(const void* key, size_t bytes, size_t align) {
  auto [found, is_new] = variables_.try_emplace(key);
  if (is_new) {
    auto begin = static_cast<uint32_t>((static_bytes_ + align - 1) / align * align);
    found->second = {begin, static_cast<uint32_t>(bytes)};
    static_bytes_ = begin + static_cast<uint32_t>(bytes);
    if (static_bytes_ > kStaticBytes) fail("shared variables take more than 48 KB");
  }
  return arena_ + kStaticBegin + found->second.begin;
}

// A signal in a kernel ends its launch as a broken rule does.
bool crash(const char* text) {
  if (!block().is_running()) return false;
  block().crash(text);
  return true;
}

}  // namespace

void run_grid(const Config& config, const void* kernel, void (*body)(const void*),
              const void* arguments) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  uint64_t threads = config.block.count();
  if (threads == 0 || threads > 1024 || config.grid.count() == 0 || config.grid.y > 65535 ||
      config.grid.z > 65535 || config.grid.x > 0x7fffffff) {
    return set_error(cudaErrorInvalidConfiguration, "a grid or block that no device takes");
  }
  if (config.smem_bytes > allowed_shared_memory(kernel)) {
    return set_error(cudaErrorInvalidValue,
                     "more dynamic shared memory than cudaFuncSetAttribute has allowed");
  }
  gridDim = config.grid;
  blockDim = config.block;
  CrashReport report(crash);
  if (sigsetjmp(CrashReport::end, 1) != 0)
    return set_error(cudaErrorLaunchFailure, block().fault());
  for (unsigned z = 0; z < gridDim.z; ++z) {
    for (unsigned y = 0; y < gridDim.y; ++y) {
      for (unsigned x = 0; x < gridDim.x; ++x) {
        block().run(config, {x, y, z}, body, arguments);
        if (!block().fault().empty()) return set_error(cudaErrorLaunchFailure, block().fault());
      }
    }
  }
}

void enter(const char* kernel) { block().name_kernel(kernel); }

void fail(const char* text, Place place) {
  if (!block().is_running()) {
    std::fprintf(stderr, "emulate: %s, outside of a kernel\n", text);
    std::abort();
  }
  block().set_fault(text, place);
  throw Fault{};
}

void* place_shared(const void* key, size_t bytes, size_t align) {
  return block().place_variable(key, bytes, align);
}

void* dynamic_place(size_t align) {
  if (align > kDynamicBegin) fail("dynamic shared memory is aligned to 1024 bytes at most");
  return block().arena() + kDynamicBegin;
}

void* at_shared(uint32_t address, uint32_t bytes, const char* what, Place place) {
  if (!block().holds(address, bytes))
    fail((std::string(what) + " beyond the block's shared memory").c_str(), place);
  if (address % bytes != 0)
    fail((std::string(what) + " at an address that is not aligned to its size").c_str(), place);
  return block().arena() + address;
}

uint32_t shared_address(const void* pointer) {
  auto offset = static_cast<const char*>(pointer) - block().arena();
  if (offset < 0 || offset >= kArenaBytes)
    fail("the shared address of a pointer that is not shared");
  return static_cast<uint32_t>(offset);
}

void meet(uint32_t mask, const char* what, Place place, void* brought, Complete complete) {
  block().meet(mask, what, place, brought, complete);
}

int lane() { return block().current() % 32; }
uint32_t live_lanes() { return block().warp().live; }

int barrier(int id, int threads, int value, const char* what, Place place, bool waits) {
  return block().arrive(id, threads, value, what, place, waits);
}

void start_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t read, Place place) {
  void* place_of = at_shared(to, bytes, "cp.async", place);
  if (read > 0 && reinterpret_cast<uintptr_t>(from) % bytes != 0)
    fail("cp.async from an address that is not aligned to its size", place);
  std::memset(place_of, kPoison, bytes);
  block().thread().open.push_back({to, bytes, read, from, place});
}

void commit_copies() {
  Thread& self = block().thread();
  self.groups.push_back(std::move(self.open));
  self.open.clear();
}

void wait_copies(int pending) {
  Thread& self = block().thread();
  if (pending < 0) commit_copies(), pending = 0;
  while (self.groups.size() > static_cast<size_t>(pending)) {
    for (const Copy& copy : self.groups.front()) {
      char* to = block().arena() + copy.to;
      if (copy.read > 0) std::memcpy(to, copy.from, copy.read);
      std::memset(to + copy.read, 0, copy.bytes - copy.read);
    }
    self.groups.pop_front();
  }
}

}  // namespace emulate
