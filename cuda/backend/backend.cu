// SPDX-License-Identifier: Apache-2.0
// The CUDA side of backend.h: a Plan becomes a launch. Compiled instances are found in the list
// that cuda/instances.cmake generates (instances.inc); the other kernels are called by name. Next:
// attention/sm80/forward.cuh, attention/simt.cuh, attention/naive.cu.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <mutex>

#include "cuattn/backend.h"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {

// Declarations of the generated wrappers.
namespace instances {
#define CUATTN_INSTANCE(kernel, rung, dtype, head_dim, head_dim_v, mask, score, archs) \
  void kernel##_##dtype##_##head_dim##x##head_dim_v##_##mask##_##score(                \
      const AttentionParams&, const AttentionSchedule&, cudaStream_t);
#include "instances.inc"
#undef CUATTN_INSTANCE
#define CUATTN_PAGED_INSTANCE(kernel, rung, dtype, head_dim, archs) \
  void kernel##_##dtype##_##head_dim(const PagedParams&, cudaStream_t);
#include "paged_instances.inc"
#undef CUATTN_PAGED_INSTANCE
}  // namespace instances

namespace {

struct Instance {
  Kernel kernel;
  DType dtype;
  int32_t head_dim, head_dim_v;
  MaskKind mask;
  ScoreKind score;
  const char* archs;
  void (*launch)(const AttentionParams&, const AttentionSchedule&, cudaStream_t);
};

constexpr Instance kInstances[] = {
#define CUATTN_INSTANCE(kernel, rung, dtype, head_dim, head_dim_v, mask, score, archs) \
  {Kernel::rung,   DType::dtype,                                                       \
   head_dim,       head_dim_v,                                                         \
   MaskKind::mask, ScoreKind::score,                                                   \
   archs,          instances::kernel##_##dtype##_##head_dim##x##head_dim_v##_##mask##_##score},
#include "instances.inc"
#undef CUATTN_INSTANCE
};

struct PagedInstance {
  Kernel kernel;
  DType kv_dtype;
  int32_t head_dim;
  const char* archs;
  void (*launch)(const PagedParams&, cudaStream_t);
};

constexpr PagedInstance kPagedInstances[] = {
#define CUATTN_PAGED_INSTANCE(kernel, rung, dtype, head_dim, archs) \
  {Kernel::rung, DType::dtype, head_dim, archs, instances::kernel##_##dtype##_##head_dim},
#include "paged_instances.inc"
#undef CUATTN_PAGED_INSTANCE
};

// Where the rows of a kernel and dtype begin in the list, which groups them so.
struct FirstRows {
  static constexpr int kKernels = 9, kDTypes = 8;
  int row[kKernels][kDTypes] = {};

  constexpr FirstRows() {
    for (int i = static_cast<int>(std::size(kInstances)) - 1; i >= 0; --i) {
      const Instance& instance = kInstances[i];
      row[static_cast<int>(instance.kernel)][static_cast<int>(instance.dtype)] = i;
    }
  }
};

const Instance& find_instance(const AttentionParams& p, const Plan& plan) {
  static constexpr FirstRows kFirst;
  int first = kFirst.row[static_cast<int>(plan.kernel)][static_cast<int>(p.dtype)];
  for (const Instance* row = kInstances + first; row != std::end(kInstances); ++row) {
    const Instance& instance = *row;
    if (instance.kernel == plan.kernel && instance.dtype == p.dtype &&
        instance.head_dim == plan.head_dim && instance.head_dim_v == plan.head_dim_v &&
        instance.mask == p.mask.kind() && instance.score == p.scores.kind) {
      return instance;
    }
  }
  CUATTN_ASSERT(false, "no instance of ", kernel_name(plan.kernel), " for ", dtype_name(p.dtype),
                " head_dim ", plan.head_dim, "x", plan.head_dim_v, " ", mask_name(p.mask.kind()),
                " ", score_name(p.scores.kind));
  return kInstances[0];
}

const PagedInstance& find_paged_instance(const PagedParams& p, const Plan& plan) {
  for (const PagedInstance& instance : kPagedInstances) {
    if (instance.kernel == plan.kernel && instance.kv_dtype == p.kv_dtype &&
        instance.head_dim == plan.head_dim) {
      return instance;
    }
  }
  CUATTN_ASSERT(false, "no paged instance of ", kernel_name(plan.kernel), " for ",
                dtype_name(p.kv_dtype), " head_dim ", plan.head_dim);
  return kPagedInstances[0];
}

// Makes `device` current for the calling thread, and restores what was.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    CUATTN_CUDA_TRY(cudaGetDevice(&previous_));
    // Setting the device once gives a thread its context, without which the driver makes no tensor
    // maps.
    static thread_local bool has_context = false;
    if (previous_ == device && has_context) {
      previous_ = -1;
    } else {
      CUATTN_CUDA_TRY(cudaSetDevice(device));
      has_context = true;
    }
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// Compiled for every architecture of the portable kernels, to ask which of their codes a device
// would run.
__global__ void probe_kernel() {}

// 1: machine code for the device is in the build; 0: PTX that the driver compiles; -1: neither, or
// no driver.
int32_t native_code(int32_t major, int32_t minor) {
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return -1;
  }
  return attributes.binaryVersion == major * 10 + minor || attributes.binaryVersion / 10 == major
             ? 1
             : 0;
}

DeviceInfo query_device(int32_t device_id) {
  DeviceGuard guard(device_id);
  DeviceInfo info{};
  info.is_cuda = true;
  info.id = device_id;
  cudaDeviceProp properties;
  CUATTN_CUDA_TRY(cudaGetDeviceProperties(&properties, device_id));
  info.major = properties.major;
  info.minor = properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.smem_per_block_optin = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  info.native = native_code(properties.major, properties.minor);
  info.has_cublas = false;
  std::memcpy(info.name, properties.name, sizeof(info.name) - 1);  // shortened to fit
  return info;
}

constexpr int kMaxDevices = 64;

// Device properties do not change: asked once per device. Looking for cuBLAS costs a search of the
// file system, so only who wants to know pays for it.
DeviceInfo device_info(int32_t device_id, bool find_libraries) {
  static std::mutex mutex;
  static DeviceInfo cache[kMaxDevices];
  static std::atomic<bool> ready[kMaxDevices];
  CUATTN_REQUIRE(device_id >= 0 && device_id < kMaxDevices, "attention: device cuda:", device_id,
                 " is out of range; use one of the first ", kMaxDevices);
  if (!ready[device_id].load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!ready[device_id].load(std::memory_order_relaxed)) {
      cache[device_id] = query_device(device_id);
      ready[device_id].store(true, std::memory_order_release);
    }
  }
  DeviceInfo info = cache[device_id];
  info.has_cublas = find_libraries && cublas_available();
  return info;
}

void attention(const AttentionParams& params, const AttentionSchedule& schedule, const Plan& plan,
               int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  switch (plan.kernel) {
    case Kernel::naive: return launch_naive(params, schedule.workspace, cuda_stream);
    case Kernel::cublas: return launch_cublas(params, schedule.workspace, device_id, cuda_stream);
    default: return find_instance(params, plan).launch(params, schedule, cuda_stream);
  }
}

void paged(const PagedParams& params, const Plan& plan, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.own_deal != nullptr) launch_paged_deal(params.work, params.own_deal, cuda_stream);
  find_paged_instance(params, plan).launch(params, cuda_stream);
  if (num_paged_slots(params.work) > 0) {  // units may have several parts
    launch_paged_combine(params, device_info(device_id, false).major, cuda_stream);
  }
}

void paged_deal(const PagedWork& work, int32_t* deal, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_paged_deal(work, deal, static_cast<cudaStream_t>(stream));
}

void* start_persistent(const PersistentParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  cudaEvent_t ended;
  CUATTN_CUDA_TRY(cudaEventCreateWithFlags(&ended, cudaEventDisableTiming));
  try {
    launch_paged_persistent(params, cuda_stream);
    CUATTN_CUDA_TRY(cudaEventRecord(ended, cuda_stream));
  } catch (...) {
    cudaEventDestroy(ended);
    throw;
  }
  return ended;
}

bool is_running(void* launched) {
  cudaEvent_t ended = static_cast<cudaEvent_t>(launched);
  cudaError_t status = cudaEventQuery(ended);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return true;
  }
  cudaEventDestroy(ended);
  CUATTN_CUDA_TRY(status);
  return false;
}

void merge(const MergeParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_merge(params, static_cast<cudaStream_t>(stream));
}

void cache_write(const CacheWriteParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_cache_write(params, static_cast<cudaStream_t>(stream));
}

void cache_gather(const CacheGatherParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_cache_gather(params, static_cast<cudaStream_t>(stream));
}

void copy_blocks(const BlockCopyParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_copy_blocks(params, static_cast<cudaStream_t>(stream));
}

void swap_blocks(const BlockSwapParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_swap_blocks(params, static_cast<cudaStream_t>(stream));
}

bool read_back(void* host, const void* data, size_t bytes, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  return read_device_data(host, data, bytes, static_cast<cudaStream_t>(stream));
}

// Portable: pinned for every device. Without a device, or a driver, there is none.
void* host_alloc(size_t bytes) {
  void* memory = nullptr;
  if (cudaHostAlloc(&memory, bytes, cudaHostAllocPortable) == cudaSuccess) return memory;
  cudaGetLastError();
  return nullptr;
}

void host_free(void* memory) {
  if (cudaFreeHost(memory) != cudaSuccess) cudaGetLastError();  // the process may be ending
}

void check(const AttentionParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  check_attention(params, static_cast<cudaStream_t>(stream));
}

void check_tables(const char* function, const PagedParams& params, int32_t device_id,
                  Stream stream) {
  DeviceGuard guard(device_id);
  check_paged(function, params, static_cast<cudaStream_t>(stream));
}

void check_lens(const char* function, const PagedWork& work, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  check_context_lens(function, work, static_cast<cudaStream_t>(stream));
}

void list_kernels(std::vector<KernelInfo>& list) {
  for (const Instance& i : kInstances) {
    list.push_back({"attention", kernel_name(i.kernel), i.archs, dtype_name(i.dtype), i.head_dim,
                    i.head_dim_v, mask_name(i.mask), score_name(i.score)});
  }
  for (const PagedInstance& i : kPagedInstances) {
    list.push_back({"paged_attention", kernel_name(i.kernel), i.archs, dtype_name(i.kv_dtype),
                    i.head_dim, i.head_dim, "any", "any"});
  }
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (Kernel kernel : {Kernel::naive, Kernel::cublas}) {
      list.push_back({"attention", kernel_name(kernel), kInstances[0].archs, dtype_name(dtype), 256,
                      256, "any", "any"});
    }
    list.push_back({"merge_states", "merge", kInstances[0].archs, dtype_name(dtype), 1024, 1024,
                    "any", "any"});
  }
}

std::string version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

std::string describe() {
  int driver = 0, runtime = 0, count = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) count = 0;
  cudaGetLastError();
  std::string devices;
  for (int id = 0; id < count; ++id) {
    DeviceInfo info = device_info(id, false);
    devices +=
        concat(id > 0 ? ", " : "", "{\"id\": ", id, ", \"name\": \"", info.name,
               "\", \"compute_capability\": \"", info.major, ".", info.minor,
               "\", \"sms\": ", info.num_sms,
               ", \"shared_memory_per_block\": ", info.smem_per_block_optin, ", \"code\": \"",
               info.native > 0    ? "native"
               : info.native == 0 ? "ptx"
                                  : "unsupported",
               "\"}");
  }
  return concat("{\"driver\": \"", driver > 0 ? version_text(driver) : "none",
                "\", \"runtime\": \"", version_text(runtime), "\", \"status\": \"",
                cudaGetErrorName(status), "\", \"cublas\": ", cublas_available() ? "true" : "false",
                ", \"devices\": [", devices, "]}");
}

}  // namespace

const Backend* cuda_backend() {
  static const Backend backend{.device_info = device_info,
                               .attention = attention,
                               .paged = paged,
                               .paged_deal = paged_deal,
                               .start_persistent = start_persistent,
                               .is_running = is_running,
                               .merge = merge,
                               .cache_write = cache_write,
                               .cache_gather = cache_gather,
                               .copy_blocks = copy_blocks,
                               .swap_blocks = swap_blocks,
                               .read_back = read_back,
                               .host_alloc = host_alloc,
                               .host_free = host_free,
                               .check = check,
                               .check_paged = check_tables,
                               .check_context_lens = check_lens,
                               .list_kernels = list_kernels,
                               .describe = describe};
  return &backend;
}

}  // namespace cuattn
