// SPDX-License-Identifier: Apache-2.0
// The launchers that backend/backend.cu calls by name. Kernels of the instance table are launched
// by number (instance.h).
#pragma once

#include <cuda_runtime.h>

#include "cuattn/params/backward.h"
#include "cuattn/params/cache.h"
#include "cuattn/params/functor.h"
#include "cuattn/params/fused.h"
#include "cuattn/params/merge.h"
#include "cuattn/params/paged.h"
#include "cuattn/params/project.h"
#include "cuattn/params/quantize.h"
#include "cuattn/params/sampling.h"
#include "cuattn/schedule.h"

namespace cuattn {

struct Plan;  // cuattn/plan.h

// attention/naive.cu, attention/cublas.cu
void launch_naive(const AttentionParams& params, void* workspace, cudaStream_t stream);
void launch_cublas(const AttentionParams& params, void* workspace, int device_id,
                   cudaStream_t stream);
bool cublas_available();
// attention/functor.cu: machine code of NVRTC, from 1 on; a call whose `flex` names one, and how
// sm90 cuts it.
int64_t add_functor(const void* image, size_t bytes, FunctorForm form);
FunctorForm functor_form(int64_t number);
void launch_functor(const AttentionParams& params, const AttentionSchedule& cut, const Plan& plan,
                    int device_id, cudaStream_t stream);
// attention/sm90/functor.cu
void launch_functor_sm90(const FunctorParams& params, int64_t functor, const AttentionSchedule& cut,
                         const Plan& plan, int device_id, cudaStream_t stream);
// backward/functor.cu: the same of gradients.
void launch_functor_backward(const BackwardParams& params, void* workspace, const Plan& plan,
                             int device_id, cudaStream_t stream);
void launch_naive_backward(const BackwardParams& params, void* workspace,
                           cudaStream_t stream);  // backward/naive.cu
// backward/sums.cu: dbias of its parts, dsinks and dslopes, as far as they are needed.
void launch_option_sums(const BackwardParams& params, void* workspace, cudaStream_t stream);
void launch_slope_sums(const BackwardParams& params, const float* terms, cudaStream_t stream);
void launch_bias_sums(const BackwardParams& params, const float* sums, int32_t parts,
                      cudaStream_t stream);
// Paged attention: the deal, where the call makes its own; a kernel; the combine, where units are
// cut. `major`: compute capability, from 9 on the combine overlaps the kernel before it.
void launch_paged_deal(const PagedWork& work, int32_t* deal, cudaStream_t stream);
void launch_paged_combine(const PagedParams& params, int32_t major, cudaStream_t stream);
void launch_decodes_apart(const DecodesApart& params, cudaStream_t stream);      // paged/apart.cu
void launch_key_lengths(const KeyLengths& params, cudaStream_t stream);          // paged/apart.cu
void launch_cache_write(const CacheWriteParams& params, cudaStream_t stream);    // cache/write.cu
void launch_packed_write(const CacheWriteParams& params, cudaStream_t stream);   // cache/packed.cu
void launch_cache_gather(const CacheGatherParams& params, cudaStream_t stream);  // cache/gather.cu
void launch_copy_blocks(const BlockCopyParams& params, cudaStream_t stream);     // cache/blocks.cu
void launch_swap_blocks(const BlockSwapParams& params, cudaStream_t stream);
// `major` >= 9: it may start while the kernel before it, which writes the parts, still runs.
void launch_merge(const MergeParams& params, int32_t major,
                  cudaStream_t stream);                                       // merge/states.cu
void launch_rotate(const RotateParams& params, cudaStream_t stream);          // fused/rope.cu
void launch_add(const AddParams& params, cudaStream_t stream);                // fused/add.cu
void launch_norm(const NormParams& params, cudaStream_t stream);              // fused/norm.cu
void launch_activation(const ActivationParams& params, cudaStream_t stream);  // fused/activation.cu
void launch_quantize(const QuantizeParams& params, cudaStream_t stream);      // fused/quantize.cu
void launch_dequantize(const QuantizeParams& params, cudaStream_t stream);
void launch_sample(const SampleParams& params, cudaStream_t stream);  // fused/sample.cu
void launch_verify(const VerifyParams& params, cudaStream_t stream);
void launch_project(const ProjectParams& params, cudaStream_t stream);  // mla/project.cu
// attention/sm90/clear_counter.cu
void launch_clear_counter(int32_t* counter, cudaStream_t stream);
// backend/check.cu: these synchronise. read_device_data is false under stream capture, where nobody
// may wait.
bool read_device_data(void* host, const void* data, size_t bytes, cudaStream_t stream);
void check_attention(const char* function, const AttentionParams& params, cudaStream_t stream);
void check_paged(const char* function, const PagedParams& params, cudaStream_t stream);
void check_context_lens(const char* function, const PagedWork& work, cudaStream_t stream);

}  // namespace cuattn
