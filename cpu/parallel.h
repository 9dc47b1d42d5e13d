// SPDX-License-Identifier: Apache-2.0
// parallel_for over a pool of std::thread, shared by every CPU kernel.
// Why not OpenMP: a wheel would carry a second OpenMP runtime beside torch's, and the two fight for
// the cores.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace cuattn::cpu {

// Threads of a region, the caller included: CUATTN_NUM_THREADS, else the CPUs that the affinity
// mask and the cgroups' quotas grant.
int32_t num_threads();

// Below this much work waking a second thread costs more than it brings.
constexpr double kSerialFlops = 1e6;

using RegionBody = void (*)(void* context, int64_t index);

// Calls body(context, i) once for each i in [0, count), in any order and on any thread; returns
// when all are done. `flops` is an estimate of the whole. The first exception that a body throws is
// rethrown here, and indices not yet begun are dropped. Safe to call from several threads at once
// and from within a body: then the indices run on the calling thread.
void run_region(int64_t count, double flops, RegionBody body, void* context);

template <class Body>
void parallel_for(int64_t count, double flops, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  run_region(
      count, flops, [](void* context, int64_t index) { (*static_cast<Plain*>(context))(index); },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace cuattn::cpu
