// SPDX-License-Identifier: Apache-2.0
// CUATTN_LOG=1: each new plan of a call that runs, once, on stderr. Next: plan_log.cpp.
#pragma once

#include <cstdlib>

#include "src/check/environment.h"

namespace cuattn {

struct AttentionCall;
struct PagedCall;
struct BackwardCall;

inline bool logs_plans() {
  static const bool enabled = is_on(std::getenv("CUATTN_LOG"));
  return enabled;
}

void log_plan(const AttentionCall& call);
void log_plan(const PagedCall& call);
void log_plan(const BackwardCall& call);

}  // namespace cuattn
