// SPDX-License-Identifier: Apache-2.0
// The optional arrays of one call, as the lists of call/options.h name them. Next: results.h.
#pragma once

#include <cstddef>
#include <optional>

#include "bindings/arrays/import.h"
#include "bindings/call/arguments.h"
#include "bindings/call/parse.h"

namespace cuattn::bindings {

template <size_t kCount>
class OptionalArrays {
 public:
  // Imports those of `list` that are given, for a call whose first array is `home`.
  template <class Args, class Options>
  void import(const char* op, const ArrayOption<Args, Options> (&list)[kCount], const Args& args,
              const CallStream& stream, const Array& home, Options& options) {
    for (size_t i = 0; i < kCount; ++i) {
      const ArrayOption<Args, Options>& option = list[i];
      nb::handle source = args.*option.source;
      if (!is_given(source)) continue;
      if (option.number != nullptr && !nb::hasattr(source, "__dlpack__")) {
        options.*option.number = parse_double(op, option.name, source);
        continue;
      }
      Array& array = arrays_[i].emplace();
      array.import(op, option.name, source, stream, &home, option.is_output);
      options.*option.tensor = &array.tensor;
    }
  }

 private:
  std::optional<Array> arrays_[kCount];
};

}  // namespace cuattn::bindings
