// SPDX-License-Identifier: Apache-2.0
// The choice of a kernel: from what a call asks and what a device offers to one rung of the ladder,
// with the reason. Pure functions: tested on made-up GPUs, without any. Next: src/plan.cpp (the
// ladder), tile_config.h (the tiles).
#pragma once

#include <cstddef>
#include <string>

#include "cuattn/params.h"
#include "cuattn/tile_config.h"

namespace cuattn {

struct DeviceInfo {
  bool is_cuda;
  int32_t id;
  int32_t major, minor;  // compute capability
  int32_t num_sms;
  int32_t smem_per_block_optin;  // bytes
  int32_t
      native;  // 1: machine code for this device is in the build, 0: runs from PTX, -1: cannot run
  bool has_cublas;  // found at run time
  char name[64];
};

// What the choice depends on, and nothing else.
struct PrefillRequest {
  DType dtype;
  int32_t batch, num_heads_q, num_heads_kv, head_dim, head_dim_v;
  int32_t seqlen_q, seqlen_kv;  // ragged: the maxima
  bool ragged, uses_seqused;
  MaskKind mask;
  ScoreKind score;
  bool has_sinks, batch_invariant;
};

enum class Kernel : int32_t { cpu_naive, cpu, naive, cublas, tiled, simt, sm80 };

struct Plan {
  Kernel kernel;
  int32_t head_dim,
      head_dim_v;  // of the compiled instance; smaller heads run padded in shared memory
  Tile tile;
  int32_t num_splits;
  size_t workspace_bytes;
  const char* reason;  // one clause, static storage
};

// backend: "auto", "naive", "cublas", "tiled", "simt", "sm80", "cpu".
// Throws InvalidArgument for an unknown name, NotImplemented when no rung (or not the named one)
// can run the request.
Plan select_prefill(const PrefillRequest& request, const DeviceInfo& device, const char* backend);

// The whole ladder as text: each rung with its verdict, then the plan.
std::string explain_prefill(const PrefillRequest& request, const DeviceInfo& device,
                            const char* backend);

const char* kernel_name(Kernel kernel);  // as `backend=` spells it
const char* dtype_name(DType dtype);     // "float32", ...
const char* mask_name(MaskKind mask);
const char* score_name(ScoreKind score);
int32_t itemsize(DType dtype);

}  // namespace cuattn
