// SPDX-License-Identifier: Apache-2.0
// mla_project on the CPU: a unit is some rows of one head. Next: matrix.cpp (the product).
#include <algorithm>
#include <cstring>

#include "cpu/flash.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace cuattn::cpu {
namespace {

constexpr int32_t kUnitRows = 64;  // for each conversion of a matrix to float

struct Unit {
  int32_t b, h, first, count;
};

int64_t offset(const Strides& strides, const Unit& unit) {
  return unit.b * strides.batch + unit.first * strides.seq + unit.h * strides.head;
}

// Columns of every row, side by side in both arrays.
void copy_rows(const void* from, const Strides& strides, void* to, int64_t to_stride, int32_t dim,
               const Unit& unit, int64_t itemsize) {
  const char* row = static_cast<const char*>(from) + offset(strides, unit) * itemsize;
  char* out = static_cast<char*>(to);
  for (int32_t i = 0; i < unit.count; ++i) {
    std::memcpy(out + i * to_stride * itemsize, row + i * strides.seq * itemsize,
                static_cast<size_t>(dim * itemsize));
  }
}

void run_unit(const ProjectParams& p, const Unit& unit) {
  const FlashKernel& kernel = flash_kernel();
  int64_t itemsize = p.dtype == DType::f32 ? 4 : 2;
  char* out = static_cast<char*>(p.out) + offset(p.out_strides, unit) * itemsize;
  if (p.proj == nullptr) {
    copy_rows(p.x, p.x_strides, out, p.out_strides.seq, p.outer, unit, itemsize);
  } else {
    MatrixUnit m{};
    m.x = static_cast<const char*>(p.x) + offset(p.x_strides, unit) * itemsize;
    m.w = static_cast<const char*>(p.proj) + unit.h * p.proj_stride_head * itemsize;
    m.out = out;
    m.x_stride = p.x_strides.seq;
    m.w_stride = p.proj_stride_row;
    m.out_stride = p.out_strides.seq;
    m.rows = unit.count;
    m.inner = p.inner;
    m.outer = p.outer;
    m.transpose = p.transpose;
    m.dtype = p.dtype;
    m.scratch = thread_scratch(kernel.matrix_floats(p.inner, p.outer));
    kernel.multiply(m);
  }
  if (p.tail == nullptr) return;
  copy_rows(p.tail, p.tail_strides, out + p.outer * itemsize, p.out_strides.seq, p.tail_dim, unit,
            itemsize);
}

}  // namespace

void project(const ProjectParams& p) {
  int64_t groups = (p.rows - 1) / kUnitRows + 1, heads = p.num_heads;
  double flops = 2.0 * p.batch * p.rows * heads * p.inner * p.outer;
  parallel_for(p.batch * heads * groups, flops, [&](int64_t index) {
    Unit unit{};
    unit.first = static_cast<int32_t>(index % groups) * kUnitRows;
    unit.count = std::min(kUnitRows, p.rows - unit.first);
    unit.h = static_cast<int32_t>(index / groups % heads);
    unit.b = static_cast<int32_t>(index / groups / heads);
    run_unit(p, unit);
  });
}

}  // namespace cuattn::cpu
