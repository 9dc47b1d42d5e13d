// SPDX-License-Identifier: Apache-2.0
// What rotates rows on their way into a cache: cos, sin and positions. Next: cache.cpp, mla.cpp.
#pragma once

#include <optional>

#include "bindings/arrays/import.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {

struct Turning {
  std::optional<Array> cos, sin, positions;

  // Those that are given, for a call whose first array is `home`.
  void import(const char* op, nb::handle cos_arg, nb::handle sin_arg, nb::handle positions_arg,
              const CallStream& stream, const Array& home, cuattn_cache_options& options) {
    auto read = [&](const char* name, nb::handle source, std::optional<Array>& array) {
      return import_given(op, name, source, stream, home, array);
    };
    options.cos = read("cos", cos_arg, cos);
    options.sin = read("sin", sin_arg, sin);
    options.positions = read("positions", positions_arg, positions);
  }
};

}  // namespace cuattn::bindings
