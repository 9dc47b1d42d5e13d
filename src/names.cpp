// SPDX-License-Identifier: Apache-2.0
#include "cuattn/names.h"

#include "cuattn/plan.h"

namespace cuattn {

const char* kernel_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::cpu_naive: return "naive";
    case Kernel::cpu: return "cpu";
    case Kernel::naive: return "naive";
    case Kernel::cublas: return "cublas";
    case Kernel::tiled: return "tiled";
    case Kernel::simt: return "simt";
    case Kernel::sm80: return "sm80";
    case Kernel::sm90: return "sm90";
  }
  return "unknown";
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "float32";
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    case DType::e4m3: return "float8_e4m3fn";
    case DType::boolean: return "bool";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::i8: return "int8";
  }
  return "unknown";
}

const char* mask_name(MaskKind mask) {
  switch (mask) {
    case MaskKind::none: return "none";
    case MaskKind::causal: return "causal";
    case MaskKind::window: return "window";
    case MaskKind::rows: return "rows";
  }
  return "unknown";
}

const char* score_name(ScoreKind score) {
  switch (score) {
    case ScoreKind::identity: return "identity";
    case ScoreKind::scored: return "scored";
    case ScoreKind::dropped: return "dropped";
    case ScoreKind::fast: return "fast";
    case ScoreKind::parts: return "parts";
  }
  return "unknown";
}

int32_t itemsize(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::i64: return 8;
    case DType::f16:
    case DType::bf16: return 2;
    default: return 1;
  }
}

}  // namespace cuattn
