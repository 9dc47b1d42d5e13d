// SPDX-License-Identifier: Apache-2.0
// How a tile of Q comes to shared memory: a box of the TMA for each panel of 64 columns. Next:
// producer.cuh, rotate.cuh.
#pragma once

#include "cuda/attention/sm90/schedule.cuh"

namespace cuattn {

// Kernel: a ForwardSm90. `full`: the barrier that the bytes are announced to.
template <class Kernel>
__device__ __forceinline__ void load_sm90_queries(const AttentionParams& p, const Sm90Schedule& s,
                                                  const Sm90Maps& maps,
                                                  const typename Kernel::Shared& shared,
                                                  const Sm90Work& w, int stage, uint32_t full) {
  constexpr int kPanelBytes = Kernel::kTile.m * 128;
  const int32_t packed = Kernel::Asked::kGiven ? 1 : s.packed;
  device::barrier_arrive_expect(full, Kernel::kQBytes);
#pragma unroll
  for (int panel = 0; panel < Kernel::kPanelsQk; ++panel) {
    device::tma_load(shared.q + stage * Kernel::kQBytes + panel * kPanelBytes, &maps.q, full,
                     panel * 64, 0, w.queries.start + w.row0 / packed, w.head,
                     p.cu_seqlens_q ? 0 : w.batch, device::kEvictFirst);
  }
}

}  // namespace cuattn
