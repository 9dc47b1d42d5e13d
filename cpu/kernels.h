// SPDX-License-Identifier: Apache-2.0
// What the CPU kernels offer to backend.cpp.
#pragma once

#include "cuattn/params/backward.h"
#include "cuattn/params/cache.h"
#include "cuattn/params/fused.h"
#include "cuattn/params/merge.h"
#include "cuattn/params/paged.h"
#include "cuattn/params/project.h"
#include "cuattn/params/quantize.h"
#include "cuattn/params/sampling.h"

namespace cuattn::cpu {

// attention.cpp. The check throws InvalidArgument when lengths break the contract. Kernel
// cpu_naive: scores is [batch, num_heads_q, seqlen_q, seqlen_kv].
void check_attention(const char* function, const AttentionParams& p);
void naive_attention(const AttentionParams& p, float* scores);
void flash_attention(const AttentionParams& p);  // flash_units.cpp: kernel cpu
void merge_states(const MergeParams& p);         // merge.cpp
void project(const ProjectParams& p);            // project.cpp

// backward.cpp: kernel cpu_naive; three floats of memory for each of [batch, num_heads_q, seqlen_q,
// seqlen_kv]. backward_units.cpp: kernel cpu.
void naive_backward(const BackwardParams& p, float* memory);
void flash_backward(const BackwardParams& p, const BackwardSchedule& schedule);

// paged.cpp. The checks throw InvalidArgument when lengths or block ids break the contract.
void paged_attention(const PagedParams& p);
void paged_deal(const PagedWork& work, int32_t* deal);
void check_paged(const char* function, const PagedParams& p);
void check_context_lens(const char* function, const PagedWork& work);
// cache.cpp
void cache_write(const CacheWriteParams& p);
void cache_gather(const CacheGatherParams& p);
void copy_blocks(const BlockCopyParams& p);
void swap_blocks(const BlockSwapParams& p);

// fused.cpp, sampling.cpp
void rotate(const RotateParams& p);
void norm(const NormParams& p);
void add(const AddParams& p);
void activate(const ActivationParams& p);
void sample(const SampleParams& p);
void verify(const VerifyParams& p);

// quantize.cpp
void quantize(const QuantizeParams& p);
void dequantize(const QuantizeParams& p);

// The instruction set that flash_attention runs on; throws InvalidArgument when CUATTN_CPU_ISA asks
// for one that is unknown or that this machine lacks.
const char* isa_name();

}  // namespace cuattn::cpu
