// SPDX-License-Identifier: Apache-2.0
// Merging what a kernel left in parts, right behind it. launch_merge of launchers.h is the same for the
// parts of a caller.
#pragma once

#include <cuda_runtime.h>

#include "cuattn/params/merge.h"

namespace cuattn {

// Packed sequences of up to MergeParams::seqlen rows: those of a sequence alone are merged. The parts
// and the result have an axis of `total` rows in place of batch and seqlen. nullptr: there are none.
struct MergeSpans {
  const int32_t* cu_seqlens;  // [batch + 1]
  int64_t total;
};

// From compute capability 9.0 (`major`) on it starts while the kernel in front of it still runs, and
// waits for its parts.
void launch_merge_behind(const MergeParams& params, const MergeSpans& spans, int32_t major,
                         cudaStream_t stream);

}  // namespace cuattn
