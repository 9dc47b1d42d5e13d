// SPDX-License-Identifier: Apache-2.0
// attention and merge_states as XLA custom calls: JAX arrays reach the library inside the compiled
// program, on XLA's stream and in XLA's memory, the workspace included. Python face:
// python/cuattn/jax.py.
#include "xla_ffi.h"

#include <cstring>
#include <new>
#include <string>

#include "cuattn/c_api.h"
#include "cuattn/error.h"
#include "cuattn/tensor.h"

namespace cuattn::bindings {
namespace {

using xla::Buffer;
using xla::CallFrame;

struct Failure {
  xla::ErrorCode code;
  std::string message;
};

DLDataType dl_dtype_of(xla::DataType dtype) {
  switch (dtype) {
    case xla::DataType::f32: return dl_dtype(DType::f32);
    case xla::DataType::f16: return dl_dtype(DType::f16);
    case xla::DataType::bf16: return dl_dtype(DType::bf16);
    case xla::DataType::f8e4m3fn: return dl_dtype(DType::e4m3);
    case xla::DataType::pred: return dl_dtype(DType::boolean);
    case xla::DataType::s32: return dl_dtype(DType::i32);
    case xla::DataType::s64: return {kDLInt, 64, 1};
    case xla::DataType::f64: return {kDLFloat, 64, 1};
    case xla::DataType::u8: return {kDLUInt, 8, 1};
    default: return {kDLOpaqueHandle, 8, 1};
  }
}

// A buffer as a DLTensor. Axes that vmap puts in front of the `rank` expected ones are folded into
// the first of those.
struct Tensor {
  TensorView view;
  DLTensor dl;

  void set(const Buffer& buffer, DLDevice device, int64_t rank) {
    int64_t folded = buffer.rank > rank ? buffer.rank - rank : 0;
    view.data = buffer.data;
    view.device = device;
    view.dtype = dl_dtype_of(buffer.dtype);
    view.ndim = static_cast<int32_t>(buffer.rank - folded);
    if (view.ndim > kMaxDims)
      throw Failure{xla::ErrorCode::invalid_argument, "cuattn: an array has too many axes"};
    int64_t stride = 1;
    for (int32_t i = view.ndim - 1; i >= 0; --i) {
      view.shape[i] = buffer.extents[i + folded];
      for (int64_t j = 0; i == 0 && j < folded; ++j) view.shape[0] *= buffer.extents[j];
      view.strides[i] = stride;
      stride *= view.shape[i];
    }
    dl = view.dl();
  }
};

const void* attribute(const CallFrame& frame, const char* name, xla::AttributeType type) {
  const xla::Attributes& list = frame.attributes;
  for (int64_t i = 0; i < list.size; ++i) {
    const xla::Text& key = *list.names[i];
    if (key.size == std::strlen(name) && std::memcmp(key.data, name, key.size) == 0 &&
        list.types[i] == type) {
      return list.values[i];
    }
  }
  throw Failure{xla::ErrorCode::internal,
                concat("cuattn: attribute ", name, " is missing from the XLA call")};
}

int64_t integer(const CallFrame& frame, const char* name) {
  auto* scalar =
      static_cast<const xla::Scalar*>(attribute(frame, name, xla::AttributeType::scalar));
  return *static_cast<const int64_t*>(scalar->value);
}

double number(const CallFrame& frame, const char* name) {
  auto* scalar =
      static_cast<const xla::Scalar*>(attribute(frame, name, xla::AttributeType::scalar));
  return *static_cast<const double*>(scalar->value);
}

std::string text(const CallFrame& frame, const char* name) {
  auto* span = static_cast<const xla::Text*>(attribute(frame, name, xla::AttributeType::string));
  return std::string(span->data, span->size);
}

xla::Error* report(const CallFrame& frame, const Failure& failure) {
  xla::CreateErrorArgs args{{sizeof args, nullptr}, failure.message.c_str(), failure.code};
  return frame.api->create_error(&args);
}

void check(cuattn_status status) {
  switch (status) {
    case CUATTN_OK: return;
    case CUATTN_INVALID_ARGUMENT:
      throw Failure{xla::ErrorCode::invalid_argument, cuattn_last_error()};
    case CUATTN_NOT_IMPLEMENTED: throw Failure{xla::ErrorCode::unimplemented, cuattn_last_error()};
    case CUATTN_OUT_OF_MEMORY:
      throw Failure{xla::ErrorCode::resource_exhausted, cuattn_last_error()};
    default: throw Failure{xla::ErrorCode::internal, cuattn_last_error()};
  }
}

enum class Platform { cpu, cuda };

// Where the call runs; on CUDA XLA tells the device and its stream.
struct Place {
  DLDevice device{kDLCPU, 0};
  void* stream = nullptr;

  Place(const CallFrame& frame, Platform platform) {
    if (platform == Platform::cpu) return;
    xla::GetStreamArgs stream_args{{sizeof stream_args, nullptr}, frame.context, nullptr};
    xla::GetDeviceOrdinalArgs device_args{{sizeof device_args, nullptr}, frame.context, 0};
    if (frame.api->get_stream(&stream_args) != nullptr ||
        frame.api->get_device_ordinal(&device_args) != nullptr) {
      throw Failure{xla::ErrorCode::internal,
                    "cuattn: XLA gives neither a stream nor a device for this call"};
    }
    stream = stream_args.stream;
    device = {kDLCUDA, device_args.ordinal};
  }
};

// Arguments q, k, v, then those of `present` (one bit each, in the order below); results out, lse
// if asked for, and the workspace if one is needed.
void run_attention(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  cuattn_attention_options options;
  cuattn_attention_options_init(&options);
  options.layout = static_cast<int32_t>(integer(frame, "layout"));
  options.causal = static_cast<int32_t>(integer(frame, "causal"));
  options.window_left = integer(frame, "window_left");
  options.window_right = integer(frame, "window_right");
  options.has_scale = static_cast<int32_t>(integer(frame, "has_scale"));
  options.scale = number(frame, "scale");
  options.softcap = number(frame, "softcap");
  options.num_splits = static_cast<int32_t>(integer(frame, "num_splits"));
  options.batch_invariant = static_cast<int32_t>(integer(frame, "batch_invariant"));
  options.return_lse = static_cast<int32_t>(integer(frame, "return_lse"));
  options.max_seqlen_q = integer(frame, "max_seqlen_q");
  options.max_seqlen_k = integer(frame, "max_seqlen_k");
  std::string backend = text(frame, "backend");
  options.backend = backend.c_str();

  int64_t present = integer(frame, "present");
  int64_t rank = integer(frame, "ragged") != 0 ? 3 : 4;
  Buffer** arguments = frame.arguments.items;
  Tensor q, k, v;
  q.set(*arguments[0], place.device, rank);
  k.set(*arguments[1], place.device, rank);
  v.set(*arguments[2], place.device, rank);
  constexpr int kOptional = 7;
  Tensor optional[kOptional];
  const DLTensor** fields[kOptional] = {
      &options.alibi_slopes, &options.sinks,        &options.bias,        &options.seqused_q,
      &options.seqused_k,    &options.cu_seqlens_q, &options.cu_seqlens_k};
  int64_t next = 3;
  for (int i = 0; i < kOptional; ++i) {
    if ((present >> i & 1) == 0) continue;
    const Buffer& buffer = *arguments[next++];
    optional[i].set(buffer, place.device, buffer.rank);
    *fields[i] = &optional[i].dl;
  }
  cuattn_attention_call call;
  check(cuattn_attention_prepare(&q.dl, &k.dl, &v.dl, &options, &call));

  Tensor out, lse, workspace;
  Buffer** results = frame.results.items;
  next = 0;
  out.set(*results[next++], place.device, rank);
  if (options.return_lse) lse.set(*results[next++], place.device, rank - 1);
  if (next < frame.results.size) workspace.set(*results[next], place.device, 1);
  check(cuattn_attention_run(
      &call, &out.dl, options.return_lse ? &lse.dl : nullptr, workspace.view.data,
      workspace.view.data == nullptr ? 0 : workspace.view.size(), place.stream));
}

// Arguments out_a, lse_a, out_b, lse_b, or stacked outs, lses; results out, lse.
void run_merge(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  auto layout = static_cast<int32_t>(integer(frame, "layout"));
  Tensor parts[4], out, lse;
  for (int64_t i = 0; i < frame.arguments.size && i < 4; ++i) {
    parts[i].set(*frame.arguments.items[i], place.device, frame.arguments.items[i]->rank);
  }
  out.set(*frame.results.items[0], place.device, frame.results.items[0]->rank);
  lse.set(*frame.results.items[1], place.device, frame.results.items[1]->rank);
  if (frame.arguments.size == 2) {
    check(cuattn_merge_many(&parts[0].dl, &parts[1].dl, &out.dl, &lse.dl, layout, place.stream));
  } else {
    check(cuattn_merge_states(&parts[0].dl, &parts[1].dl, &parts[2].dl, &parts[3].dl, &out.dl,
                              &lse.dl, layout, place.stream));
  }
}

// Answers the metadata query, lets only the execute stage through, and turns failures into XLA
// errors.
xla::Error* handle(CallFrame* frame, Platform platform, void (*body)(const CallFrame&, Platform)) {
  for (xla::Extension* e = frame->header.extensions; e != nullptr; e = e->next) {
    if (e->type != xla::kMetadata) continue;
    xla::Metadata* metadata = reinterpret_cast<xla::MetadataExtension*>(e)->metadata;
    metadata->api_version.major = 0;
    metadata->api_version.minor = 1;
    metadata->traits = platform == Platform::cuda ? xla::kCommandBufferCompatible : 0;
    return nullptr;
  }
  if (frame->stage != xla::Stage::execute) return nullptr;
  try {
    body(*frame, platform);
    return nullptr;
  } catch (const Failure& failure) {
    return report(*frame, failure);
  } catch (const std::bad_alloc&) {
    return report(*frame, {xla::ErrorCode::resource_exhausted, "cuattn: out of host memory"});
  }
}

}  // namespace

xla::Error* xla_attention_cpu(CallFrame* frame) {
  return handle(frame, Platform::cpu, run_attention);
}
xla::Error* xla_attention_cuda(CallFrame* frame) {
  return handle(frame, Platform::cuda, run_attention);
}
xla::Error* xla_merge_states_cpu(CallFrame* frame) {
  return handle(frame, Platform::cpu, run_merge);
}
xla::Error* xla_merge_states_cuda(CallFrame* frame) {
  return handle(frame, Platform::cuda, run_merge);
}

}  // namespace cuattn::bindings
