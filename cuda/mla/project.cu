// SPDX-License-Identifier: Apache-2.0
// mla_project: a batched product over heads. 16-bit types on mma.sync tensor cores, float32 on CUDA
// cores; a thread block has a tile of one head. Columns that are only copied, of queries without a
// matrix and of rope, are a kernel of their own. Next: params/project.h.
#include "cuattn/device/mma_sm80.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using device::ceil_div;

// The tile of a thread block: rows and columns of out, in one batch entry and head.
struct Place {
  int32_t b, h, row0, column0;
};

template <int kRows, int kColumns>
__device__ __forceinline__ Place find_place(const ProjectParams& p) {
  uint32_t index = blockIdx.x;
  uint32_t columns = ceil_div(p.outer, kColumns), rows = ceil_div(p.rows, kRows);
  Place place;
  place.column0 = index % columns * kColumns;
  index /= columns;
  place.row0 = index % rows * kRows;
  index /= rows;
  place.h = index % p.num_heads;
  place.b = index / p.num_heads;
  return place;
}

template <class T>
__device__ __forceinline__ const T* rows_of(const void* data, const Strides& s, const Place& at) {
  return static_cast<const T*>(data) + at.b * s.batch + at.h * s.head + at.row0 * s.seq;
}

// ---- float32

constexpr int kSide = 64, kDepth = 16;  // of a tile; 256 threads with 4 x 4 results each

__global__ void __launch_bounds__(256) project_simt(const __grid_constant__ ProjectParams p) {
  __shared__ float x_tile[kDepth][kSide + 4], w_tile[kDepth][kSide + 4];
  Place at = find_place<kSide, kSide>(p);
  const float* gX = rows_of<float>(p.x, p.x_strides, at);
  const float* gW = static_cast<const float*>(p.proj) + at.h * p.proj_stride_head;
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float sum[4][4] = {};
  for (int32_t d0 = 0; d0 < p.inner; d0 += kDepth) {
    for (int item = threadIdx.x; item < kSide * kDepth; item += 256) {
      int row = item / kDepth, d = item % kDepth;
      bool valid = at.row0 + row < p.rows && d0 + d < p.inner;
      x_tile[d][row] = valid ? gX[row * p.x_strides.seq + d0 + d] : 0.0f;
      // The axis along which proj is contiguous goes to neighbouring threads.
      int c = p.transpose ? item / kDepth : item % kSide, e = p.transpose ? d : item / kSide;
      valid = at.column0 + c < p.outer && d0 + e < p.inner;
      int64_t from = p.transpose ? (at.column0 + c) * p.proj_stride_row + d0 + e
                                 : (d0 + e) * p.proj_stride_row + at.column0 + c;
      w_tile[e][c] = valid ? gW[from] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          sum[i][j] = fmaf(x_tile[d][ty + 16 * i], w_tile[d][tx + 16 * j], sum[i][j]);
      }
    }
    __syncthreads();
  }
  float* gOut = const_cast<float*>(rows_of<float>(p.out, p.out_strides, at));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int row = ty + 16 * i;
    if (at.row0 + row >= p.rows) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int column = at.column0 + tx + 16 * j;
      if (column < p.outer) gOut[row * p.out_strides.seq + column] = sum[i][j];
    }
  }
}

// ---- 16 bits: 64 x 64 results a block, 32 x 32 a warp, steps of 64 along the inner axis in two
// stages.

constexpr int kWarps = 4, kTile = 64, kTileBytes = kTile * kTile * 2;

// Rows [row0, row0 + 64) and columns [column0, column0 + 64) of a matrix to shared memory; zeros
// behind its ends.
__device__ __forceinline__ void load_square(uint32_t to, const uint16_t* from, int64_t stride,
                                            int32_t row0, int32_t rows, int32_t column0,
                                            int32_t columns) {
  int chunk = threadIdx.x % 8;
#pragma unroll
  for (int pass = 0; pass < kTile * 8 / (kWarps * 32); ++pass) {
    int row = pass * kWarps * 4 + threadIdx.x / 8, column = column0 + 8 * chunk;
    bool valid = row0 + row < rows && column < columns;
    const uint16_t* at = from + (row0 + row) * stride + column;
    device::cp_async16(to + device::swizzled<128>(row, chunk), valid ? at : from, valid);
  }
}

template <DType kType, bool kTranspose>
__global__ void __launch_bounds__(kWarps * 32)
    project_sm80(const __grid_constant__ ProjectParams p) {
  __shared__ __align__(1024) char smem[2][2][kTileBytes];  // stage: x, proj
  Place at = find_place<kTile, kTile>(p);
  const uint16_t* gX = rows_of<uint16_t>(p.x, p.x_strides, at);
  const uint16_t* gW = static_cast<const uint16_t*>(p.proj) + at.h * p.proj_stride_head;
  auto fill = [&](int stage, int32_t d0) {
    if (d0 < p.inner) {
      load_square(device::smem_address(smem[stage][0]), gX, p.x_strides.seq, 0, p.rows - at.row0,
                  d0, p.inner);
      uint32_t w_tile = device::smem_address(smem[stage][1]);
      if (kTranspose) {
        load_square(w_tile, gW, p.proj_stride_row, at.column0, p.outer, d0, p.inner);
      } else {
        load_square(w_tile, gW, p.proj_stride_row, d0, p.inner, at.column0, p.outer);
      }
    }
    device::cp_async_commit();
  };
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  float sum[2][4][4] = {};
  fill(0, 0);
  int stage = 0;
  for (int32_t d0 = 0; d0 < p.inner; d0 += kTile, stage ^= 1) {
    fill(stage ^ 1, d0 + kTile);
    device::cp_async_wait<1>();
    __syncthreads();
    uint32_t x_tile = device::smem_address(smem[stage][0]);
    uint32_t w_tile = device::smem_address(smem[stage][1]);
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      uint32_t x[2][4], w[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int row = warp_row + 16 * i + lane % 16;
        device::ldmatrix_x4(x[i], x_tile + device::swizzled<128>(row, 2 * step + lane / 16));
        if (kTranspose) {  // rows of proj are columns of out
          int column = warp_column + 16 * i + lane / 16 * 8 + lane % 8;
          device::ldmatrix_x4(w[i],
                              w_tile + device::swizzled<128>(column, 2 * step + lane / 8 % 2));
        } else {
          int d = 16 * step + lane / 8 % 2 * 8 + lane % 8;
          int chunk = warp_column / 8 + 2 * i + lane / 16;
          device::ldmatrix_x4_trans(w[i], w_tile + device::swizzled<128>(d, chunk));
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          device::mma_m16n8k16<kType>(sum[i][j], x[i], w[j / 2][2 * (j % 2)],
                                      w[j / 2][2 * (j % 2) + 1]);
        }
      }
    }
    __syncthreads();
  }
  uint16_t* gOut = const_cast<uint16_t*>(rows_of<uint16_t>(p.out, p.out_strides, at));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = warp_row + 16 * i + 8 * half + lane / 4;
      if (at.row0 + row >= p.rows) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int column = at.column0 + warp_column + 8 * j + 2 * (lane % 4);
        if (column >= p.outer) continue;
        *reinterpret_cast<uint32_t*>(gOut + row * p.out_strides.seq + column) =
            device::pack2<kType>(sum[i][j][2 * half], sum[i][j][2 * half + 1]);
      }
    }
  }
}

// ---- copies, 16 bytes a thread

__global__ void __launch_bounds__(256)
    copy_columns(const __grid_constant__ ProjectParams p, const char* from, Strides strides,
                 int32_t first_byte, int32_t chunks, int32_t itemsize) {
  int64_t items = int64_t{p.batch} * p.rows * p.num_heads * chunks;
  for (int64_t item = int64_t{blockIdx.x} * 256 + threadIdx.x; item < items;
       item += int64_t{gridDim.x} * 256) {
    int64_t chunk = item % chunks, rest = item / chunks;
    int64_t h = rest % p.num_heads, row = rest / p.num_heads % p.rows;
    int64_t b = rest / p.num_heads / p.rows;
    int64_t source = b * strides.batch + row * strides.seq + h * strides.head;
    const Strides& s = p.out_strides;
    int64_t target = b * s.batch + row * s.seq + h * s.head;
    char* to = static_cast<char*>(p.out) + target * itemsize + first_byte + 16 * chunk;
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(from + source * itemsize + 16 * chunk);
  }
}

void launch_copy(const ProjectParams& p, const void* from, const Strides& strides,
                 int32_t first_column, int32_t columns, cudaStream_t stream) {
  int32_t itemsize = p.dtype == DType::f32 ? 4 : 2, chunks = columns * itemsize / 16;
  int64_t items = int64_t{p.batch} * p.rows * p.num_heads * chunks;
  constexpr int64_t kMostBlocks = 8192;
  unsigned blocks =
      static_cast<unsigned>(items / 256 < kMostBlocks ? items / 256 + 1 : kMostBlocks);
  copy_columns<<<blocks, 256, 0, stream>>>(p, static_cast<const char*>(from), strides,
                                           first_column * itemsize, chunks, itemsize);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

void launch_product(const ProjectParams& p, cudaStream_t stream) {
  static_assert(kSide == kTile, "one grid for both");
  int64_t tiles = int64_t{ceil_div(p.rows, kTile)} * ceil_div(p.outer, kTile);
  unsigned blocks = grid_blocks(int64_t{p.batch} * p.num_heads * tiles, "project");
  if (p.dtype == DType::f32) {
    project_simt<<<blocks, 256, 0, stream>>>(p);
  } else if (p.dtype == DType::f16) {
    auto kernel = p.transpose ? project_sm80<DType::f16, true> : project_sm80<DType::f16, false>;
    kernel<<<blocks, kWarps * 32, 0, stream>>>(p);
  } else {
    auto kernel = p.transpose ? project_sm80<DType::bf16, true> : project_sm80<DType::bf16, false>;
    kernel<<<blocks, kWarps * 32, 0, stream>>>(p);
  }
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace

void launch_project(const ProjectParams& p, cudaStream_t stream) {
  if (p.proj == nullptr) {
    launch_copy(p, p.x, p.x_strides, 0, p.outer, stream);
  } else {
    launch_product(p, stream);
  }
  if (p.tail != nullptr) launch_copy(p, p.tail, p.tail_strides, p.outer, p.tail_dim, stream);
}

}  // namespace cuattn
