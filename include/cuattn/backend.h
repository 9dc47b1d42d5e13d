// SPDX-License-Identifier: Apache-2.0
// What src/ knows of the two backends: one function per op. Arguments are validated, outputs
// allocated, plans made. Next: cpu/backend.cpp, cuda/backend/backend.cu.
#pragma once

#include <string>
#include <vector>

#include "cuattn/params/backward.h"
#include "cuattn/params/cache.h"
#include "cuattn/params/fused.h"
#include "cuattn/params/merge.h"
#include "cuattn/params/paged.h"
#include "cuattn/params/project.h"
#include "cuattn/params/quantize.h"
#include "cuattn/params/sampling.h"
#include "cuattn/plan.h"
#include "cuattn/schedule.h"

namespace cuattn {

using Stream = void*;  // cudaStream_t; ignored on the CPU

// One compiled kernel, as `cuattn.kernels()` lists it. "any" means the axis is a run-time branch.
struct KernelInfo {
  const char *op, *kernel, *arch, *dtype;
  int32_t head_dim, head_dim_v;  // the largest the instance takes
  const char *mask, *score;
};

struct Backend {
  // has_cublas is looked for only when `find_libraries` says so.
  DeviceInfo (*device_info)(int32_t device_id, bool find_libraries);
  void (*attention)(const AttentionParams& params, const AttentionSchedule& schedule,
                    const Plan& plan, int32_t device_id, Stream stream);
  // Keeps machine code of a user's functions for FlexParams::functor, whose form is asked of its number;
  // nullptr: there is no use.
  int64_t (*add_functor)(const void* image, size_t bytes, FunctorForm form);
  FunctorForm (*functor_form)(int64_t functor);
  void (*backward)(const BackwardParams& params, const BackwardSchedule& schedule, const Plan& plan,
                   int32_t device_id, Stream stream);
  void (*paged)(const PagedParams& params, const Plan& plan, int32_t device_id, Stream stream);
  // Fills a deal of PagedDeal::size(work) entries; work.deal is not read.
  void (*paged_deal)(const PagedWork& work, int32_t* deal, int32_t device_id, Stream stream);
  // nullptr: the backend needs it not.
  void (*set_decodes_apart)(const DecodesApart& params, int32_t device_id, Stream stream);
  void (*key_lengths)(const KeyLengths& params, int32_t device_id, Stream stream);
  void (*project)(const ProjectParams& params, int32_t device_id, Stream stream);
  void (*merge)(const MergeParams& params, int32_t device_id, Stream stream);
  void (*cache_write)(const CacheWriteParams& params, int32_t device_id, Stream stream);
  void (*cache_gather)(const CacheGatherParams& params, int32_t device_id, Stream stream);
  void (*copy_blocks)(const BlockCopyParams& params, int32_t device_id, Stream stream);
  void (*swap_blocks)(const BlockSwapParams& params, int32_t device_id, Stream stream);
  void (*rotate)(const RotateParams& params, int32_t device_id, Stream stream);
  void (*add)(const AddParams& params, int32_t device_id, Stream stream);
  void (*norm)(const NormParams& params, int32_t device_id, Stream stream);
  void (*activate)(const ActivationParams& params, int32_t device_id, Stream stream);
  void (*sample)(const SampleParams& params, int32_t device_id, Stream stream);
  void (*verify)(const VerifyParams& params, int32_t device_id, Stream stream);
  // nullptr: there is no such kernel.
  void (*quantize)(const QuantizeParams& params, int32_t device_id, Stream stream);
  void (*dequantize)(const QuantizeParams& params, int32_t device_id, Stream stream);
  // Copies to the host and waits for the stream; false under stream capture, where nobody can wait
  // (with one warning).
  bool (*read_back)(void* host, const void* data, size_t bytes, int32_t device_id, Stream stream);
  void* (*host_alloc)(size_t bytes);  // whole pages, pinned on CUDA; nullptr: there are none
  void (*host_free)(void* memory);
  // Reads cu_seqlens and seqused where they lie and throws InvalidArgument when they break the
  // contract. Synchronises on CUDA; called only under CUATTN_CHECK=1 there, always on the CPU.
  // Skipped (with one warning) under stream capture.
  void (*check)(const char* function, const AttentionParams& params, int32_t device_id,
                Stream stream);
  // The same for block tables and context lengths.
  void (*check_paged)(const char* function, const PagedParams& params, int32_t device_id,
                      Stream stream);
  void (*check_context_lens)(const char* function, const PagedWork& work, int32_t device_id,
                             Stream stream);
  void (*list_kernels)(std::vector<KernelInfo>& list);
  std::string (*describe)();  // JSON object: ISA and threads, or driver, runtime, archs and devices
};

const Backend& cpu_backend();
const Backend* cuda_backend();  // nullptr in a build without CUDA

}  // namespace cuattn
