// SPDX-License-Identifier: Apache-2.0
// What the CPU kernels offer to backend.cpp.
#pragma once

#include "cuattn/params/attention.h"
#include "cuattn/params/cache.h"
#include "cuattn/params/paged.h"

namespace cuattn::cpu {

void check_prefill(const PrefillParams&
                       p);  // attention.cpp: throws InvalidArgument when lengths break the contract
void naive_prefill(
    const PrefillParams& p);  // attention.cpp: kernel cpu_naive; scores in the workspace
void flash_prefill(const PrefillParams& p);  // flash_units.cpp: kernel cpu; no workspace
void merge_states(const MergeParams& p);     // merge.cpp

// paged.cpp. The checks throw InvalidArgument when lengths or block ids break the contract.
void paged_attention(const PagedParams& p);
void paged_plan(const PagedWork& work, int32_t* plan);
void check_paged(const char* function, const PagedParams& p);
void check_context_lens(const char* function, const PagedWork& work);
// cache.cpp
void cache_write(const CacheWriteParams& p);
void cache_gather(const CacheGatherParams& p);
void copy_blocks(const BlockCopyParams& p);
void swap_blocks(const BlockSwapParams& p);

// The instruction set that flash_prefill runs on; throws InvalidArgument when CUATTN_CPU_ISA asks
// for one that is unknown or that this machine lacks.
const char* isa_name();

}  // namespace cuattn::cpu
