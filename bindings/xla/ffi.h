// SPDX-License-Identifier: Apache-2.0
// The part of XLA's foreign function interface (FFI API 0.1, jaxlib >= 0.6.1) that our handlers
// touch, declared from its binary layout: a handler built against newer headers would be refused by
// an older XLA, one built against 0.1 runs on all since. Next: call.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuattn::bindings::xla {

// Every struct starts with its size and a list of extensions.
struct Extension {
  size_t struct_size;
  int32_t type;  // kMetadata is the only one there is
  Extension* next;
};
constexpr int32_t kMetadata = 1;

struct Header {
  size_t struct_size;
  Extension* extensions;
};

struct ApiVersion {
  Header header;
  int major, minor;
};

// XLA calls a handler once with this extension to learn how it was built.
constexpr uint32_t kCommandBufferCompatible = 1;  // the launches may be captured into a CUDA graph
struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Error;    // made by create_error, destroyed by XLA
struct Context;  // of one execution

enum class ErrorCode : int32_t {
  invalid_argument = 3,
  resource_exhausted = 8,
  unimplemented = 12,
  internal = 13
};

enum class DataType : int32_t {
  pred = 1,
  s8 = 2,
  s32 = 4,
  s64 = 5,
  u8 = 6,
  f16 = 10,
  f32 = 11,
  f64 = 12,
  bf16 = 16,
  f8e4m3fn = 20
};

struct Buffer {  // dense, row-major
  Header header;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* extents;
};

struct Buffers {  // arguments, and results in the same form
  Header header;
  int64_t size;
  int32_t* types;  // 1 = Buffer
  Buffer** items;
};

struct Text {
  const char* data;
  size_t size;
};

enum class AttributeType : int32_t { array = 1, dictionary = 2, scalar = 3, string = 4 };

struct Scalar {
  DataType dtype;
  void* value;
};

struct Attributes {  // sorted by name
  Header header;
  int64_t size;
  AttributeType* types;
  Text** names;
  void** values;  // Scalar* or Text*
};

struct CreateErrorArgs {
  Header header;
  const char* message;
  ErrorCode code;
};
struct GetStreamArgs {
  Header header;
  Context* context;
  void* stream;  // out
};
struct GetDeviceOrdinalArgs {
  Header header;
  Context* context;
  int32_t ordinal;  // out
};

// XLA's own functions; those we do not call are kept as plain pointers, in their places.
struct Api {
  Header header;
  ApiVersion version;
  void* internal_api;
  Error* (*create_error)(CreateErrorArgs*);
  void* error_message;
  void* error_destroy;
  void* handler_register;
  Error* (*get_stream)(GetStreamArgs*);
  void* type_register;
  void* context_get;
  void* state_set;
  void* state_get;
  void* memory_allocate;
  void* memory_free;
  void* thread_pool_schedule;
  void* thread_pool_num_threads;
  void* future_create;
  void* future_set_available;
  void* future_set_error;
  void* run_id;
  Error* (*get_device_ordinal)(GetDeviceOrdinalArgs*);
};

enum class Stage : int32_t { instantiate = 0, prepare = 1, initialize = 2, execute = 3 };

struct CallFrame {
  Header header;
  const Api* api;
  Context* context;
  Stage stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};

// One op with a handler for each platform; arguments, results and attributes as the functions of
// python/cuattn/jax/ pass them.
struct Handler {
  const char* name;
  Error* (*cpu)(CallFrame*);
  Error* (*cuda)(CallFrame*);
};
extern const Handler kAttention, kAttentionBackward, kMergeStates, kPagedAttention,
    kReshapeAndCache, kGatherCache, kApplyRope, kNorm, kActivation, kSample, kVerify, kMlaDecode,
    kMlaWrite, kFlex, kFlexBackward;

}  // namespace cuattn::bindings::xla
