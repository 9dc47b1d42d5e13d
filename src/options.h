// SPDX-License-Identifier: Apache-2.0
// Structs of options across versions: the caller may be compiled against an older or a newer header
// than the library. c_api.h has the rule. Next: guarded.h.
#pragma once

#include <cstddef>
#include <cstring>

#include "cuattn/c_api_float8.h"
#include "cuattn/c_api_fused.h"
#include "cuattn/c_api_mla.h"
#include "cuattn/params/attention.h"
#include "src/guarded.h"

namespace cuattn {

// Says of each struct who initialises it, where its last field ends, and which defaults are not 0.
template <class Options>
struct OptionsRules;

template <>
struct OptionsRules<cuattn_attention_options> {
  static constexpr const char* kInit = "cuattn_attention_options_init";
  static constexpr size_t kEnd = offsetof(cuattn_attention_options, reserved) + sizeof(int32_t);
  static void set_defaults(cuattn_attention_options& o) {
    o.window_left = o.window_right = kUnlimited;
    o.dropout_seed = -1;
    o.q_scale = o.k_scale = o.v_scale = 1.0;
  }
};

template <>
struct OptionsRules<cuattn_flex_options> {
  static constexpr const char* kInit = "cuattn_flex_options_init";
  static constexpr size_t kEnd = offsetof(cuattn_flex_options, numbers) + sizeof(void*);
  static void set_defaults(cuattn_flex_options&) {}
};

template <>
struct OptionsRules<cuattn_backward_options> {
  static constexpr const char* kInit = "cuattn_backward_options_init";
  static constexpr size_t kEnd = offsetof(cuattn_backward_options, dlse) + sizeof(void*);
  static void set_defaults(cuattn_backward_options& o) {
    o.need = CUATTN_NEED_DQ | CUATTN_NEED_DK | CUATTN_NEED_DV;
    o.deterministic = -1;
  }
};

template <>
struct OptionsRules<cuattn_paged_options> {
  static constexpr const char* kInit = "cuattn_paged_options_init";
  static constexpr size_t kEnd = offsetof(cuattn_paged_options, q_scales) + sizeof(void*);
  static void set_defaults(cuattn_paged_options& o) {
    o.causal = 1;
    o.window_left = o.window_right = kUnlimited;
    o.q_scale = o.k_scale = o.v_scale = 1.0;
    o.partition_size = 512;
    o.max_context_len = -1;
  }
};

template <>
struct OptionsRules<cuattn_cache_options> {
  static constexpr const char* kInit = "cuattn_cache_options_init";
  static constexpr size_t kEnd = offsetof(cuattn_cache_options, context_lens) + sizeof(void*);
  static void set_defaults(cuattn_cache_options&) {}
};

template <>
struct OptionsRules<cuattn_quantize_options> {
  static constexpr const char* kInit = "cuattn_quantize_options_init";
  static constexpr size_t kEnd = offsetof(cuattn_quantize_options, shift_mean) + sizeof(void*);
  static void set_defaults(cuattn_quantize_options&) {}
};

template <>
struct OptionsRules<cuattn_prefix_options> {
  static constexpr const char* kInit = "cuattn_prefix_options_init";
  static constexpr size_t kEnd = offsetof(cuattn_prefix_options, salt_bytes) + sizeof(int64_t);
  static void set_defaults(cuattn_prefix_options&) {}
};

template <>
struct OptionsRules<cuattn_rope_options> {
  static constexpr const char* kInit = "cuattn_rope_options_init";
  static constexpr size_t kEnd = offsetof(cuattn_rope_options, seqused_k) + sizeof(void*);
  static void set_defaults(cuattn_rope_options& o) { o.seqlen_k = -1; }
};

template <>
struct OptionsRules<cuattn_norm_options> {
  static constexpr const char* kInit = "cuattn_norm_options_init";
  static constexpr size_t kEnd = offsetof(cuattn_norm_options, residual_out) + sizeof(void*);
  static void set_defaults(cuattn_norm_options& o) { o.eps = 1e-6; }
};

template <>
struct OptionsRules<cuattn_sample_options> {
  static constexpr const char* kInit = "cuattn_sample_options_init";
  static constexpr size_t kEnd = offsetof(cuattn_sample_options, offsets) + sizeof(void*);
  static void set_defaults(cuattn_sample_options& o) {
    o.temperature = o.top_p = 1.0;
    o.seed = -1;
  }
};

constexpr size_t kMostOptionBytes = 4096;  // more is no size but what lay in memory

template <class Options>
void require_options_size(const char* function, size_t bytes) {
  constexpr size_t kAlign = alignof(Options);
  CUATTN_REQUIRE(bytes >= kAlign && bytes % kAlign == 0 && bytes <= kMostOptionBytes, function,
                 ": options must be initialised by ", OptionsRules<Options>::kInit,
                 ", got struct_size ", bytes, "; pass it sizeof *options");
}

template <class Options>
Options default_options() {
  // Note: callers copy whole structs, so a later field in padding would be read before it was set.
  static_assert(OptionsRules<Options>::kEnd == sizeof(Options), "the struct must end in a field");
  Options options{};
  options.struct_size = sizeof(Options);
  OptionsRules<Options>::set_defaults(options);
  return options;
}

// Writes the defaults into the `bytes` that the caller's struct has; leaves a message where there
// are none.
template <class Options>
void init_options(const char* function, Options* options, size_t bytes) noexcept {
  guarded([&] {
    require_given(function, "options", options);
    require_options_size<Options>(function, bytes);
    Options defaults = default_options<Options>();
    defaults.struct_size = bytes;
    std::memset(static_cast<void*>(options), 0, bytes);
    std::memcpy(static_cast<void*>(options), &defaults,
                bytes < sizeof(Options) ? bytes : sizeof(Options));
  });
}

// A field that this library does not have is refused, never ignored.
inline void require_nothing_reserved(const char* function, int32_t reserved) {
  if (reserved == 0) return;
  fail<NotImplemented>(function, ": options must have 0 in reserved, got ", reserved,
                       "; use a newer library or leave the field 0");
}

// The options of a caller as this library knows them: `given` itself, or `room` where the sizes
// differ.
template <class Options>
const Options& known_options(const char* function, const Options* given, Options& room) {
  size_t bytes = given == nullptr ? 0 : given->struct_size;
  if (bytes == sizeof(Options)) return *given;
  require_options_size<Options>(function, bytes);
  room = default_options<Options>();
  size_t common = bytes < sizeof(Options) ? bytes : sizeof(Options);
  std::memcpy(&room, given, common);
  room.struct_size = sizeof(Options);
  const char* from = reinterpret_cast<const char*>(given);
  for (size_t at = common; at < bytes; ++at) {
    if (from[at] != 0) {
      fail<NotImplemented>(function,
                           ": options set a field that this library does not have, at byte ", at,
                           " of ", bytes, "; it knows ", sizeof(Options),
                           " bytes, so use a newer library or leave the field 0");
    }
  }
  return room;
}

}  // namespace cuattn
