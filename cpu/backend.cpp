// SPDX-License-Identifier: Apache-2.0
// The CPU backend's function table. Next: attention.cpp (the mathematics), flash_units.cpp (the
// fast kernel).
#include "cuattn/backend.h"

#include <cstdlib>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cuattn/error.h"

namespace cuattn {
namespace {

DeviceInfo describe_cpu() {
  DeviceInfo info{};
  info.native = 1;
  std::string name = std::string("CPU (") + cpu::isa_name() + ")";
  name.copy(info.name, sizeof(info.name) - 1);
  return info;
}

DeviceInfo device_info(int32_t device_id, bool) {
  static const DeviceInfo cpu = describe_cpu();
  DeviceInfo info = cpu;
  info.id = device_id;
  return info;
}

void attention(const AttentionParams& params, const AttentionSchedule& schedule, const Plan& plan,
               int32_t, Stream) {
  switch (plan.kernel) {
    case Kernel::cpu: return cpu::flash_attention(params);
    case Kernel::cpu_naive:
      return cpu::naive_attention(params, static_cast<float*>(schedule.workspace));
    default: CUATTN_ASSERT(false, "the plan names a kernel of another backend");
  }
}

void backward(const BackwardParams& params, const BackwardSchedule& schedule, const Plan& plan,
              int32_t, Stream) {
  switch (plan.kernel) {
    case Kernel::cpu: return cpu::flash_backward(params, schedule);
    case Kernel::cpu_naive:
      return cpu::naive_backward(params, static_cast<float*>(schedule.workspace));
    default: CUATTN_ASSERT(false, "the plan names a kernel of another backend");
  }
}

void paged(const PagedParams& params, const Plan&, int32_t, Stream) {
  cpu::paged_attention(params);
}

void paged_deal(const PagedWork& work, int32_t* deal, int32_t, Stream) {
  cpu::paged_deal(work, deal);
}

void project(const ProjectParams& params, int32_t, Stream) { cpu::project(params); }

void merge(const MergeParams& params, int32_t, Stream) { cpu::merge_states(params); }

void cache_write(const CacheWriteParams& params, int32_t, Stream) { cpu::cache_write(params); }
void cache_gather(const CacheGatherParams& params, int32_t, Stream) { cpu::cache_gather(params); }
void copy_blocks(const BlockCopyParams& params, int32_t, Stream) { cpu::copy_blocks(params); }
void swap_blocks(const BlockSwapParams& params, int32_t, Stream) { cpu::swap_blocks(params); }

void rotate(const RotateParams& params, int32_t, Stream) { cpu::rotate(params); }
void norm(const NormParams& params, int32_t, Stream) { cpu::norm(params); }
void add(const AddParams& params, int32_t, Stream) { cpu::add(params); }
void activate(const ActivationParams& params, int32_t, Stream) { cpu::activate(params); }
void sample(const SampleParams& params, int32_t, Stream) { cpu::sample(params); }
void verify(const VerifyParams& params, int32_t, Stream) { cpu::verify(params); }

void quantize(const QuantizeParams& params, int32_t, Stream) { cpu::quantize(params); }
void dequantize(const QuantizeParams& params, int32_t, Stream) { cpu::dequantize(params); }

bool read_back(void* host, const void* data, size_t bytes, int32_t, Stream) {
  std::memcpy(host, data, bytes);
  return true;
}

constexpr size_t kPageBytes = 4096;
void* host_alloc(size_t bytes) { return std::aligned_alloc(kPageBytes, bytes); }
void host_free(void* memory) { std::free(memory); }

void check(const char* function, const AttentionParams& params, int32_t, Stream) {
  cpu::check_attention(function, params);
}

void check_paged(const char* function, const PagedParams& params, int32_t, Stream) {
  cpu::check_paged(function, params);
}

void check_context_lens(const char* function, const PagedWork& work, int32_t, Stream) {
  cpu::check_context_lens(function, work);
}

void list_kernels(std::vector<KernelInfo>& list) {
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    list.push_back({"attention", "cpu", cpu::isa_name(), dtype, 512, 512, "any", "any"});
    list.push_back({"attention", "cpu_naive", "any", dtype, 512, 512, "any", "any"});
    list.push_back({"attention_backward", "cpu", cpu::isa_name(), dtype, 256, 256, "any", "any"});
    list.push_back({"attention_backward", "cpu_naive", "any", dtype, 256, 256, "any", "any"});
    list.push_back({"paged_attention", "cpu", cpu::isa_name(), dtype, 256, 256, "any", "any"});
    list.push_back({"mla_decode", "cpu", cpu::isa_name(), dtype, 1024, 1024, "any", "any"});
    list.push_back({"mla_project", "cpu", cpu::isa_name(), dtype, 1024, 1024, "any", "any"});
    list.push_back({"merge_states", "cpu", "any", dtype, 1024, 1024, "any", "any"});
  }
  for (const char* codes : {"float8_e4m3fn", "int8"}) {
    list.push_back({"attention", "cpu", cpu::isa_name(), codes, 256, 256, "any", "any"});
    list.push_back({"attention", "cpu_naive", "any", codes, 256, 256, "any", "any"});
  }
}

std::string describe() {
  return concat("{\"isa\": \"", cpu::isa_name(), "\", \"threads\": ", cpu::num_threads(), "}");
}

}  // namespace

const Backend& cpu_backend() {
  static const Backend backend{.device_info = device_info,
                               .attention = attention,
                               .backward = backward,
                               .paged = paged,
                               .paged_deal = paged_deal,
                               .set_decodes_apart = nullptr,
                               .key_lengths = nullptr,
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
                               .check_paged = check_paged,
                               .check_context_lens = check_context_lens,
                               .list_kernels = list_kernels,
                               .describe = describe};
  return backend;
}

}  // namespace cuattn
