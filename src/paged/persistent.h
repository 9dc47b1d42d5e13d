// SPDX-License-Identifier: Apache-2.0
// Paged attention by a kernel that stays on the device, from the host's side: one launch, then
// steps posted and awaited through pinned memory. How the two talk: cuda/paged/persistent.cu.
#pragma once

#include "cuattn/params/persistent.h"
#include "src/paged/call.h"

namespace cuattn {

// validate_paged and plan_paged for it; the workspace holds the queue, too.
PagedCall prepare_persistent(const PagedArrays& arrays, const cuattn_paged_options& options);

// Not for use by two threads at once.
class PersistentDecode {
 public:
  // Launches on `stream`. All memory of the call must live until the kernel has ended.
  PersistentDecode(PagedCall call, const TensorView& out, const TensorView* lse, void* workspace,
                   size_t workspace_bytes, const cuattn_persistent_options& options, Stream stream);
  PersistentDecode(const PersistentDecode&) = delete;
  ~PersistentDecode();  // stops and waits for the end

  int64_t post(int64_t steps);  // returns how many have been posted in all
  cuattn_persistent_state wait(int64_t step, double seconds);
  void stop();  // before the next step; does not wait

 private:
  bool is_running();
  cuattn_persistent_state state_after_end(uint64_t step) const;

  const Backend& backend_;
  PersistentMailbox* mailbox_ = nullptr;
  void* launched_ = nullptr;  // nullptr: has ended
  int64_t posted_ = 0;
  bool stopped_ = false;
};

}  // namespace cuattn
