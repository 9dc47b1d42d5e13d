// SPDX-License-Identifier: Apache-2.0
// The host's side of the persistent kernel. Memory order: what the host wrote before `posted` is
// seen by the step, what a step wrote is seen by who saw `done` (see cuda/paged/persistent.cu).
#include "src/paged/persistent.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <new>

#include "cuattn/tiles.h"
#include "src/check/arrays.h"

namespace cuattn {
namespace {

constexpr const char* kFunction = "PersistentDecode";
constexpr double kLongestIdle = 60.0;  // seconds

uint64_t load(uint64_t& word) {
  return std::atomic_ref<uint64_t>(word).load(std::memory_order_acquire);
}

void store(uint64_t& word, uint64_t value) {
  std::atomic_ref<uint64_t>(word).store(value, std::memory_order_release);
}

// nullptr where the kernel is compiled for the call.
const char* refusal(const PagedCall& call) {
  const PagedParams& p = call.params;
  if (!is_cuda(call.device)) return "it runs on CUDA arrays";
  if (p.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
  if (p.kv_dtype != p.dtype) return "it takes caches of the dtype of q";
  if (p.kv_layout == KvLayout::vllm) return "it takes the layouts 'nhd' and 'hnd'";
  if (paged_head_dim(p.head_dim) != 128) return "it takes head_dim 72 to 128";
  if (p.work.q_len * p.work.group > 8) return "it takes 8 queries times heads of a group at most";
  return nullptr;
}

}  // namespace

PagedCall prepare_persistent(const PagedArrays& arrays, const cuattn_paged_options& given) {
  CUATTN_REQUIRE(given.version == 0 && given.plan == nullptr, kFunction,
                 ": options must be those of paged_attention without a plan; leave plan NULL");
  cuattn_paged_options options = given;
  options.backend = "sm80";
  PagedCall call = validate_paged(arrays, options, true);
  call.function = kFunction;
  if (const char* why = refusal(call)) {
    fail<NotImplemented>(kFunction, ": no persistent kernel for this call: ", why,
                         "; use paged_attention");
  }
  const PagedWork& w = call.params.work;
  CUATTN_REQUIRE(w.num_seqs > 0 && w.q_len > 0 && w.num_heads_kv > 0 && w.group > 0, kFunction,
                 ": q must hold at least one sequence, query and head, got ", w.num_seqs, ", ",
                 w.q_len, " and ", call.params.num_heads_q, "; use paged_attention");
  DeviceInfo device = backend_of(kFunction, call.device).device_info(call.device.device_id, false);
  if (given.num_splits == 0) {  // one wave
    int32_t workers = device.num_sms * paged_sm80_tile(128, 2, KvLayout::nhd, 8).ctas_per_sm;
    int64_t units = int64_t{w.num_seqs} * w.num_heads_kv;
    call.request.num_splits = std::clamp(static_cast<int32_t>(workers / units), 1, kMaxSplits);
  }
  plan_paged(call, options, device);
  call.plan.workspace_bytes += static_cast<size_t>(persistent_queue_bytes(w));
  return call;
}

PersistentDecode::PersistentDecode(PagedCall call, const TensorView& out, const TensorView* lse,
                                   void* workspace, size_t workspace_bytes,
                                   const cuattn_persistent_options& options, Stream stream)
    : backend_(backend_of(kFunction, call.device)) {
  CUATTN_REQUIRE(options.struct_size == sizeof(options), kFunction,
                 ": options must be initialised by cuattn_persistent_options_init of this library "
                 "version, got struct_size ",
                 options.struct_size, ", want ", sizeof(options));
  CUATTN_REQUIRE(options.grow >= 0, kFunction, ": grow must be >= 0, got ", options.grow,
                 "; it is what each step adds to every context_lens");
  CUATTN_REQUIRE(options.idle_seconds > 0.0 && options.idle_seconds <= kLongestIdle, kFunction,
                 ": idle_seconds must be above 0 and at most ", kLongestIdle, ", got ",
                 options.idle_seconds, "; the kernel ends after so long without a step");
  bind_paged(call, out, lse, workspace, workspace_bytes, stream, options.grow > 0);
  void* memory = backend_.host_alloc(sizeof(PersistentMailbox));
  if (memory == nullptr) fail<OutOfMemory>(kFunction, ": no pinned host memory for the mailbox");
  mailbox_ = new (memory) PersistentMailbox{};
  PersistentParams s{};
  s.paged = call.params;
  s.context_lens = const_cast<int32_t*>(call.params.work.context_lens);
  s.grow = options.grow;
  s.idle_ns = static_cast<uint64_t>(std::ceil(options.idle_seconds * 1e9));
  size_t queue_bytes = static_cast<size_t>(persistent_queue_bytes(call.params.work));
  s.queue = reinterpret_cast<PersistentQueue*>(static_cast<char*>(workspace) +
                                               call.plan.workspace_bytes - queue_bytes);
  s.mailbox = mailbox_;
  try {
    launched_ = backend_.start_persistent(s, call.device.device_id, stream);
  } catch (...) {
    backend_.host_free(mailbox_);
    throw;
  }
}

PersistentDecode::~PersistentDecode() {
  stop();
  try {
    while (is_running()) {
    }
  } catch (const CudaError&) {  // it has failed, and so ended
  }
  backend_.host_free(mailbox_);
}

int64_t PersistentDecode::post(int64_t steps) {
  CUATTN_REQUIRE(steps >= 0 && steps <= INT64_MAX - 1 - posted_, kFunction,
                 ": steps must be >= 0, got ", steps, "; each runs the call once");
  CUATTN_REQUIRE(!stopped_ && load(mailbox_->ended) == PersistentMailbox::kRunning, kFunction,
                 ": the kernel ",
                 stopped_ ? "was stopped" : "ended without a step for idle_seconds",
                 " and takes no more steps; start another");
  posted_ += steps;
  store(mailbox_->posted, static_cast<uint64_t>(posted_));
  return posted_;
}

void PersistentDecode::stop() {
  stopped_ = true;
  store(mailbox_->posted, PersistentMailbox::kStop);
}

bool PersistentDecode::is_running() {
  if (launched_ == nullptr) return false;
  bool running;
  try {
    running = backend_.is_running(launched_);
  } catch (...) {
    launched_ = nullptr;
    throw;
  }
  if (!running) launched_ = nullptr;
  return running;
}

cuattn_persistent_state PersistentDecode::state_after_end(uint64_t step) const {
  if (load(mailbox_->done) >= step) return CUATTN_PERSISTENT_DONE;
  bool idle = load(mailbox_->ended) == PersistentMailbox::kIdle;
  return idle ? CUATTN_PERSISTENT_IDLE : CUATTN_PERSISTENT_STOPPED;
}

cuattn_persistent_state PersistentDecode::wait(int64_t step, double seconds) {
  CUATTN_REQUIRE(step >= 0 && step <= posted_, kFunction, ": step must be within the ", posted_,
                 " that were posted, got ", step, "; post it first");
  using Clock = std::chrono::steady_clock;
  constexpr auto kLook = std::chrono::milliseconds(1);  // a driver call: not in every round
  auto begin = Clock::now(), look = begin + kLook;
  for (;;) {
    if (load(mailbox_->done) >= static_cast<uint64_t>(step)) return CUATTN_PERSISTENT_DONE;
    auto now = Clock::now();
    if (now >= look || load(mailbox_->ended) != PersistentMailbox::kRunning) {
      look = now + kLook;
      if (!is_running()) return state_after_end(static_cast<uint64_t>(step));
    }
    if (std::chrono::duration<double>(now - begin).count() >= seconds)
      return CUATTN_PERSISTENT_RUNNING;
  }
}

}  // namespace cuattn
