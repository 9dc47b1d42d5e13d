// SPDX-License-Identifier: Apache-2.0
// attention and attention_varlen of the module: arrays and options to the C structs, and back.
// Next: call/options.h, arrays/import.h.
#include "bindings/attention.h"

#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "bindings/arrays/import.h"
#include "bindings/arrays/optional.h"
#include "bindings/arrays/results.h"
#include "bindings/call/errors.h"
#include "bindings/call/front.h"
#include "bindings/call/options.h"
#include "bindings/call/unlocked.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {
namespace {

// The arrays of one attention call.
struct AttentionArrays {
  Array q, k, v;
  OptionalArrays<std::size(kAttentionArrays)> optional;

  // `grad_mode`: torch's, where it was asked and q requires no grad in it.
  void import(const char* op, const AttentionArgs& args, CallStream& stream,
              cuattn_attention_options& options, std::optional<bool> grad_mode) {
    if (grad_mode) q.take_grad_mode(*grad_mode);
    q.import(op, "q", args.q, stream, nullptr);
    complete_stream(op, q, stream);
    k.import(op, "k", args.k, stream, &q);
    v.import(op, "v", args.v, stream, &q);
    optional.import(op, kAttentionArrays, args, stream, q, options);
  }
};

// A call on the CPU that is over sooner than another thread could take the interpreter lock.
bool is_short(const Array& q, const Array& k) {
  constexpr int64_t kElements = 512;
  return !q.is_cuda() && q.view.size() <= kElements && k.view.size() <= kElements;
}

nb::object run_attention(const char* op, const AttentionArgs& args,
                         std::optional<bool> grad_mode = {}) {
  if (array_type(op, "q", args.q).library == Library::jax) return nb::borrow(Py_NotImplemented);
  CallStream stream;
  if (is_given(args.stream)) stream = parse_stream(op, args.stream);
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  parse_options(op, args, options);
  if (is_given(args.lse_out)) options.return_lse = 1;
  AttentionArrays arrays;
  arrays.import(op, args, stream, options, grad_mode);

  cuattn_attention_call call;
  check(cuattn_attention_prepare(&arrays.q.tensor, &arrays.k.tensor, &arrays.v.tensor, &options,
                                 &call));
  AttentionOutputs outputs(op, call, args, options.return_lse != 0, arrays.q, stream);
  cuattn_status status;
  {
    // The CPU computes here, and a CUDA launch may wait for a full queue.
    std::optional<Unlocked> unlocked;
    if (!is_short(arrays.q, arrays.k)) unlocked.emplace();
    status = outputs.run(cuattn_attention_run, call, stream.handle);
  }
  check(status);
  return outputs.object();
}

nb::object attention(AttentionArgs& args) { return run_attention("attention", args); }

nb::object attention_varlen(AttentionArgs& args) {
  const char* op = "attention_varlen";
  for (auto [name, value] :
       {std::pair("max_seqlen_q", args.max_seqlen_q), {"max_seqlen_k", args.max_seqlen_k}})
    parse_int(op, name, value);  // None, which explain may leave, is no length here
  return run_attention(op, args);
}

// A named cuBLAS has to be found first, which is Python's work.
bool names_cublas(const char* op, nb::handle backend) {
  return backend.is_valid() && std::strcmp(parse_text(op, "backend", backend), "cublas") == 0;
}

// Dropout of torch tensors without a seed draws one from torch's generator, which is Python's work, too.
bool draws_seed(const char* op, const AttentionArgs& args) {
  if (!args.dropout_p.is_valid() || is_given(args.dropout_seed) || is_given(args.dropout_state))
    return false;
  return array_type(op, "q", args.q).is_torch && parse_double(op, "dropout_p", args.dropout_p) != 0;
}

// Leaves a call that autograd is to see to what differentiates it, as it stands. Note: q is asked
// first, because an exception on the way costs as much as a call.
nb::object run_without_gradient(const char* op, const AttentionArgs& args) {
  std::optional<bool> grad_mode;
  if (array_type(op, "q", args.q).is_torch) {
    grad_mode = detail::in_grad_mode();
    if (*grad_mode && detail::requires_grad(args.q)) return nb::borrow(gradient_wanted);
  }
  try {
    return run_attention(op, args, grad_mode);
  } catch (const nb::python_error& error) {
    if (!error.matches(gradient_wanted)) throw;
  }
  return nb::borrow(gradient_wanted);
}

// The builtin cuattn.attention.
nb::object attention_given(AttentionArgs& args) {
  if (names_cublas("attention", args.backend) || draws_seed("attention", args))
    return nb::borrow(Py_NotImplemented);
  return run_without_gradient("attention", args);
}

// The builtin cuattn.attention_varlen; what it would refuse is left to Python.
nb::object attention_varlen_given(AttentionArgs& args) {
  const char* op = "attention_varlen";
  bool is_paged = is_given(args.block_tables);
  bool has_lengths = is_given(args.cu_seqlens_q) && (is_paged || is_given(args.cu_seqlens_k)) &&
                     is_given(args.max_seqlen_q) && is_given(args.max_seqlen_k);
  bool is_usual = has_lengths && (is_paged || !args.kv_layout.is_valid());
  if (!is_usual || names_cublas(op, args.backend) || draws_seed(op, args))
    return nb::borrow(Py_NotImplemented);
  return run_without_gradient(op, args);
}

}  // namespace

void add_attention(nb::module_& m) {
  add_function<Attention, attention_given, attention>(m);
  add_function<AttentionVarlen, attention_varlen_given, attention_varlen>(m);
}

}  // namespace cuattn::bindings
