// SPDX-License-Identifier: Apache-2.0
// What the handlers of XLA calls share: buffers as tensors, attributes as options, where the call
// runs, and failures as XLA errors. Next: attention.cpp, paged.cpp.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <string>

#include "bindings/xla/ffi.h"
#include "cuattn/c_api.h"
#include "cuattn/error.h"
#include "cuattn/tensor.h"

namespace cuattn::bindings::xla {

struct Failure {
  ErrorCode code;
  std::string message;
};

inline void check(cuattn_status status) {
  switch (status) {
    case CUATTN_OK: return;
    case CUATTN_INVALID_ARGUMENT: throw Failure{ErrorCode::invalid_argument, cuattn_last_error()};
    case CUATTN_NOT_IMPLEMENTED: throw Failure{ErrorCode::unimplemented, cuattn_last_error()};
    case CUATTN_OUT_OF_MEMORY: throw Failure{ErrorCode::resource_exhausted, cuattn_last_error()};
    default: throw Failure{ErrorCode::internal, cuattn_last_error()};
  }
}

// Of an exported program whose calls have other parts than those of this version.
[[noreturn]] inline void refuse_version(const std::string& what) {
  throw Failure{
      ErrorCode::unimplemented,
      concat("cuattn: ", what, ": another version of cuattn made this program, this is version ",
             cuattn_version(), "; trace or export the program again with it")};
}

inline DLDataType dl_dtype_of(DataType dtype) {
  switch (dtype) {
    case DataType::f32: return dl_dtype(DType::f32);
    case DataType::f16: return dl_dtype(DType::f16);
    case DataType::bf16: return dl_dtype(DType::bf16);
    case DataType::f8e4m3fn: return dl_dtype(DType::e4m3);
    case DataType::pred: return dl_dtype(DType::boolean);
    case DataType::s8: return dl_dtype(DType::i8);
    case DataType::s32: return dl_dtype(DType::i32);
    case DataType::s64: return dl_dtype(DType::i64);
    case DataType::f64: return {kDLFloat, 64, 1};
    case DataType::u8: return {kDLUInt, 8, 1};
    default: return {kDLOpaqueHandle, 8, 1};
  }
}

constexpr int64_t kOwnRank = INT64_MAX;  // of a buffer, that vmap leaves as it is

// A buffer as a DLTensor. Axes that vmap puts in front of the `rank` expected ones are folded into
// the first of those.
struct Tensor {
  TensorView view;
  DLTensor dl;

  void set(const Buffer& buffer, DLDevice device, int64_t rank = kOwnRank) {
    int64_t folded = buffer.rank > rank ? buffer.rank - rank : 0;
    view.data = buffer.data;
    view.device = device;
    view.dtype = dl_dtype_of(buffer.dtype);
    view.ndim = static_cast<int32_t>(buffer.rank - folded);
    if (view.ndim > kMaxDims)
      throw Failure{ErrorCode::invalid_argument, "cuattn: an array has too many axes"};
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

// The arguments of a call, one after another.
class Arguments {
 public:
  // Those from the place `first` on.
  Arguments(const CallFrame& frame, DLDevice device, int64_t first = 0)
      : list_(frame.arguments), device_(device), first_(first) {}

  const DLTensor* next(int64_t rank = kOwnRank) { return &take(rank).dl; }

  // The place of the argument that is next.
  int64_t place() const { return first_ + used_; }

  // int64 [n], for which JAX without jax_enable_x64 has the two int32 halves of each, [n, 2].
  const DLTensor* next_int64() {
    Tensor& tensor = take(kOwnRank);
    TensorView& view = tensor.view;
    if (view.ndim == 2) {
      view.dtype = dl_dtype(DType::i64);
      view.ndim = 1;
      view.strides[0] = 1;
      tensor.dl = view.dl();
    }
    return &tensor.dl;
  }

  // Those of `present`, which has a bit for each field of `options`; `wide` is int64.
  template <class Options, size_t kCount>
  void optional(int64_t present, Options& options,
                const DLTensor* Options::* const (&fields)[kCount],
                const DLTensor* Options::* wide = nullptr) {
    for (auto field : fields) {
      if ((present & 1) != 0) options.*field = field == wide ? next_int64() : next();
      present >>= 1;
    }
  }

 private:
  Tensor& take(int64_t rank) {
    if (first_ + used_ >= list_.size || used_ == kMost)
      refuse_version("the XLA call has another number of arguments");
    Tensor& tensor = tensors_[used_];
    tensor.set(*list_.items[first_ + used_++], device_, rank);
    return tensor;
  }

  static constexpr int64_t kMost = 20;
  const Buffers& list_;
  DLDevice device_;
  int64_t first_;
  int64_t used_ = 0;
  Tensor tensors_[kMost];
};

inline const void* attribute(const CallFrame& frame, const char* name, AttributeType type) {
  const Attributes& list = frame.attributes;
  for (int64_t i = 0; i < list.size; ++i) {
    const Text& key = *list.names[i];
    if (key.size == std::strlen(name) && std::memcmp(key.data, name, key.size) == 0 &&
        list.types[i] == type) {
      return list.values[i];
    }
  }
  refuse_version(concat("attribute ", name, " is missing from the XLA call"));
}

inline const void* scalar(const CallFrame& frame, const char* name, DataType dtype) {
  const auto* found = static_cast<const Scalar*>(attribute(frame, name, AttributeType::scalar));
  if (found->dtype != dtype)
    refuse_version(concat("attribute ", name, " of the XLA call has another dtype"));
  return found->value;
}

inline int64_t integer(const CallFrame& frame, const char* name) {
  return *static_cast<const int64_t*>(scalar(frame, name, DataType::s64));
}

inline int32_t integer32(const CallFrame& frame, const char* name) {
  return static_cast<int32_t>(integer(frame, name));
}

inline double number(const CallFrame& frame, const char* name) {
  return *static_cast<const double*>(scalar(frame, name, DataType::f64));
}

inline std::string text(const CallFrame& frame, const char* name) {
  const auto* span = static_cast<const Text*>(attribute(frame, name, AttributeType::string));
  return std::string(span->data, span->size);
}

enum class Platform { cpu, cuda };

// Where the call runs; on CUDA XLA tells the device and its stream.
struct Place {
  DLDevice device{kDLCPU, 0};
  void* stream = nullptr;

  Place(const CallFrame& frame, Platform platform) {
    if (platform == Platform::cpu) return;
    GetStreamArgs stream_args{{sizeof stream_args, nullptr}, frame.context, nullptr};
    GetDeviceOrdinalArgs device_args{{sizeof device_args, nullptr}, frame.context, 0};
    if (frame.api->get_stream(&stream_args) != nullptr ||
        frame.api->get_device_ordinal(&device_args) != nullptr) {
      throw Failure{ErrorCode::internal,
                    "cuattn: XLA gives neither a stream nor a device for this call"};
    }
    stream = stream_args.stream;
    device = {kDLCUDA, device_args.ordinal};
  }
};

// Results of an attention call: out, lse if asked for, and the workspace if one is needed.
struct AttentionResults {
  Tensor out, lse, workspace;
  bool has_lse;

  AttentionResults(const CallFrame& frame, DLDevice device, int64_t rank)
      : has_lse(integer(frame, "return_lse") != 0) {
    Buffer** results = frame.results.items;
    int64_t next = 0;
    out.set(*results[next++], device, rank);
    if (has_lse) lse.set(*results[next++], device, rank - 1);
    if (next < frame.results.size) workspace.set(*results[next], device);
  }

  // Runs a prepared call into them, by cuattn_attention_run or cuattn_paged_run.
  void run(decltype(cuattn_paged_run)* run, cuattn_attention_call& call, void* stream) const {
    void* memory = workspace.view.data;
    check(run(&call, &out.dl, has_lse ? &lse.dl : nullptr, memory,
              memory == nullptr ? 0 : workspace.view.size(), stream));
  }
};

// A result that XLA lays onto the argument that it continues.
inline void set_in_place(const CallFrame& frame, int64_t argument, int64_t result, DLDevice device,
                         Tensor& tensor) {
  const Buffer& buffer = *frame.results.items[result];
  tensor.set(buffer, device);
  if (buffer.data != frame.arguments.items[argument]->data && tensor.view.size() > 0)
    throw Failure{ErrorCode::internal, "cuattn: XLA did not alias a result to its argument"};
}

inline Error* report(const CallFrame& frame, const Failure& failure) {
  CreateErrorArgs args{{sizeof args, nullptr}, failure.message.c_str(), failure.code};
  return frame.api->create_error(&args);
}

using Body = void (*)(const CallFrame&, Platform);

// Answers the metadata query, lets only the execute stage through, and turns failures into XLA
// errors.
template <Body kBody, Platform kPlatform, uint32_t kTraits>
Error* handle(CallFrame* frame) {
  for (Extension* e = frame->header.extensions; e != nullptr; e = e->next) {
    if (e->type != kMetadata) continue;
    Metadata* metadata = reinterpret_cast<MetadataExtension*>(e)->metadata;
    metadata->api_version.major = 0;
    metadata->api_version.minor = 1;
    metadata->traits = kPlatform == Platform::cuda ? kTraits : 0;
    return nullptr;
  }
  if (frame->stage != Stage::execute) return nullptr;
  try {
    kBody(*frame, kPlatform);
    return nullptr;
  } catch (const Failure& failure) {
    return report(*frame, failure);
  } catch (const std::bad_alloc&) {
    return report(*frame, {ErrorCode::resource_exhausted, "cuattn: out of host memory"});
  }
}

template <Body kBody, uint32_t kTraits = kCommandBufferCompatible>
constexpr Handler handler(const char* name) {
  return {name, &handle<kBody, Platform::cpu, kTraits>, &handle<kBody, Platform::cuda, kTraits>};
}

}  // namespace cuattn::bindings::xla
