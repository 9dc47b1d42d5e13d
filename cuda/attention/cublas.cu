// SPDX-License-Identifier: Apache-2.0
// Rung three, backend="cublas": batched GEMM, softmax of each row, batched GEMM, for dense batches
// with every option but dropout. cuBLAS is found at run time and never linked: an already loaded library first,
// then the file that CUATTN_CUBLAS_PATH names (the Python package points it at NVIDIA's wheels),
// then the loader's search path. Next: simt.cuh.
// Note: P V multiplies the zeros of hidden keys; a NaN or infinity in their V reaches the output.
#include <dlfcn.h>
#include <library_types.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "cuattn/plan.h"
#include "cuda/attention/softmax_rows.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

// 1. The part of cuBLAS's C interface in use, major versions 12 and 13; from its documentation.
using Handle = void*;
using Status = int;  // 0 = success
constexpr int kOpN = 0, kOpT = 1;
constexpr int kCompute32F = 68;           // float32 throughout; TF32 is another number
constexpr int kGemmDefault = -1;          // the library chooses
constexpr int kMathDefault = 0;           // no TF32
constexpr int kMathNoHalfReduction = 16;  // split sums stay float32 when the result is 16 bits wide

struct Cublas {
  Status (*create)(Handle*);
  Status (*set_stream)(Handle, cudaStream_t);
  Status (*set_workspace)(Handle, void*, size_t);
  Status (*set_math_mode)(Handle, int);
  Status (*gemm)(Handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k, const void* alpha,
                 const void* a, cudaDataType type_a, int64_t ld_a, long long stride_a,
                 const void* b, cudaDataType type_b, int64_t ld_b, long long stride_b,
                 const void* beta, void* c, cudaDataType type_c, int64_t ld_c, long long stride_c,
                 int64_t count, int compute_type, int algorithm);
  const char* (*status_name)(Status);
  const char* (*status_string)(Status);
};

// 2. Finding it.
constexpr std::array<const char*, 2> kLibraryNames = {"libcublas.so.13", "libcublas.so.12"};

void* open_library() {
  for (const char* name : kLibraryNames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  if (const char* path = std::getenv("CUATTN_CUBLAS_PATH"); path != nullptr && *path != '\0') {
    // Its dependency lies beside it; loaded first, it is found wherever the folder is.
    std::string dependency = path;
    size_t at = dependency.rfind("libcublas.so");
    if (at != std::string::npos) {
      dlopen(dependency.replace(at, 9, "libcublasLt").c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  for (const char* name : kLibraryNames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

template <class Function>
bool find_symbol(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// nullptr where there is no usable cuBLAS. Success is remembered, failure is not: a framework
// imported later may bring the library. Neither the library nor the handles are released: at exit
// the driver may be gone before us.
const Cublas* find_cublas() {
  static std::mutex mutex;
  static Cublas api;
  static bool found = false;
  std::lock_guard lock(mutex);
  if (found) return &api;
  void* library = open_library();
  if (library == nullptr) return nullptr;
  found = find_symbol(library, "cublasCreate_v2", api.create) &&
          find_symbol(library, "cublasSetStream_v2", api.set_stream) &&
          find_symbol(library, "cublasSetWorkspace_v2", api.set_workspace) &&
          find_symbol(library, "cublasSetMathMode", api.set_math_mode) &&
          find_symbol(library, "cublasGemmStridedBatchedEx_64", api.gemm) &&
          find_symbol(library, "cublasGetStatusName", api.status_name) &&
          find_symbol(library, "cublasGetStatusString", api.status_string);
  return found ? &api : nullptr;
}

void check(const Cublas& api, Status status, const char* call) {
  if (status == 0) return;
  cudaGetLastError();  // cuBLAS may leave an error behind; it belongs to this call
  fail<CudaError>(call, " failed: ", api.status_name(status), ": ", api.status_string(status));
}

// 3. One handle per device, used by one thread at a time: it holds the stream and the workspace.
struct DeviceHandle {
  std::mutex mutex;
  Handle handle = nullptr;
};

DeviceHandle& handle_of(int device_id) {
  static std::mutex mutex;
  static auto& handles = *new std::map<int, DeviceHandle>;  // never destroyed, see find_cublas()
  std::lock_guard lock(mutex);
  return handles[device_id];
}

// Creating a handle allocates and synchronises: the one exception to "no call allocates", on a
// device's first call.
void ensure_handle(const Cublas& api, DeviceHandle& device, cudaStream_t stream) {
  if (device.handle != nullptr) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  CUATTN_CUDA_TRY(cudaStreamIsCapturing(stream, &capture));
  CUATTN_REQUIRE(capture == cudaStreamCaptureStatusNone,
                 "attention: the first call of backend cublas on a device creates the cuBLAS "
                 "handle, which a stream capture cannot hold; run the call once before capturing");
  Handle handle = nullptr;
  check(api, api.create(&handle), "cublasCreate");
  check(api, api.set_math_mode(handle, kMathDefault | kMathNoHalfReduction), "cublasSetMathMode");
  device.handle = handle;
}

// 4. A GEMM over batch, key head and query head of a group, each with strides of its own.
// cuBLAS is column major: a row-major [rows, columns] with row stride s is its [columns, rows] with
// leading dimension s.
struct Matrix {
  const void* data;
  cudaDataType type;
  int64_t leading;  // elements from one row to the next
};

// One axis of the batch: its length, and the step in elements it makes in A, B and C.
struct Axis {
  int64_t count;
  std::array<int64_t, 3> steps;

  bool continues(const Axis& inner) const {  // both walk as one longer axis
    for (int i = 0; i < 3; ++i) {
      if (steps[i] != inner.count * inner.steps[i]) return false;
    }
    return true;
  }
};

// Fuses neighbours (batch and heads of a packed tensor walk as one axis), longest first: the
// longest goes into the batched call, the others are loops of calls. `axes` outer to inner.
std::array<Axis, 3> arrange(const std::array<Axis, 3>& axes) {
  std::array<Axis, 3> fused{Axis{1, {}}, Axis{1, {}}, Axis{1, {}}};
  int last = -1;
  for (int i = 2; i >= 0; --i) {
    if (axes[i].count == 1) continue;
    if (last >= 0 && axes[i].continues(fused[last])) {
      fused[last].count *= axes[i].count;
    } else {
      fused[++last] = axes[i];
    }
  }
  std::sort(fused.begin(), fused.end(),
            [](const Axis& x, const Axis& y) { return x.count > y.count; });
  return fused;
}

size_t size_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }

const char* advance(const Matrix& matrix, int64_t elements) {
  return static_cast<const char*>(matrix.data) +
         elements * static_cast<int64_t>(size_of(matrix.type));
}

struct Gemm {  // C [m, n] = op(A) [m, k] B [k, n], column major
  const char* what;
  int op_a;
  int64_t m, n, k;
  Matrix a, b, c;

  void run(const Cublas& api, Handle handle, const std::array<Axis, 3>& axes) const {
    constexpr int64_t kMaxCount = 32768;  // a grid axis of 65,535 holds the batch of some kernels
    constexpr float kOne = 1.0f, kZero = 0.0f;
    auto [batched, middle, outer] = arrange(axes);
    for (int64_t x = 0; x < outer.count; ++x) {
      for (int64_t y = 0; y < middle.count; ++y) {
        for (int64_t z = 0; z < batched.count; z += kMaxCount) {
          std::array<int64_t, 3> at;
          for (int i = 0; i < 3; ++i) {
            at[i] = x * outer.steps[i] + y * middle.steps[i] + z * batched.steps[i];
          }
          check(api,
                api.gemm(handle, op_a, kOpN, m, n, k, &kOne, advance(a, at[0]), a.type, a.leading,
                         batched.steps[0], advance(b, at[1]), b.type, b.leading, batched.steps[1],
                         &kZero, const_cast<char*>(advance(c, at[2])), c.type, c.leading,
                         batched.steps[2], std::min(kMaxCount, batched.count - z), kCompute32F,
                         kGemmDefault),
                what);
        }
      }
    }
  }
};

// The row stride as cuBLAS wants it: at least the row's length. That of a single row means nothing.
int64_t leading(const char* name, int64_t stride, int64_t rows, int64_t row_length) {
  if (rows == 1) return row_length;
  if (stride < row_length) {
    fail<NotImplemented>("attention: backend cublas needs rows that do not overlap, ", name,
                         " has rows of ", row_length, " elements ", stride,
                         " apart; copy it or use backend='auto'");
  }
  return stride;
}

// 5. The three steps. Workspace: float32 scores, probabilities (16-bit dtypes), cuBLAS's own part.
template <DType kType>
void run_steps(const AttentionParams& p, char* workspace, const Cublas& api, Handle handle,
               cudaStream_t stream) {
  using T = device::Element<kType>;
  constexpr cudaDataType kCudaType = kType == DType::f32   ? CUDA_R_32F
                                     : kType == DType::f16 ? CUDA_R_16F
                                                           : CUDA_R_16BF;
  int64_t heads = p.num_heads_q, group = p.num_heads_q / p.num_heads_kv;
  int64_t queries = p.seqlen_q, keys = p.seqlen_kv, scores_per_head = queries * keys;
  float* scores = reinterpret_cast<float*>(workspace);
  T* probs = reinterpret_cast<T*>(workspace);  // float32: where the scores are
  workspace += whole_pieces(sizeof(float) * p.batch * heads * scores_per_head);
  if (kType != DType::f32) {
    probs = reinterpret_cast<T*>(workspace);
    workspace += whole_pieces(sizeof(T) * p.batch * heads * scores_per_head);
  }

  check(api, api.set_stream(handle, stream), "cublasSetStream");
  check(api, api.set_workspace(handle, workspace, kCublasBytes), "cublasSetWorkspace");

  Strides map{heads * scores_per_head, keys, scores_per_head};  // of scores and probs
  auto axes = [&](const Strides& kv, const Strides& b, const Strides& c) {
    return std::array<Axis, 3>{Axis{p.batch, {kv.batch, b.batch, c.batch}},
                               Axis{p.num_heads_kv, {kv.head, group * b.head, group * c.head}},
                               Axis{group, {0, b.head, c.head}}};
  };
  Matrix q{p.q, kCudaType, leading("q", p.q_strides.seq, queries, p.head_dim)};
  Matrix k{p.k, kCudaType, leading("k", p.k_strides.seq, keys, p.head_dim)};
  Matrix v{p.v, kCudaType, leading("v", p.v_strides.seq, keys, p.head_dim_v)};
  Matrix out{p.out, kCudaType, leading("out", p.out_strides.seq, queries, p.head_dim_v)};

  Gemm scores_gemm{"cublasGemmStridedBatchedEx (Q K^T)", kOpT, keys, queries, p.head_dim, k, q,
                   Matrix{scores, CUDA_R_32F, keys}};
  scores_gemm.run(api, handle, axes(p.k_strides, p.q_strides, map));
  launch_softmax_rows<kType>(p, scores, probs, stream);
  Gemm out_gemm{"cublasGemmStridedBatchedEx (P V)", kOpN, p.head_dim_v, queries, keys, v,
                Matrix{probs, kCudaType, keys},     out};
  out_gemm.run(api, handle, axes(p.v_strides, map, p.out_strides));
}

}  // namespace

bool cublas_available() { return find_cublas() != nullptr; }

void launch_cublas(const AttentionParams& p, void* workspace, int device_id, cudaStream_t stream) {
  CUATTN_ASSERT(p.cu_seqlens_q == nullptr && p.cu_seqlens_kv == nullptr && p.seqused_q == nullptr &&
                    p.seqused_kv == nullptr && p.kv_start == nullptr,
                "cublas: dense batches only");
  if (int64_t{p.batch} * p.num_heads_q * p.seqlen_q == 0) return;
  if (p.seqlen_kv == 0) return launch_naive(p, workspace, stream);  // it writes the empty rows
  const Cublas* api = find_cublas();
  if (api == nullptr) {
    fail<NotImplemented>(
        "attention: backend cublas found no libcublas.so.13 or .12; install nvidia-cublas, set "
        "CUATTN_CUBLAS_PATH to the library file, or use backend='auto'");
  }
  DeviceHandle& device = handle_of(device_id);
  std::lock_guard lock(device.mutex);
  ensure_handle(*api, device, stream);
  char* memory = static_cast<char*>(workspace);
  switch (p.dtype) {
    case DType::f32: return run_steps<DType::f32>(p, memory, *api, device.handle, stream);
    case DType::f16: return run_steps<DType::f16>(p, memory, *api, device.handle, stream);
    case DType::bf16: return run_steps<DType::bf16>(p, memory, *api, device.handle, stream);
    default: CUATTN_ASSERT(false, "cublas: dtype ", static_cast<int>(p.dtype));
  }
}

}  // namespace cuattn
