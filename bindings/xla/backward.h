// SPDX-License-Identifier: Apache-2.0
// What backward calls share: how they begin, and their results. Used by attention.cpp and flex.cpp.
#pragma once

#include <iterator>
#include <string>

#include "bindings/xla/call.h"
#include "bindings/xla/options.h"

namespace cuattn::bindings::xla {

// What a backward call is told, and its first arguments: dout, q, k, v, out, lse, those of `present`,
// and dlse if there is one.
struct BackwardInputs {
  cuattn_attention_options options;
  cuattn_backward_options backward;
  cuattn_backward_arrays arrays;

  BackwardInputs(const CallFrame& frame, Arguments& arguments) {
    read_options(frame, options, backend_);
    cuattn_backward_options_init(&backward, sizeof backward);
    backward.need = integer32(frame, "need");
    backward.deterministic = integer32(frame, "deterministic");
    for (auto field :
         {&cuattn_backward_arrays::dout, &cuattn_backward_arrays::q, &cuattn_backward_arrays::k,
          &cuattn_backward_arrays::v, &cuattn_backward_arrays::out, &cuattn_backward_arrays::lse})
      arrays.*field = arguments.next();
    arguments.optional(integer(frame, "present"), options, kAttentionArrays,
                       &cuattn_attention_options::dropout_state);
    if (integer(frame, "has_dlse") != 0) backward.dlse = arguments.next();
  }
  BackwardInputs(const BackwardInputs&) = delete;  // options point into it

 private:
  std::string backend_;
};

// Results of a backward call: the gradients that `need` names, and the place of what follows them.
struct GradientResults {
  static constexpr const DLTensor* cuattn_gradients::* kFields[] = {
      &cuattn_gradients::dq,    &cuattn_gradients::dk,     &cuattn_gradients::dv,
      &cuattn_gradients::dbias, &cuattn_gradients::dsinks, &cuattn_gradients::dslopes};
  Tensor found[std::size(kFields)], workspace;
  cuattn_gradients gradients{};
  int64_t next = 0;

  GradientResults(const CallFrame& frame, DLDevice device, int32_t need) {
    for (size_t i = 0; i < std::size(kFields); ++i) {
      if ((need >> i & 1) == 0) continue;
      found[i].set(*frame.results.items[next++], device);
      gradients.*kFields[i] = &found[i].dl;
    }
  }

  // Runs a prepared call into them; the workspace, if one is needed, is the result that is next.
  void run(const CallFrame& frame, const Place& place, cuattn_backward_call& call) {
    bool has_workspace = next < frame.results.size;
    if (has_workspace) workspace.set(*frame.results.items[next], place.device);
    size_t bytes = has_workspace ? workspace.view.size() : 0;
    check(
        cuattn_attention_backward_run(&call, &gradients, workspace.view.data, bytes, place.stream));
  }
};

}  // namespace cuattn::bindings::xla
