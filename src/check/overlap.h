// SPDX-License-Identifier: Apache-2.0
// Where the arrays of a call lie, so that what it writes shares no memory with what it reads, nor
// with what else it writes: kernels read and write in an order that no caller can rely on. Next:
// arrays.h.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "cuattn/tensor.h"

namespace cuattn {

// One axis of an array; the stride in elements.
struct Axis {
  int64_t extent, stride;
};

// The memory of an array: elements of item_bytes at every combination of its axes, all of them in
// [begin, end). Strides are not negative. Made for every array of every call, so nothing is done
// twice, and nothing for an array that is not there.
struct Footprint {
  const char* name;
  uintptr_t begin, end;  // equal: no element, or no array
  int64_t item_bytes;
  int32_t num_axes;  // those of more than one element whose stride is not 0
  Axis axes[kMaxDims];

  Footprint() {}  // of nothing yet
  Footprint(const char* name, const TensorView& view)
      : Footprint(name, view.data, view.dtype.bits / 8, {}) {
    if (view.data == nullptr) return;
    for (int32_t axis = 0; axis < view.ndim; ++axis) add({view.shape[axis], view.strides[axis]});
  }
  Footprint(const char* name, const void* data, int64_t item_bytes,
            std::initializer_list<Axis> shape)
      : name(name),
        begin(reinterpret_cast<uintptr_t>(data)),
        end(begin),
        item_bytes(item_bytes),
        num_axes(0) {
    if (data == nullptr) return;
    end += static_cast<uintptr_t>(item_bytes);
    for (const Axis& axis : shape) add(axis);
  }

  // Whether an element of each may lie between those of the other.
  bool is_near(const Footprint& other) const { return begin < other.end && other.begin < end; }

 private:
  void add(const Axis& axis) {
    if (axis.extent <= 0) begin = end = 0;
    if (axis.extent <= 1 || axis.stride == 0 || end == 0) return;
    axes[num_axes++] = axis;
    // Unsigned, because strides that no memory has must not be undefined here.
    end += static_cast<uintptr_t>(axis.extent - 1) * static_cast<uintptr_t>(axis.stride) *
           static_cast<uintptr_t>(item_bytes);
  }
};

// Whether two arrays have a byte in common. Exact, so that slices of one packed array are told
// apart; only where strides are so odd that the search would take long is the answer yes unproved.
bool share_memory(const Footprint& a, const Footprint& b);

// Whether two elements of an array lie at one address; the last sentence above holds here too.
bool overlaps_itself(const TensorView& view);

// The same elements in the same order.
bool is_same_view(const TensorView& a, const TensorView& b);

[[noreturn]] void refuse_shared(const char* function, const char* written, const char* other,
                                const char* way_out = "give it memory of its own");

// The arrays of one call, those that are written first. Throws InvalidArgument where one of these
// shares memory with another array.
class CallMemory {
 public:
  explicit CallMemory(const char* function) : function_(function) {}

  void writes(const Footprint& array) {
    if (array.begin == array.end) return;
    reads(array);
    written_[num_written_++] = array;
  }
  // As much of a workspace as the call uses. One that is too small ends where it does: the bytes
  // behind it are another array's, and its size is refused later.
  void writes_workspace(const void* data, size_t planned, size_t given) {
    writes({"workspace", data, 1, {{static_cast<int64_t>(std::min(planned, given)), 1}}});
  }
  void reads(const Footprint& array) const {
    if (array.begin == array.end) return;
    for (int32_t i = 0; i < num_written_; ++i) {
      if (written_[i].is_near(array) && share_memory(written_[i], array))
        refuse_shared(function_, written_[i].name, array.name);
    }
  }

 private:
  const char* function_;
  int32_t num_written_ = 0;
  Footprint written_[24];  // six gradients, a workspace, and those of captured arrays
};

}  // namespace cuattn
