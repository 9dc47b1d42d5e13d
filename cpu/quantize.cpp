// SPDX-License-Identifier: Apache-2.0
// quantize and dequantize on the CPU: passes for the mean, for the scales and for the codes, over
// tasks of 128 rows of a head. Source: QuaRot, arXiv:2404.00456 (the rotation); SageAttention,
// arXiv:2410.02367 (the mean of the keys).
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace cuattn::cpu {
namespace {

constexpr int32_t kMostDim = 256;

// Rows [first, last) of one head.
struct Task {
  int32_t b, h;
  int64_t first, last;
};

int64_t blocks_of(int64_t rows) { return (rows + kScaleRows - 1) / kScaleRows; }

// Calls body(task, index) for all blocks of `rows` rows of all heads.
template <class Body>
void for_blocks(const QuantizeParams& p, int64_t rows, Body&& body) {
  int64_t blocks = blocks_of(rows);
  double work = 8.0 * p.batch * p.heads * static_cast<double>(rows) * p.dim;
  parallel_for(int64_t{p.batch} * p.heads * blocks, work, [&](int64_t index) {
    int64_t first = index % blocks * kScaleRows, head = index / blocks;
    body(Task{static_cast<int32_t>(head / p.heads), static_cast<int32_t>(head % p.heads), first,
              std::min(first + kScaleRows, rows)},
         index);
  });
}

int64_t offset(const QuantizeArray& array, const Task& task, int64_t row) {
  return task.b * array.strides.batch + row * array.strides.seq + task.h * array.strides.head;
}

void load(const QuantizeArray& array, const Task& task, int64_t row, int32_t dim, float* x) {
  int64_t at = offset(array, task, row);
  for (int32_t d = 0; d < dim; ++d)
    x[d] = load_element(array.data, at + d * array.channel, array.dtype);
}

// A row times the Hadamard matrices of R without their factor: one over each run of `size` channels.
void rotate_row(float* x, int32_t dim) {
  int32_t size = hadamard_size(dim);
  for (int32_t half = 1; half < size; half *= 2) {
    for (int32_t d = 0; d < dim; ++d) {
      if ((d & half) != 0) continue;
      float a = x[d], b = x[d + half];
      x[d] = a + b;
      x[d + half] = a - b;
    }
  }
}

// The factor of R that rows do not have yet.
float norm_of(const QuantizeParams& p) {
  return p.rotates ? 1.0f / std::sqrt(static_cast<float>(hadamard_size(p.dim))) : 1.0f;
}

// A row as it is rounded, not yet divided by its scale nor times norm. The signs of R come first, also
// to the mean: so a difference of 0 is +0, as on CUDA.
void prepare_row(const QuantizeParams& p, const Task& task, int64_t row, float* x) {
  load(p.x, task, row, p.dim, x);
  const float* mean = nullptr;
  if (p.mean != nullptr) mean = p.mean + task.b * p.mean_batch + task.h * p.mean_head;
  for (int32_t d = 0; d < p.dim; ++d) {
    float sign = p.rotates && flips_channel(d) ? -1.0f : 1.0f;
    x[d] *= sign;
    if (mean != nullptr) x[d] -= sign * mean[d];
  }
  if (p.rotates) rotate_row(x, p.dim);
}

// Of the finite elements of each channel of a head; 0 where there are none.
void write_means(const QuantizeParams& p) {
  double work = 2.0 * p.batch * p.heads * static_cast<double>(p.rows) * p.dim;
  parallel_for(int64_t{p.batch} * p.heads, work, [&](int64_t index) {
    Task task{static_cast<int32_t>(index / p.heads), static_cast<int32_t>(index % p.heads), 0, 0};
    std::vector<double> sums(p.dim), counts(p.dim);
    float x[kMostDim];
    for (int64_t row = 0; row < p.rows; ++row) {
      load(p.x, task, row, p.dim, x);
      for (int32_t d = 0; d < p.dim; ++d) {
        if (!std::isfinite(x[d])) continue;
        sums[d] += x[d];
        counts[d] += 1.0;
      }
    }
    float* mean = p.mean + task.b * p.mean_batch + task.h * p.mean_head;
    for (int32_t d = 0; d < p.dim; ++d)
      mean[d] = static_cast<float>(counts[d] == 0.0 ? 0.0 : sums[d] / counts[d]);
  });
}

// 1 where all elements are 0: no code but 0 is written then, and no scale is 0.
float scale_of(float largest, DType codes) {
  if (largest == 0.0f) return 1.0f;
  return std::max(largest / largest_code(codes), std::numeric_limits<float>::min());
}

// From the largest finite size of each block of rows, or of each channel of it, to those of the
// scale's elements.
void write_scales(const QuantizeParams& p) {
  int64_t blocks = blocks_of(p.rows);
  int32_t width = p.part == ScalePart::channels ? p.dim : 1;
  float norm = norm_of(p);
  std::vector<float> sizes(static_cast<size_t>(p.batch * int64_t{p.heads} * blocks * width));
  for_blocks(p, p.rows, [&](const Task& task, int64_t index) {
    float x[kMostDim];
    float* size = sizes.data() + index * width;
    for (int64_t row = task.first; row < task.last; ++row) {
      prepare_row(p, task, row, x);
      for (int32_t d = 0; d < p.dim; ++d) {
        float abs = std::fabs(x[d]) * norm;
        if (std::isfinite(x[d])) size[width == 1 ? 0 : d] = std::max(size[width == 1 ? 0 : d], abs);
      }
    }
  });
  const Float8Scale& s = p.scale;
  float* scales = const_cast<float*>(s.data);
  for (int64_t b = 0; b < s.extents[0]; ++b) {
    for (int64_t h = 0; h < s.extents[1]; ++h) {
      for (int64_t i = 0; i < s.extents[2]; ++i)
        scales[b * s.strides[0] + h * s.strides[1] + i * s.strides[2]] = 0.0f;
    }
  }
  auto place = [&](int32_t b, int32_t h, int64_t block, int32_t channel) {
    int64_t part = p.part == ScalePart::rows ? block : channel;
    return b * s.strides[0] + h / s.group * s.strides[1] + part * s.strides[2];
  };
  for (int64_t index = 0; index < static_cast<int64_t>(sizes.size()); ++index) {
    int64_t head = index / width / blocks;
    float& scale =
        scales[place(static_cast<int32_t>(head / p.heads), static_cast<int32_t>(head % p.heads),
                     index / width % blocks, static_cast<int32_t>(index % width))];
    scale = std::max(scale, sizes[index]);
  }
  for (int64_t b = 0; b < s.extents[0]; ++b) {
    for (int64_t h = 0; h < s.extents[1]; ++h) {
      for (int64_t i = 0; i < s.extents[2]; ++i) {
        float& scale = scales[b * s.strides[0] + h * s.strides[1] + i * s.strides[2]];
        scale = scale_of(scale, p.out.dtype);
      }
    }
  }
}

// The scale of an element.
float scale_at(const QuantizeParams& p, const Task& task, int64_t row, int32_t channel) {
  return p.scale.at(task.b, task.h, p.part == ScalePart::rows ? row / kScaleRows : channel);
}

// In one rounding to float.
void write_codes(const QuantizeParams& p) {
  double norm = norm_of(p);
  for_blocks(p, p.out_rows, [&](const Task& task, int64_t) {
    float x[kMostDim];
    for (int64_t row = task.first; row < task.last; ++row) {
      int64_t to = offset(p.out, task, row);
      if (row < p.rows) prepare_row(p, task, row, x);
      for (int32_t d = 0; d < p.dim; ++d) {
        double value = row < p.rows ? x[d] * norm / scale_at(p, task, row, d) : 0.0;
        store_element(p.out.data, to + d * p.out.channel, p.out.dtype, static_cast<float>(value));
      }
    }
  });
}

void write_shifts(const QuantizeParams& p) {
  for_blocks(p, p.rows, [&](const Task& task, int64_t) {
    float x[kMostDim];
    const float* mean =
        p.shift_mean + task.b * p.shift_mean_batch + task.h / p.shift_group * p.shift_mean_head;
    for (int64_t row = task.first; row < task.last; ++row) {
      load(p.x, task, row, p.dim, x);
      double dot = 0.0;
      for (int32_t d = 0; d < p.dim; ++d) dot += static_cast<double>(x[d]) * mean[d];
      p.shift[task.b * p.shift_batch + task.h * p.shift_head + row * p.shift_row] =
          static_cast<float>(dot);
    }
  });
}

}  // namespace

void quantize(const QuantizeParams& p) {
  if (p.gives_mean) write_means(p);
  if (p.gives_scale) write_scales(p);
  if (p.shift != nullptr) write_shifts(p);
  write_codes(p);
}

void dequantize(const QuantizeParams& p) {
  for_blocks(p, p.rows, [&](const Task& task, int64_t) {
    float x[kMostDim];
    for (int64_t row = task.first; row < task.last; ++row) {
      int64_t to = offset(p.out, task, row);
      load(p.x, task, row, p.dim, x);
      for (int32_t d = 0; d < p.dim; ++d)
        store_element(p.out.data, to + d * p.out.channel, p.out.dtype,
                      x[d] * scale_at(p, task, row, d));
    }
  });
}

}  // namespace cuattn::cpu
