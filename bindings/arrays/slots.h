// SPDX-License-Identifier: Apache-2.0
// Where rows go on their way into a cache: slot_mapping, or block_tables and context_lens. Next:
// cache.cpp, mla.cpp.
#pragma once

#include <optional>

#include "bindings/arrays/import.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {

struct SlotArrays {
  const DLTensor* slot_mapping = nullptr;

  // Those that are given, for a call whose first array is `home`.
  void import(const char* op, nb::handle slots_arg, nb::handle tables_arg, nb::handle lens_arg,
              const CallStream& stream, const Array& home, cuattn_cache_options& options) {
    auto read = [&](const char* name, nb::handle source, std::optional<Array>& array) {
      return import_given(op, name, source, stream, home, array);
    };
    slot_mapping = read("slot_mapping", slots_arg, slots_);
    options.block_tables = read("block_tables", tables_arg, tables_);
    options.context_lens = read("context_lens", lens_arg, lens_);
  }

 private:
  std::optional<Array> slots_, tables_, lens_;
};

}  // namespace cuattn::bindings
