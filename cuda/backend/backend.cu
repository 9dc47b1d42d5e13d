// SPDX-License-Identifier: Apache-2.0
// The CUDA side of backend.h: a Plan becomes a launch. Instances of the table are launched by
// number (instances.cu), the other kernels called by name. Next: device.cu (the facts of a device),
// attention/sm80/forward.cuh, attention/simt.cuh, attention/naive.cu, backward/naive.cu.
#include <cuda_runtime.h>

#include "cuattn/backend.h"
#include "cuda/backend/device.h"
#include "cuda/host/instance.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

void attention(const AttentionParams& params, const AttentionSchedule& schedule, const Plan& plan,
               int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.flex != nullptr) return launch_functor(params, schedule, plan, device_id, cuda_stream);
  switch (plan.kernel) {
    case Kernel::naive: return launch_naive(params, schedule.workspace, cuda_stream);
    case Kernel::cublas: return launch_cublas(params, schedule.workspace, device_id, cuda_stream);
    default: return launch_instance<Op::attention>({params, schedule}, plan.instance, cuda_stream);
  }
}

void backward(const BackwardParams& params, const BackwardSchedule& schedule, const Plan& plan,
              int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.forward.flex != nullptr)
    return launch_functor_backward(params, schedule.workspace, plan, device_id, cuda_stream);
  switch (plan.kernel) {
    case Kernel::naive: return launch_naive_backward(params, schedule.workspace, cuda_stream);
    default:
      return launch_instance<Op::attention_backward>({params, schedule}, plan.instance,
                                                     cuda_stream);
  }
}

void paged(const PagedParams& params, const Plan& plan, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  const LatentParams& latent = params.latent;
  if (latent.own_lens != nullptr) {  // longer than any capacity
    size_t bytes = params.work.num_seqs * sizeof(int32_t);
    CUATTN_CUDA_TRY(cudaMemsetAsync(latent.own_lens, 0x7f, bytes, cuda_stream));
  }
  if (params.own_deal != nullptr) launch_paged_deal(params.work, params.own_deal, cuda_stream);
  if (latent.is_used) {
    launch_instance<Op::mla_decode>(params, plan.instance, cuda_stream);
  } else {
    launch_instance<Op::paged_attention>(params, plan.instance, cuda_stream);
  }
  if (num_paged_slots(params.work) > 0) {  // units may have several parts
    launch_paged_combine(params, device_info(device_id, false).major, cuda_stream);
  }
}

void paged_deal(const PagedWork& work, int32_t* deal, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_paged_deal(work, deal, static_cast<cudaStream_t>(stream));
}

void set_decodes_apart(const DecodesApart& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_decodes_apart(params, static_cast<cudaStream_t>(stream));
}

void key_lengths(const KeyLengths& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_key_lengths(params, static_cast<cudaStream_t>(stream));
}

void project(const ProjectParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_project(params, static_cast<cudaStream_t>(stream));
}

void merge(const MergeParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_merge(params, 0, static_cast<cudaStream_t>(stream));
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

void rotate(const RotateParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_rotate(params, static_cast<cudaStream_t>(stream));
}

void add(const AddParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_add(params, static_cast<cudaStream_t>(stream));
}

void norm(const NormParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_norm(params, static_cast<cudaStream_t>(stream));
}

void activate(const ActivationParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_activation(params, static_cast<cudaStream_t>(stream));
}

void sample(const SampleParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_sample(params, static_cast<cudaStream_t>(stream));
}

void verify(const VerifyParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_verify(params, static_cast<cudaStream_t>(stream));
}

void quantize(const QuantizeParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_quantize(params, static_cast<cudaStream_t>(stream));
}

void dequantize(const QuantizeParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  launch_dequantize(params, static_cast<cudaStream_t>(stream));
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

void check(const char* function, const AttentionParams& params, int32_t device_id, Stream stream) {
  DeviceGuard guard(device_id);
  check_attention(function, params, static_cast<cudaStream_t>(stream));
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

// Those outside the table of instances.
void list_kernels(std::vector<KernelInfo>& list) {
  constexpr const char* kArchs = CUATTN_ARCHS_OF_EACH;
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (Kernel kernel : {Kernel::naive, Kernel::cublas}) {
      list.push_back(
          {"attention", kernel_name(kernel), kArchs, dtype_name(dtype), 512, 512, "any", "any"});
    }
    list.push_back(
        {"attention_backward", "naive", kArchs, dtype_name(dtype), 256, 256, "any", "any"});
    list.push_back({"mla_project", dtype == DType::f32 ? "simt" : "sm80", kArchs, dtype_name(dtype),
                    1024, 1024, "any", "any"});
    list.push_back({"merge_states", "merge", kArchs, dtype_name(dtype), 1024, 1024, "any", "any"});
  }
  for (const char* codes : {"float8_e4m3fn", "int8"})
    list.push_back({"attention", "naive", kArchs, codes, 256, 256, "any", "any"});
}

}  // namespace

const Backend* cuda_backend() {
  static const Backend backend{.device_info = device_info,
                               .attention = attention,
                               .add_functor = add_functor,
                               .functor_form = functor_form,
                               .backward = backward,
                               .paged = paged,
                               .paged_deal = paged_deal,
                               .set_decodes_apart = set_decodes_apart,
                               .key_lengths = key_lengths,
                               .project = project,
                               .merge = merge,
                               .cache_write = cache_write,
                               .cache_gather = cache_gather,
                               .copy_blocks = copy_blocks,
                               .swap_blocks = swap_blocks,
                               .rotate = rotate,
                               .add = add,
                               .norm = norm,
                               .activate = activate,
                               .sample = sample,
                               .verify = verify,
                               .quantize = quantize,
                               .dequantize = dequantize,
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
