// SPDX-License-Identifier: Apache-2.0
// What attention_backward and its explain read alike. Next: backward.cpp, explain.cpp.
#pragma once

#include <cstring>
#include <iterator>

#include "bindings/arrays/import.h"
#include "bindings/arrays/optional.h"
#include "bindings/call/options.h"
#include "bindings/call/parse.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {

// What a backward pass takes beside the arguments of its forward call.
struct BackwardArgs {
  nb::handle dout, out, lse, dlse;
  nb::handle deterministic, need;
  nb::handle dq, dk, dv, dbias, dsinks, dslopes;
};

struct BackwardNames {
  using Args = BackwardArgs;
  static constexpr Argument<Args> kAll[] = {
      {"dout", &Args::dout},   {"out", &Args::out},       {"lse", &Args::lse},
      {"dlse", &Args::dlse},   {"need", &Args::need},     {"deterministic", &Args::deterministic},
      {"dq", &Args::dq},       {"dk", &Args::dk},         {"dv", &Args::dv},
      {"dbias", &Args::dbias}, {"dsinks", &Args::dsinks}, {"dslopes", &Args::dslopes}};
};

struct Gradient {
  const char* name;
  int32_t bit;
  const DLTensor* cuattn_gradients::* field;
  nb::handle BackwardArgs::* given;  // memory for it
};
inline constexpr Gradient kGradients[] = {
    {"dq", CUATTN_NEED_DQ, &cuattn_gradients::dq, &BackwardArgs::dq},
    {"dk", CUATTN_NEED_DK, &cuattn_gradients::dk, &BackwardArgs::dk},
    {"dv", CUATTN_NEED_DV, &cuattn_gradients::dv, &BackwardArgs::dv},
    {"dbias", CUATTN_NEED_DBIAS, &cuattn_gradients::dbias, &BackwardArgs::dbias},
    {"dsinks", CUATTN_NEED_DSINKS, &cuattn_gradients::dsinks, &BackwardArgs::dsinks},
    {"dslopes", CUATTN_NEED_DSLOPES, &cuattn_gradients::dslopes, &BackwardArgs::dslopes}};
constexpr int kNumGradients = 6;

// The place of a name in kGradients; Python has checked it.
inline int gradient_of(const char* op, nb::handle name) {
  const char* text = parse_text(op, "need", name);
  int i = 0;
  while (i + 1 < kNumGradients && std::strcmp(text, kGradients[i].name) != 0) ++i;
  return i;
}

// The arguments of a backward pass: those of the forward call, and what it alone has.
struct BackwardArguments {
  const char* op;
  AttentionArgs forward;
  BackwardArgs own;
  nb::tuple need;  // of names, which Python has checked
  cuattn_attention_options options;
  cuattn_backward_options backward_options;

  // name: of the function, where it is not told from the arguments.
  explicit BackwardArguments(const nb::dict& arguments, const char* name = nullptr)
      : forward(read_arguments<Attention>(arguments)),
        own(read_arguments<BackwardNames>(arguments)),
        need(nb::borrow<nb::tuple>(own.need)) {
    op = name != nullptr                   ? name
         : forward.cu_seqlens_q.is_valid() ? "attention_varlen_backward"
                                           : "attention_backward";
    cuattn_attention_options_init(&options, sizeof options);
    parse_options(op, forward, options);
    cuattn_backward_options_init(&backward_options, sizeof backward_options);
    if (is_given(own.deterministic))
      backward_options.deterministic = parse_bool(op, "deterministic", own.deterministic);
    backward_options.need = 0;
    for (nb::handle name : need) backward_options.need |= kGradients[gradient_of(op, name)].bit;
  }
};

// The arrays of a backward pass; its options learn of those that they point to.
struct BackwardInputs {
  Array q, k, v, dout, out, lse, dlse;
  OptionalArrays<std::size(kAttentionArrays)> optional;

  // Completes `stream`, which is that of q.
  BackwardInputs(const char* op, BackwardArguments& args, CallStream& stream);
  cuattn_backward_arrays arrays() const {
    return {&dout.tensor, &q.tensor, &k.tensor, &v.tensor, &out.tensor, &lse.tensor};
  }
};

// Provides the gradients that `need` names and runs a prepared call: a list of them.
nb::object run_backward(const char* op, const BackwardArguments& args, const BackwardInputs& inputs,
                        const CallStream& stream, cuattn_backward_call& call);

// Adds attention_backward.
void add_backward(nb::module_& m);

}  // namespace cuattn::bindings
