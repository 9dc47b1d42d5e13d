// SPDX-License-Identifier: Apache-2.0
// For kernels whose CTAs wait for each other: all but a few SMs kept busy, and repeats compared
// where they are. Next: stress.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace cuattn::test {

class HeldSms {
 public:
  // Returns once all SMs but `free` are held, each by a CTA that takes its shared memory.
  explicit HeldSms(int free);
  ~HeldSms();  // lets go of them; after 20 s they do so themselves
  HeldSms(const HeldSms&) = delete;
  // Waits for `stream`; false where its work did not end within 10 s and while the SMs were held.
  bool ends(cudaStream_t stream) const;

 private:
  struct Flags {
    unsigned all_came, released;
  };
  Flags* flags_ = nullptr;    // of the host, which the device reads and writes, too
  unsigned* came_ = nullptr;  // of the device: how many CTAs came
  cudaStream_t stream_ = nullptr;
};

// Adds to *count, on the device, how many of the 32-bit words of `x` and `y` differ.
void count_differences(const void* x, const void* y, size_t bytes, unsigned* count,
                       cudaStream_t stream);

}  // namespace cuattn::test
