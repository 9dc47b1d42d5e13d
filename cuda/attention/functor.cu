// SPDX-License-Identifier: Apache-2.0
// Masks and scores of a user, compiled for the call: images of machine code are kept for the life
// of the process, loaded at their first launch and launched as the kernels they are made of. No
// call of the driver's own library is needed. Next: device/functor.cuh (what is compiled),
// python/cuattn/flex/emit.py (who writes it), sm90/functor.cu (the launch on Hopper),
// cuda/backward/functor.cu (the gradients).
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "cuattn/params/functor.h"
#include "cuattn/plan.h"
#include "cuda/attention/simt.cuh"
#include "cuda/attention/sm80/forward.cuh"
#include "cuda/host/functor.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

struct LoadedKernel {
  std::string name;
  cudaKernel_t kernel;
  uint64_t prepared;  // a bit for each device that allows its shared memory
};

struct Functor {
  std::vector<char> image;
  FunctorForm form;
  cudaLibrary_t library = nullptr;
  std::vector<LoadedKernel> kernels;

  LoadedKernel& find(const char* name) {
    for (LoadedKernel& loaded : kernels) {
      if (loaded.name == name) return loaded;
    }
    kernels.push_back({name, nullptr, 0});
    return kernels.back();
  }
};

std::mutex mutex;
std::deque<Functor>& functors() {  // never destroyed: graphs may hold kernels until the end
  static auto* all = new std::deque<Functor>;
  return *all;
}

// Under the lock.
Functor& functor_of(int64_t number) {
  CUATTN_REQUIRE(number >= 1 && number <= static_cast<int64_t>(functors().size()),
                 "flex_attention: functor must be a number that cuattn_flex_add_functor gave, got ",
                 number, "; add the machine code first");
  return functors()[static_cast<size_t>(number - 1)];
}

// What the kernel of a plan is launched with.
struct Shape {
  int64_t blocks;
  int threads, smem_bytes;
};

template <int kHeadDim>
constexpr int simt_smem_bytes() {
  using Policy = device::OptionPolicy<DType::f32, MaskKind::window, ScoreKind::scored>;
  return sizeof(typename ForwardSimt<kHeadDim, Policy>::Shared);
}

Shape shape_of(const AttentionParams& p, const Plan& plan, const Sm80Schedule& schedule) {
  int64_t pairs = int64_t{p.batch} * p.num_heads_q;
  Shape shape{pairs * device::ceil_div(p.seqlen_q, plan.tile.m), plan.tile.warps * 32, 0};
  if (plan.kernel == Kernel::sm80) {
    shape.blocks = pairs * schedule.tiles;
    shape.smem_bytes = sm80_smem_bytes({plan.head_dim, plan.head_dim_v}, plan.tile);
  } else {
    shape.smem_bytes = plan.head_dim == 64    ? simt_smem_bytes<64>()
                       : plan.head_dim == 128 ? simt_smem_bytes<128>()
                       : plan.head_dim == 256 ? simt_smem_bytes<256>()
                                              : simt_smem_bytes<512>();
  }
  return shape;
}

}  // namespace

cudaKernel_t functor_kernel(int64_t number, const char* name, int smem_bytes, int device_id,
                            cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  Functor& functor = functor_of(number);
  LoadedKernel& loaded = functor.find(name);
  uint64_t bit = device_id < 64 ? uint64_t{1} << device_id : 0;
  if (loaded.prepared & bit) return loaded.kernel;
  cudaStreamCaptureStatus status;
  CUATTN_CUDA_TRY(cudaStreamIsCapturing(stream, &status));
  CUATTN_REQUIRE(status == cudaStreamCaptureStatusNone,
                 "flex_attention: the first call with a mask or score function loads machine code, "
                 "which cannot be captured; call it once with these dtypes and head sizes before "
                 "the capture");
  if (functor.library == nullptr) {
    CUATTN_CUDA_TRY(cudaLibraryLoadData(&functor.library, functor.image.data(), nullptr, nullptr, 0,
                                        nullptr, nullptr, 0));
  }
  if (loaded.kernel == nullptr)
    CUATTN_CUDA_TRY(cudaLibraryGetKernel(&loaded.kernel, functor.library, name));
  CUATTN_CUDA_TRY(cudaKernelSetAttributeForDevice(
      loaded.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes, device_id));
  loaded.prepared |= bit;
  return loaded.kernel;
}

void fill_functor(FunctorParams& params, const AttentionParams& p, Tile tile) {
  const FlexParams& flex = *p.flex;
  static_cast<AttentionParams&>(params) = p;
  params.flex = nullptr;
  params.lists = flex.lists;
  for (int i = 0; i < kMaxFlexArrays; ++i) params.arrays[i] = flex.arrays[i];
  for (int i = 0; i < kMaxFlexNumbers; ++i) params.numbers[i] = flex.numbers[i];
  if (flex.lists.starts == nullptr) return;
  CUATTN_REQUIRE(flex.lists.query_block % tile.m == 0 && flex.lists.key_block % tile.n == 0,
                 "flex_attention: the blocks of block_mask must be multiples of ", tile.m, " x ",
                 tile.n, " (queries x keys) for this head_dim, got ", flex.lists.query_block, " x ",
                 flex.lists.key_block, "; make it with block_size=128");
}

int64_t add_functor(const void* image, size_t bytes, FunctorForm form) {
  std::lock_guard<std::mutex> lock(mutex);
  const char* begin = static_cast<const char*>(image);
  functors().push_back({std::vector<char>(begin, begin + bytes), form});
  return static_cast<int64_t>(functors().size());
}

FunctorForm functor_form(int64_t number) {
  std::lock_guard<std::mutex> lock(mutex);
  return functor_of(number).form;
}

void launch_functor(const AttentionParams& p, const AttentionSchedule& cut, const Plan& plan,
                    int device_id, cudaStream_t stream) {
  FunctorParams params;
  fill_functor(params, p, plan.tile);
  if (plan.kernel == Kernel::sm90)
    return launch_functor_sm90(params, p.flex->functor, cut, plan, device_id, stream);
  Sm80Schedule schedule{};
  if (plan.kernel == Kernel::sm80) schedule = make_sm80_schedule(p, plan.tile);
  Shape shape = shape_of(p, plan, schedule);
  if (shape.blocks == 0) return;
  cudaKernel_t kernel =
      functor_kernel(p.flex->functor, "cuattn_functor", shape.smem_bytes, device_id, stream);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid_blocks(shape.blocks, kernel_name(plan.kernel)));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
  config.stream = stream;
  void* arguments[] = {&params, &schedule};
  CUATTN_CUDA_TRY(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
}

}  // namespace cuattn
