// SPDX-License-Identifier: Apache-2.0
// What the persistent kernel of paged attention and its host share. Next: src/paged/persistent.cpp
// (the host's side), cuda/paged/persistent.cu (the device's, and how the two talk).
#pragma once

#include "cuattn/params/paged.h"

namespace cuattn {

// In pinned host memory. Who writes a word is the only one who does.
struct PersistentMailbox {
  static constexpr uint64_t kStop = ~uint64_t{0};
  enum Ended : uint64_t { kRunning = 0, kStopped = 1, kIdle = 2 };

  alignas(128) uint64_t posted;  // host: steps that may run; kStop: leave before the next
  alignas(128) uint64_t done;    // device: steps whose results are written
  alignas(128) uint64_t ended;   // device: why it takes no more steps
};

// In device memory, zero at the launch; a word that all poll shares no line with one that all add
// to. Behind it stands one uint32_t for each unit: parts of the current step that are done.
struct PersistentQueue {
  static constexpr uint64_t kEnd = ~uint64_t{0};

  alignas(128) uint64_t taken;      // items, of all steps
  alignas(128) uint64_t finished;   // items, of all steps
  alignas(128) uint64_t completed;  // steps whose items are all finished
  alignas(128) uint64_t opened;     // steps that may be worked on; kEnd: none any more
};

struct PersistentParams {
  PagedParams paged;      // num_splits >= 1: an item is one split of one unit
  int32_t* context_lens;  // paged.work.context_lens, where steps grow them
  int32_t grow;           // tokens that each step adds to every context before it attends
  uint64_t idle_ns;       // without a step for so long, the kernel ends
  PersistentQueue* queue;
  PersistentMailbox* mailbox;
};

inline int64_t persistent_queue_bytes(const PagedWork& w) {
  return static_cast<int64_t>(sizeof(PersistentQueue)) +
         int64_t{w.num_seqs} * head_groups(w) * static_cast<int64_t>(sizeof(uint32_t));
}

}  // namespace cuattn
