// SPDX-License-Identifier: Apache-2.0
// sample and speculative_verify: numbers and arrays of their options. Next: cuda/fused/sample.cu.
#include <cmath>

#include "src/check/arrays.h"
#include "src/check/overlap.h"
#include "src/fused/fused.h"
#include "src/options.h"

namespace cuattn {
namespace {

// The options of a call, each a number or an array, and the memory that they lie in.
struct OptionReader {
  const char* fn;
  int64_t rows;
  DLDevice device;
  const char* like;
  CallMemory& memory;

  // `tensor` NULL: the number, which `fits` or is refused.
  template <class T>
  PerRow<T> read(const char* name, double number, const DLTensor* tensor, DType dtype, bool fits,
                 const char* rule, bool or_one = false) const {
    if (tensor == nullptr) {
      CUATTN_REQUIRE(fits, fn, ": ", name, " must be ", rule, ", got ", number,
                     "; pass another number, or an array with one for each row");
      return {static_cast<T>(number), nullptr, 0};
    }
    TensorView view = view_of(fn, name, tensor);
    require_dtype(fn, name, view, dtype);
    require_device(fn, name, view, device, like);
    bool one = or_one && view.size() == 1 && view.ndim <= 1;
    CUATTN_REQUIRE(one || (view.ndim == 1 && view.shape[0] == rows), fn, ": ", name,
                   " must have shape (", rows, ",), one for each row",
                   or_one ? ", or one element" : "", ", got ", shape_text(view), "; repeat it");
    require_strided(fn, name, view, false, true);
    memory.reads({name, view});
    return {T{}, static_cast<const T*>(view.data), one ? 0 : stride_of(view, 0)};
  }
  // Seeds have more digits than a double.
  PerRow<int64_t> read_int64(const char* name, int64_t number, const DLTensor* tensor,
                             const char* rule, bool or_one) const {
    auto value = read<int64_t>(name, static_cast<double>(number), tensor, DType::i64, number >= 0,
                               rule, or_one);
    if (tensor == nullptr) value.number = number;
    return value;
  }
  RandomParams random(const cuattn_sample_options& o) const {
    return {read_int64("seed", o.seed, o.seeds, "given, an integer from 0 on", false),
            read_int64("offset", o.offset, o.offsets, "an integer from 0 on", true)};
  }
};

int64_t checked_vocabulary(const char* fn, const char* name, int64_t vocabulary) {
  CUATTN_REQUIRE(vocabulary >= 1 && vocabulary <= kMaxVocabulary, fn, ": ", name,
                 " must have a vocabulary of 1 to ", kMaxVocabulary, " on its last axis, got ",
                 vocabulary, "; cut it");
  return vocabulary;
}

// float32 [rows, tokens, vocabulary].
const float* read_probabilities(const char* fn, const char* name, const TensorView& view,
                                DLDevice device) {
  require_rank(fn, name, view, 3, "[rows, tokens, vocabulary]");
  require_dtype(fn, name, view, DType::f32);
  require_device(fn, name, view, device, "target_probs");
  require_last_axis(fn, name, view);
  require_strided(fn, name, view, false, true);
  return static_cast<const float*>(view.data);
}

// int32, of `shape`; the last axis is contiguous.
int32_t* read_tokens(const char* fn, const char* name, const TensorView& view,
                     std::initializer_list<int64_t> shape, DLDevice device, bool output) {
  TensorView wanted = shape_view(shape.begin(), static_cast<int32_t>(shape.size()));
  require_output(fn, name, view, DType::i32, wanted, device);
  if (shape.size() > 1) require_last_axis(fn, name, view);
  require_strided(fn, name, view, output, true);
  return static_cast<int32_t*>(view.data);
}

}  // namespace

void sample(const TensorView& logits, const cuattn_sample_options& o, const TensorView& out,
            Stream stream) {
  const char* fn = "sample";
  SampleParams p{};
  require_nothing_reserved(fn, o.reserved);
  DLDevice device = logits.device;
  require_known_device(fn, "logits", device);
  p.dtype = attention_dtype(fn, "logits", logits);
  require_rank(fn, "logits", logits, 2, "[rows, vocabulary]");
  require_last_axis(fn, "logits", logits);
  require_strided(fn, "logits", logits, false, true);
  p.rows = logits.shape[0];
  p.vocabulary = checked_vocabulary(fn, "logits", logits.shape[1]);
  p.logits = logits.data;
  p.stride = stride_of(logits, 0);
  p.out = read_tokens(fn, "out", out, {p.rows}, device, true);
  p.out_stride = stride_of(out, 0);
  CallMemory memory(fn);
  memory.writes({"out", out});
  memory.reads({"logits", logits});
  OptionReader read{fn, p.rows, device, "logits", memory};
  p.temperature =
      read.read<float>("temperature", o.temperature, o.temperatures, DType::f32,
                       o.temperature >= 0.0 && std::isfinite(static_cast<float>(o.temperature)),
                       "finite and not negative");
  p.top_k = read.read<int32_t>("top_k", static_cast<double>(o.top_k), o.top_ks, DType::i32,
                               o.top_k >= 0 && o.top_k <= INT32_MAX,
                               "from 1 to 2147483647, or 0 for none");
  p.top_p = read.read<float>("top_p", o.top_p, o.top_ps, DType::f32,
                             o.top_p > 0.0 && o.top_p <= 1.0, "above 0 and at most 1");
  p.min_p = read.read<float>("min_p", o.min_p, o.min_ps, DType::f32,
                             o.min_p >= 0.0 && o.min_p <= 1.0, "from 0 to 1");
  p.joint = o.joint != 0;
  p.random = read.random(o);
  const Backend& backend = backend_of(fn, device);
  if (p.rows > 0) backend.sample(p, device.device_id, stream);
}

void verify(const TensorView& draft, const TensorView& target, const TensorView& draft_tokens,
            const cuattn_sample_options& o, const TensorView& tokens, const TensorView& accepted,
            Stream stream) {
  const char* fn = "speculative_verify";
  VerifyParams p{};
  require_nothing_reserved(fn, o.reserved);
  DLDevice device = target.device;
  require_known_device(fn, "target_probs", device);
  p.target = read_probabilities(fn, "target_probs", target, device);
  p.draft = read_probabilities(fn, "draft_probs", draft, device);
  p.rows = target.shape[0];
  p.vocabulary = checked_vocabulary(fn, "target_probs", target.shape[2]);
  p.drafts = checked_extent(fn, "draft_probs", "tokens", draft.shape[1]);
  require_extent(fn, "draft_probs", "rows", draft.shape[0], p.rows, "target_probs");
  require_extent(fn, "draft_probs", "vocabulary", draft.shape[2], p.vocabulary, "target_probs");
  CUATTN_REQUIRE(target.shape[1] == draft.shape[1] + 1, fn,
                 ": target_probs must have one token more than draft_probs, ", draft.shape[1] + 1,
                 ", got ", target.shape[1], "; the last is for when all are accepted");
  p.target_stride_row = stride_of(target, 0);
  p.target_stride_token = stride_of(target, 1);
  p.draft_stride_row = stride_of(draft, 0);
  p.draft_stride_token = stride_of(draft, 1);
  p.draft_tokens = read_tokens(fn, "draft_tokens", draft_tokens, {p.rows, p.drafts}, device, false);
  p.tokens_stride = stride_of(draft_tokens, 0);
  p.tokens = read_tokens(fn, "out", tokens, {p.rows, int64_t{p.drafts} + 1}, device, true);
  p.accepted = read_tokens(fn, "accepted_out", accepted, {p.rows}, device, true);
  p.out_stride = stride_of(tokens, 0);
  p.accepted_stride = stride_of(accepted, 0);
  CallMemory memory(fn);
  memory.writes({"out", tokens});
  memory.writes({"accepted_out", accepted});
  memory.reads({"draft_probs", draft});
  memory.reads({"target_probs", target});
  memory.reads({"draft_tokens", draft_tokens});
  p.random = OptionReader{fn, p.rows, device, "target_probs", memory}.random(o);
  const Backend& backend = backend_of(fn, device);
  if (is_cpu(device)) {
    for (int64_t i = 0; i < p.rows * p.drafts; ++i) {
      int32_t token = p.draft_tokens[i / p.drafts * p.tokens_stride + i % p.drafts];
      CUATTN_REQUIRE(token >= 0 && token < p.vocabulary, fn, ": draft_tokens must lie within [0, ",
                     p.vocabulary, "), got ", token, " at (", i / p.drafts, ", ", i % p.drafts,
                     "); they are what draft_probs gave");
    }
  }
  if (p.rows > 0) backend.verify(p, device.device_id, stream);
}

}  // namespace cuattn
