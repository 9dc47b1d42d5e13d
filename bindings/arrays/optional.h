// SPDX-License-Identifier: Apache-2.0
// The optional arrays of one call, as the lists of call/options.h name them. Next: results.h.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>

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
    // One after another, not in a loop: most are not given, and a loop takes longer to find out.
    [&]<size_t... kPlace>(std::index_sequence<kPlace...>) {
      ((is_given(args.*list[kPlace].source)
            ? import_one(op, list[kPlace], args, stream, home, options, arrays_[kPlace])
            : void()),
       ...);
    }(std::make_index_sequence<kCount>());
  }

 private:
  std::optional<Array> arrays_[kCount];

  template <class Args, class Options>
  static void import_one(const char* op, const ArrayOption<Args, Options>& option, const Args& args,
                         const CallStream& stream, const Array& home, Options& options,
                         std::optional<Array>& storage) {
    nb::handle source = args.*option.source;
    if (option.number != nullptr && !nb::hasattr(source, "__dlpack__")) {
      options.*option.number = parse_double(op, option.name, source);
      return;
    }
    Array& array = storage.emplace();
    array.import(op, option.name, source, stream, &home, option.is_output);
    options.*option.tensor = &array.tensor;
  }
};

}  // namespace cuattn::bindings
