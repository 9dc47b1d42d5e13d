// SPDX-License-Identifier: Apache-2.0
// Two arrays share a byte where a sum over all their axes, each index times its stride, takes one
// certain value. Such a sum is sought axis by axis, from the largest stride down: what the smaller
// axes can still add leaves an index or two to try wherever strides are nested, as those of slices
// are. The general question is NP-complete; the search ends after kMostSteps.
#include "src/check/overlap.h"

#include <algorithm>

#include "cuattn/error.h"

namespace cuattn {
namespace {

constexpr int32_t kMostSteps = 10'000;  // some 50 microseconds

// to += a * b; false where that is no int64: strides that no memory has.
bool add_product(int64_t a, int64_t b, int64_t& to) {
  int64_t product;
  return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(to, product, &to);
}

// Whether sum_i terms[i].stride * x[i] = target for some 0 <= x[i] <= terms[i].most.
class Sums {
 public:
  // Equal strides become one term, whatever share of it is whose.
  void add(int64_t stride, int64_t most) {
    if (most == 0) return;
    int32_t at = num_;
    while (at > 0 && terms_[at - 1].stride < stride) --at;
    if (at > 0 && terms_[at - 1].stride == stride) {
      terms_[at - 1].most += most;
      return;
    }
    std::copy_backward(terms_ + at, terms_ + num_, terms_ + num_ + 1);
    terms_[at] = {stride, most};
    ++num_;
  }

  // `without_center`: the solution with every x[i] = most / 2 does not count.
  bool reach(int64_t target, bool without_center) {
    rest_[num_] = 0;
    for (int32_t i = num_ - 1; i >= 0; --i) {
      rest_[i] = rest_[i + 1];
      if (!add_product(terms_[i].stride, terms_[i].most, rest_[i])) return true;
    }
    return reach_from(0, target, without_center);
  }

 private:
  bool reach_from(int32_t i, int64_t target, bool is_center) {
    if (i == num_) return target == 0 && !is_center;
    if (++steps_ > kMostSteps) return true;
    const auto& [stride, most] = terms_[i];
    int64_t missing = std::max<int64_t>(target - rest_[i + 1], 0);
    int64_t low = missing == 0 ? 0 : (missing - 1) / stride + 1;
    for (int64_t x = std::min(most, target / stride); x >= low; --x) {
      if (reach_from(i + 1, target - x * stride, is_center && 2 * x == most)) return true;
    }
    return false;
  }

  struct Term {
    int64_t stride, most;
  };
  int32_t num_ = 0, steps_ = 0;
  Term terms_[2 * kMaxDims + 2];
  int64_t rest_[2 * kMaxDims + 3];  // what the terms from i on can add
};

// The axes of one array in bytes; those that continue the elements without a gap become one run.
void add_axes(const Footprint& array, Sums& sums) {
  Axis sorted[kMaxDims];
  std::copy_n(array.axes, array.num_axes, sorted);
  std::sort(sorted, sorted + array.num_axes,
            [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  int64_t run = 1;  // elements
  for (const Axis* axis = sorted; axis < sorted + array.num_axes; ++axis) {
    if (axis->stride == run) {
      run *= axis->extent;
    } else {
      sums.add(axis->stride * array.item_bytes, axis->extent - 1);
    }
  }
  sums.add(1, run * array.item_bytes - 1);
}

}  // namespace

bool share_memory(const Footprint& a, const Footprint& b) {
  if (!a.is_near(b)) return false;
  // a.begin + (sum over a) = b.begin + (sum over b), where an index of b is counted from its end.
  Sums sums;
  add_axes(a, sums);
  add_axes(b, sums);
  return sums.reach(static_cast<int64_t>(b.end - 1 - a.begin), false);
}

bool overlaps_itself(const TensorView& view) {
  // Axes from the smallest stride to the largest; most views have them in this order.
  Axis axes[kMaxDims];
  int32_t num_axes = 0;
  for (int32_t axis = view.ndim - 1; axis >= 0; --axis) {
    if (view.shape[axis] <= 1) continue;
    int32_t at = num_axes++;
    for (; at > 0 && axes[at - 1].stride > view.strides[axis]; --at) axes[at] = axes[at - 1];
    axes[at] = {view.shape[axis], view.strides[axis]};
  }
  bool is_nested = true;
  int64_t last = 0;  // the last element, from the first
  for (int32_t i = 0; i < num_axes; ++i) {
    if (axes[i].stride == (i == 0 ? 0 : axes[i - 1].stride)) return true;
    is_nested &= axes[i].stride > last;
    if (!add_product(axes[i].extent - 1, axes[i].stride, last)) return true;
  }
  if (is_nested) return false;
  // Two elements lie at one address where the differences of their indices, times the strides, add
  // to 0; each difference is counted from the smallest that there is.
  Sums sums;
  for (int32_t i = 0; i < num_axes; ++i) sums.add(axes[i].stride, 2 * (axes[i].extent - 1));
  return sums.reach(last, true);
}

bool is_same_view(const TensorView& a, const TensorView& b) {
  bool same = a.data == b.data && a.ndim == b.ndim && a.dtype.bits == b.dtype.bits;
  for (int32_t axis = 0; same && axis < a.ndim; ++axis) {
    same = a.shape[axis] == b.shape[axis] &&
           (a.shape[axis] <= 1 || a.strides[axis] == b.strides[axis]);
  }
  return same;
}

void refuse_shared(const char* function, const char* written, const char* other,
                   const char* way_out) {
  fail<InvalidArgument>(function, ": ", written, " must not share memory with ", other,
                        ", got overlapping arrays; ", way_out);
}

}  // namespace cuattn
