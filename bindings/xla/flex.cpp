// SPDX-License-Identifier: Apache-2.0
// flex_attention and its backward pass as XLA custom calls. Row ranges, lists and captured arrays
// are arguments; what the host reads (numbers, programs) is text. Python face:
// python/cuattn/jax/flex_ops.py.
#include <charconv>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "bindings/xla/backward.h"
#include "bindings/xla/call.h"
#include "bindings/xla/ffi.h"
#include "bindings/xla/functors.h"
#include "bindings/xla/options.h"

namespace cuattn::bindings::xla {
namespace {

std::mutex names_mutex;
std::map<std::string, int64_t>& functor_names() {  // never destroyed: XLA's threads may outlive it
  static auto* names = new std::map<std::string, int64_t>;
  return *names;
}

int64_t functor_named(const std::string& name) {
  std::lock_guard<std::mutex> lock(names_mutex);
  auto found = functor_names().find(name);
  if (found != functor_names().end()) return found->second;
  throw Failure{ErrorCode::unimplemented,
                "flex_attention: this program was traced in another process, whose compiled masks "
                "and scores are not here; trace it in this one, as jax.export does not carry them"};
}

// Whole numbers of text, such as "3,-1".
std::vector<int32_t> numbers_of(const CallFrame& frame, const char* name) {
  std::string all = text(frame, name);
  std::vector<int32_t> numbers;
  const char *at = all.data(), *end = at + all.size();
  while (at < end) {
    auto [next, error] = std::from_chars(at, end, numbers.emplace_back());
    if (error != std::errc() || (next < end && *next != ','))
      refuse_version(concat("attribute ", name, " of the XLA call holds no whole numbers"));
    at = next + (next < end ? 1 : 0);
  }
  return numbers;
}

// The same as an array of host memory, with rows of `columns` where there are some.
struct HostArray {
  std::vector<int32_t> values;
  TensorView view;
  DLTensor dl;

  // nullptr where the text is empty.
  const DLTensor* read(const CallFrame& frame, const char* name, int64_t columns = 0) {
    values = numbers_of(frame, name);
    if (values.empty()) return nullptr;
    int64_t count = static_cast<int64_t>(values.size());
    view = columns == 0 ? TensorView(values.data(), DType::i32, {count})
                        : TensorView(values.data(), DType::i32, {count / columns, columns});
    dl = view.dl();
    return &dl;
  }
};

constexpr const DLTensor* cuattn_flex_options::* kFlexArrays[] = {
    &cuattn_flex_options::row_begin, &cuattn_flex_options::row_end,
    &cuattn_flex_options::block_starts, &cuattn_flex_options::block_entries};

// What a mask and a score function became. The arguments from `first` on are those of
// `flex_present` and the captured arrays.
struct Functions {
  cuattn_flex_options options;
  std::vector<const DLTensor*> captured, gradients;

  Functions(const CallFrame& frame, Platform platform, const Place& place, int64_t first)
      : arguments_(frame, place.device, first) {
    if ((integer(frame, "on_cuda") != 0) != (platform == Platform::cuda)) {
      throw Failure{ErrorCode::unimplemented,
                    "flex_attention: the call was traced for another platform than it runs on; "
                    "trace it under jax.default_device of the arrays' device"};
    }
    cuattn_flex_options_init(&options, sizeof options);
    arguments_.optional(integer(frame, "flex_present"), options, kFlexArrays);
    for (int64_t i = integer(frame, "num_arrays"); i > 0; --i)
      captured.push_back(arguments_.next());
    options.arrays = captured.data();
    options.num_arrays = static_cast<int64_t>(captured.size());
    options.query_block = integer32(frame, "query_block");
    options.key_block = integer32(frame, "key_block");
    options.score_program = score_.read(frame, "score_program", kColumns);
    options.mask_program = mask_.read(frame, "mask_program", kColumns);
    options.numbers = numbers_.read(frame, "numbers");
    if (std::string name = text(frame, "functor"); !name.empty())
      options.functor = functor_named(name);
  }

  // Of a backward call: the gradients of the captured arrays that `slots` names are results from
  // `next` on, which is moved behind them.
  void read_gradient(const CallFrame& frame, const Place& place, int64_t& next) {
    options.score_gradient = gradient_.read(frame, "score_gradient", kColumns);
    std::vector<int32_t> slots = numbers_of(frame, "slots");
    results_.resize(slots.size());  // at once: tensors are pointed at
    gradients.resize(captured.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0 || static_cast<size_t>(slots[i]) >= gradients.size())
        refuse_version("attribute slots of the XLA call names an array that there is none of");
      results_[i].set(*frame.results.items[next++], place.device);
      gradients[static_cast<size_t>(slots[i])] = &results_[i].dl;
    }
    if (!slots.empty()) options.array_gradients = gradients.data();
  }

 private:
  static constexpr int64_t kColumns = 6;  // of an operation
  Arguments arguments_;
  HostArray score_, mask_, gradient_, numbers_;
  std::vector<Tensor> results_;
};

// Arguments q, k, v, those of `present`, then those of the functions.
void run_flex(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  std::string backend;
  cuattn_attention_options options;
  read_options(frame, options, backend);
  Arguments arguments(frame, place.device);
  const DLTensor *q = arguments.next(), *k = arguments.next(), *v = arguments.next();
  arguments.optional(integer(frame, "present"), options, kAttentionArrays,
                     &cuattn_attention_options::dropout_state);
  Functions functions(frame, platform, place, arguments.place());
  cuattn_attention_call call;
  check(cuattn_flex_prepare(q, k, v, &options, &functions.options, &call));
  AttentionResults(frame, place.device, kOwnRank).run(cuattn_attention_run, call, place.stream);
}

// Arguments dout, q, k, v, out, lse, those of `present`, dlse if there is one, then those of the
// functions; results the gradients that are needed, those of captured arrays, and the workspace.
void run_flex_backward(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  Arguments arguments(frame, place.device);
  BackwardInputs inputs(frame, arguments);
  Functions functions(frame, platform, place, arguments.place());
  GradientResults results(frame, place.device, inputs.backward.need);
  functions.read_gradient(frame, place, results.next);
  cuattn_backward_call call;
  check(cuattn_flex_backward_prepare(&inputs.arrays, &inputs.options, &inputs.backward,
                                     &functions.options, &call));
  results.run(frame, place, call);
}

}  // namespace

void name_functor(const std::string& name, int64_t functor) {
  std::lock_guard<std::mutex> lock(names_mutex);
  functor_names()[name] = functor;
}

// No traits: the first run loads machine code, which cannot be captured into a CUDA graph.
const Handler kFlex = handler<run_flex, 0>("cuattn_flex");
const Handler kFlexBackward = handler<run_flex_backward, 0>("cuattn_flex_backward");

}  // namespace cuattn::bindings::xla
