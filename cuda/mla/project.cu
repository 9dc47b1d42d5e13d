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

// ---- 16 bits: a block has a tile of out, one or two warps high and as many wide as it takes, and steps
// of 64 along the inner axis through a ring of stages. A number is summed in one order in all tiles.

template <int kRows_, int kColumns_, int kWarpRows_, int kWarpColumns_, int kStages_>
struct ProjectTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;
  static constexpr int kWarpsWide = kColumns / kWarpColumns;
  static constexpr int kThreads = 32 * kWarpsWide * (kRows / kWarpRows);
  // A stage: rows of x, then of proj; each is 64 numbers long.
  static constexpr int kXBytes = kRows * 128, kStageBytes = kXBytes + kColumns * 128;
  static constexpr int kBytes = kStages * kStageBytes;
};
using FewRows = ProjectTile<16, 64, 16, 16, 4>;     // decode: proj is most of what is read
using SomeRows = ProjectTile<64, 64, 32, 32, 2>;    // a tile for each SM, and more
using ManyRows = ProjectTile<128, 128, 64, 32, 2>;  // reads half as much of L2
constexpr int kStep = 64, kSquareBytes = kStep * 128;

// Rows [row0, row0 + kRows) and columns [column0, column0 + 64) of a matrix to shared memory; zeros
// behind its ends.
template <int kRows, int kThreads>
__device__ __forceinline__ void load_rows(uint32_t to, const uint16_t* from, int64_t stride,
                                          int32_t row0, int32_t rows, int32_t column0,
                                          int32_t columns) {
  int chunk = threadIdx.x % 8, column = column0 + 8 * chunk;
#pragma unroll
  for (int pass = 0; pass < kRows * 8 / kThreads; ++pass) {
    int row = pass * (kThreads / 8) + threadIdx.x / 8;
    bool valid = row0 + row < rows && column < columns;
    const uint16_t* at = from + (row0 + row) * stride + column;
    device::cp_async16(to + device::swizzled<128>(row, chunk), valid ? at : from, valid);
  }
}

// The results of a warp through its own part of shared memory, so that memory is written 16 bytes a
// lane.
template <DType kType, class Tile>
__device__ __forceinline__ void store_warp(
    const ProjectParams& p, const Place& at, char* memory, int warp_row, int warp_column,
    const float (&sum)[Tile::kWarpRows / 16][Tile::kWarpColumns / 8][4]) {
  constexpr int kChunks = Tile::kWarpColumns / 8;
  int lane = threadIdx.x % 32;
  auto place = [&](int row, int chunk) {
    return memory + (row * kChunks + (chunk ^ (row * kChunks / 8 % kChunks))) * 16;
  };
#pragma unroll
  for (int i = 0; i < Tile::kWarpRows / 8; ++i) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const float* pair = &sum[i / 2][j][i % 2 * 2];
      *reinterpret_cast<uint32_t*>(place(8 * i + lane / 4, j) + lane % 4 * 4) =
          device::pack2<kType>(pair[0], pair[1]);
    }
  }
  __syncwarp();
  uint16_t* out = const_cast<uint16_t*>(rows_of<uint16_t>(p.out, p.out_strides, at));
  int chunk = lane % kChunks, column = at.column0 + warp_column + 8 * chunk;
#pragma unroll
  for (int pass = 0; pass < Tile::kWarpRows * kChunks / 32; ++pass) {
    int row = pass * (32 / kChunks) + lane / kChunks;
    if (at.row0 + warp_row + row >= p.rows || column >= p.outer) continue;
    *reinterpret_cast<uint4*>(out + (warp_row + row) * p.out_strides.seq + column) =
        *reinterpret_cast<const uint4*>(place(row, chunk));
  }
}

template <DType kType, bool kTranspose, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    project_sm80(const __grid_constant__ ProjectParams p) {
  constexpr int kWarpRows = Tile::kWarpRows, kWarpColumns = Tile::kWarpColumns;
  extern __shared__ __align__(1024) char smem[];
  Place at = find_place<Tile::kRows, Tile::kColumns>(p);
  const uint16_t* gX = rows_of<uint16_t>(p.x, p.x_strides, at);
  const uint16_t* gW = static_cast<const uint16_t*>(p.proj) + at.h * p.proj_stride_head;
  auto x_tile_of = [&](int step) {
    return device::smem_address(smem) + step % Tile::kStages * Tile::kStageBytes;
  };
  auto fill = [&](int step) {
    int32_t d0 = step * kStep;
    if (d0 < p.inner) {
      uint32_t x_tile = x_tile_of(step), w_tile = x_tile + Tile::kXBytes;
      load_rows<Tile::kRows, Tile::kThreads>(x_tile, gX, p.x_strides.seq, 0, p.rows - at.row0, d0,
                                             p.inner);
      if (kTranspose) {
        load_rows<Tile::kColumns, Tile::kThreads>(w_tile, gW, p.proj_stride_row, at.column0,
                                                  p.outer, d0, p.inner);
      } else {
#pragma unroll
        for (int i = 0; i < Tile::kColumns / 64; ++i)
          load_rows<kStep, Tile::kThreads>(w_tile + i * kSquareBytes, gW, p.proj_stride_row, d0,
                                           p.inner, at.column0 + 64 * i, p.outer);
      }
    }
    device::cp_async_commit();
  };
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int warp_row = warp / Tile::kWarpsWide * kWarpRows;
  int warp_column = warp % Tile::kWarpsWide * kWarpColumns;
  float sum[kWarpRows / 16][kWarpColumns / 8][4] = {};
#pragma unroll
  for (int step = 0; step < Tile::kStages - 1; ++step) fill(step);
  for (int step = 0; step * kStep < p.inner; ++step) {
    fill(step + Tile::kStages - 1);
    device::cp_async_wait<Tile::kStages - 1>();
    __syncthreads();
    uint32_t x_tile = x_tile_of(step), w_tile = x_tile + Tile::kXBytes;
#pragma unroll
    for (int part = 0; part < kStep / 16; ++part) {
      uint32_t x[kWarpRows / 16][4], w[kWarpColumns / 16][4];
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
        int row = warp_row + 16 * i + lane % 16;
        device::ldmatrix_x4(x[i], x_tile + device::swizzled<128>(row, 2 * part + lane / 16));
      }
#pragma unroll
      for (int i = 0; i < kWarpColumns / 16; ++i) {
        if (kTranspose) {  // rows of proj are columns of out
          int column = warp_column + 16 * i + lane / 16 * 8 + lane % 8;
          device::ldmatrix_x4(w[i],
                              w_tile + device::swizzled<128>(column, 2 * part + lane / 8 % 2));
        } else {
          int d = 16 * part + lane / 8 % 2 * 8 + lane % 8;
          int chunk = warp_column % 64 / 8 + 2 * i + lane / 16;
          uint32_t square = w_tile + warp_column / 64 * kSquareBytes;
          device::ldmatrix_x4_trans(w[i], square + device::swizzled<128>(d, chunk));
        }
      }
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; ++j) {
          device::mma_m16n8k16<kType>(sum[i][j], x[i], w[j / 2][2 * (j % 2)],
                                      w[j / 2][2 * (j % 2) + 1]);
        }
      }
    }
    __syncthreads();
  }
  device::cp_async_wait<0>();
  store_warp<kType, Tile>(p, at, smem + warp * kWarpRows * kWarpColumns * 2, warp_row, warp_column,
                          sum);
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

// Tiles of that size in out.
int64_t tiles_of(const ProjectParams& p, int rows, int columns) {
  return int64_t{p.batch} * p.num_heads * ceil_div(p.rows, rows) * ceil_div(p.outer, columns);
}

template <DType kType, bool kTranspose, class Tile>
void launch_tiles(const ProjectParams& p, cudaStream_t stream) {
  static uint64_t allowed = 0;
  auto* kernel = project_sm80<kType, kTranspose, Tile>;
  allow_shared_memory(kernel, Tile::kBytes, allowed);
  unsigned blocks = grid_blocks(tiles_of(p, Tile::kRows, Tile::kColumns), "project");
  kernel<<<blocks, Tile::kThreads, Tile::kBytes, stream>>>(p);
}

// The tile that rows fill, if there is one for every SM, or of 64 rows for every other; else a smaller one.
template <DType kType, bool kTranspose>
void launch_sm80(const ProjectParams& p, cudaStream_t stream) {
  int sms = device_attribute(cudaDevAttrMultiProcessorCount);
  int64_t some = tiles_of(p, SomeRows::kRows, SomeRows::kColumns);
  if (p.rows <= FewRows::kRows || 2 * some < sms) {
    launch_tiles<kType, kTranspose, FewRows>(p, stream);
  } else if (p.rows <= SomeRows::kRows || tiles_of(p, ManyRows::kRows, ManyRows::kColumns) < sms) {
    launch_tiles<kType, kTranspose, SomeRows>(p, stream);
  } else {
    launch_tiles<kType, kTranspose, ManyRows>(p, stream);
  }
}

void launch_product(const ProjectParams& p, cudaStream_t stream) {
  if (p.dtype == DType::f32) {
    unsigned blocks = grid_blocks(tiles_of(p, kSide, kSide), "project");
    project_simt<<<blocks, 256, 0, stream>>>(p);
  } else if (p.dtype == DType::f16) {
    p.transpose ? launch_sm80<DType::f16, true>(p, stream)
                : launch_sm80<DType::f16, false>(p, stream);
  } else {
    p.transpose ? launch_sm80<DType::bf16, true>(p, stream)
                : launch_sm80<DType::bf16, false>(p, stream);
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
