// SPDX-License-Identifier: Apache-2.0
// apply_rope, add_residual, rms_norm, layer_norm, act_mul and bias_act: picks the instruction set
// and spreads the rows over the threads. Next: fused_rows.cpp (one row).
#include "cpu/fused.h"

#include <string_view>
#include <vector>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cuattn/names.h"

namespace cuattn::cpu {

namespace baseline {
extern const RowsKernel kRowsKernel;
}
#if defined(CUATTN_CPU_AVX)
namespace avx2 {
extern const RowsKernel kRowsKernel;
}
namespace avx512 {
extern const RowsKernel kRowsKernel;
}
#endif

namespace {

constexpr double kFlopsPerByte = 0.25;  // work of one byte moved, in the units of parallel_for

const RowsKernel& rows_kernel() {
#if defined(CUATTN_CPU_AVX)
  std::string_view isa = isa_name();
  if (isa == avx512::kRowsKernel.isa) return avx512::kRowsKernel;
  if (isa == avx2::kRowsKernel.isa) return avx2::kRowsKernel;
#endif
  return baseline::kRowsKernel;
}

int64_t bytes_of(DType dtype) { return static_cast<int64_t>(itemsize(dtype)); }

const char* at(const void* data, int64_t element, DType dtype) {
  return static_cast<const char*>(data) + element * bytes_of(dtype);
}

// A vector of a norm as floats, `offset` added.
std::vector<float> floats_of(const RowsKernel& kernel, const NormParams& p, const void* vector,
                             float offset) {
  std::vector<float> floats(static_cast<size_t>(p.columns));
  kernel.widen(vector, 0, p.columns, p.weight_dtype, floats.data());
  for (float& x : floats) x += offset;
  return floats;
}

}  // namespace

void rotate(const RotateParams& p) {
  const RowsKernel& kernel = rows_kernel();
  double work = 2.0 * kFlopsPerByte * static_cast<double>(p.batch * p.seqlen) * p.num_heads *
                p.head_dim * static_cast<double>(bytes_of(p.dtype));
  parallel_for(p.batch * p.seqlen, work, [&](int64_t index) {
    int64_t b = index / p.seqlen, row = index % p.seqlen, position = p.position(b, row);
    const void* x = at(p.x, b * p.x_strides.batch + row * p.x_strides.seq, p.dtype);
    const char* out = at(p.out, b * p.out_strides.batch + row * p.out_strides.seq, p.dtype);
    kernel.rotate(p, x, const_cast<char*>(out), p.cos + position * p.cos_stride,
                  p.sin + position * p.sin_stride);
  });
}

void add(const AddParams& p) {
  const RowsKernel& kernel = rows_kernel();
  int64_t tokens = p.batch * p.seqlen, columns = int64_t{p.num_heads} * p.head_dim;
  double bytes = static_cast<double>(bytes_of(p.x_dtype) + 2 * bytes_of(p.dtype));
  double work = kFlopsPerByte * bytes * static_cast<double>(tokens * columns);
  parallel_for(tokens, work, [&](int64_t index) {
    int64_t b = index / p.seqlen, row = index % p.seqlen;
    auto place = [&](const Strides& strides) { return b * strides.batch + row * strides.seq; };
    const char* out = at(p.out, place(p.out_strides), p.dtype);
    kernel.add(p, at(p.x, place(p.x_strides), p.x_dtype),
               at(p.residual, place(p.residual_strides), p.dtype), const_cast<char*>(out));
  });
}

void norm(const NormParams& p) {
  const RowsKernel& kernel = rows_kernel();
  std::vector<float> weight = floats_of(kernel, p, p.weight, p.weight_offset), bias;
  if (p.bias != nullptr) bias = floats_of(kernel, p, p.bias, 0.0f);
  NormVectors vectors{weight.data(), p.bias != nullptr ? bias.data() : nullptr};
  double work = 4.0 * kFlopsPerByte * static_cast<double>(p.rows) *
                static_cast<double>(p.columns * bytes_of(p.dtype));
  parallel_for(p.rows, work, [&](int64_t row) {
    thread_local std::vector<float> h;
    if (h.size() < static_cast<size_t>(p.columns)) h.resize(static_cast<size_t>(p.columns));
    kernel.norm(p, vectors, row, h.data());
  });
}

void activate(const ActivationParams& p) {
  const RowsKernel& kernel = rows_kernel();
  double work = 8.0 * static_cast<double>(p.rows) * static_cast<double>(p.columns);
  parallel_for(p.rows, work, [&](int64_t row) { kernel.activate(p, row); });
}

}  // namespace cuattn::cpu
