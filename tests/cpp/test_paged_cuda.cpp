// SPDX-License-Identifier: Apache-2.0
// Paged attention on the GPU: every compiled kernel over every layout, with guard bands, through
// one problem of each kind. Next: paged.h.
#include <cstring>
#include <map>
#include <memory>

#include "gpu.h"
#include "paged.h"
#include "test.h"

namespace cuattn::test {
namespace {

// A paged problem on the device: its arrays with their guard bands, a plan and a workspace.
class OnGpuPages {
 public:
  OnGpuPages(PagedProblem& problem, const char* backend)
      : problem_(problem),
        call_(problem, {kDLCUDA, 0}, [this](Array& array) { return upload(array); }, backend) {}

  std::string run() {
    DeviceMemory plan(call_.plan_size() * sizeof(int32_t));
    if (!settings().sanitize) CUDA_OK(cudaMemset(plan.data(), 0xff, plan.bytes()));
    if (problem_.planned) call_.make_plan(plan.data(), nullptr);
    size_t guard = settings().sanitize ? 0 : 2048, bytes = call_.workspace_bytes();
    DeviceMemory workspace(bytes + 2 * guard);
    if (!settings().sanitize) CUDA_OK(cudaMemset(workspace.data(), 0xff, workspace.bytes()));
    call_.run({workspace.data() + guard, bytes}, nullptr);
    CUDA_OK(cudaDeviceSynchronize());
    std::vector<uint8_t> edges(guard > 0 ? workspace.bytes() : 0);
    if (guard > 0)  // else nothing of it need ever have been written
      CUDA_OK(cudaMemcpy(edges.data(), workspace.data(), edges.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < guard; ++i) {
      if (edges[i] != 0xff || edges[edges.size() - 1 - i] != 0xff)
        return problem_.text() + ": memory beside the workspace was written";
    }
    for (Array* array : problem_.inputs()) {
      if (download(*array) != array->bytes()) return problem_.text() + ": an input was changed";
    }
    for (Array* array : problem_.outputs()) {
      std::vector<uint8_t> bytes_now = download(*array);
      for (size_t i = 0; i < array->guard_bytes(); ++i) {
        if (bytes_now[i] != 0xff || bytes_now[bytes_now.size() - 1 - i] != 0xff)
          return problem_.text() + ": memory beside an output was written";
      }
      array->bytes() = bytes_now;
    }
    return judge_paged(problem_);
  }

 private:
  void* upload(Array& array) {
    auto& copy = copies_[&array];
    copy = std::make_unique<DeviceMemory>(array.bytes().size());
    CUDA_OK(cudaMemcpy(copy->data(), array.bytes().data(), array.bytes().size(),
                       cudaMemcpyHostToDevice));
    return copy->data() + array.guard_bytes();
  }

  std::vector<uint8_t> download(const Array& array) {
    std::vector<uint8_t> bytes(array.bytes().size());
    DeviceMemory& copy = *copies_.at(const_cast<Array*>(&array));
    CUDA_OK(cudaMemcpy(bytes.data(), copy.data(), bytes.size(), cudaMemcpyDeviceToHost));
    return bytes;
  }

  PagedProblem& problem_;
  std::map<Array*, std::unique_ptr<DeviceMemory>> copies_;
  PagedCall call_;
};

// Every problem that `backend` serves; the others must be refused. auto serves all.
void check_kernel(const std::string& backend, std::vector<PagedProblem> problems) {
  Random random(case_seed(backend));
  size_t served = 0;
  for (PagedProblem& p : problems) {
    p.fill(random);
    try {
      std::string wrong = OnGpuPages(p, backend.c_str()).run();
      CHECK(wrong.empty(), wrong);
      ++served;
    } catch (const NotImplemented& refusal) {
      CHECK(std::strstr(refusal.what(), "cannot run this call") != nullptr, refusal.what());
    }
  }
  CHECK(backend != "auto" || served == problems.size(), served, " served");
  if (served == 0) skip("it serves none of these problems");
}

bool add_cases() {
  struct Type {
    DType dtype;
    bool e4m3;
    const char* name;
  };
  const Type types[] = {{DType::f32, false, "f32"},
                        {DType::f16, false, "f16"},
                        {DType::bf16, false, "bf16"},
                        {DType::f16, true, "f16_e4m3"},
                        {DType::bf16, true, "bf16_e4m3"}};
  const char* layouts[] = {"nhd", "hnd", "vllm"};
  for (const char* backend : {"simt", "sm80", "sm90"})
    for (const Type& type : types)
      for (int layout = 0; layout < 3; ++layout)
        for (int dim : {64, 80, 128, 256}) {
          std::string name = std::string("cuda_paged_") + backend + "_" + type.name + "_" +
                             layouts[layout] + "_" + std::to_string(dim);
          auto run = [=] {
            check_kernel(backend,
                         paged_problems(type.dtype, type.e4m3, static_cast<KvLayout>(layout), dim));
          };
          add_case(name, run, Needs::gpu);
        }
  for (const char* backend : {"simt", "sm80", "sm90"})
    for (const Type& type : types)
      for (int layout = 0; layout < 3; ++layout) {
        std::string name =
            std::string("cuda_paged_versions_") + backend + "_" + type.name + "_" + layouts[layout];
        auto run = [=] {
          check_kernel(backend,
                       version_problems(type.dtype, type.e4m3, static_cast<KvLayout>(layout), 64));
        };
        add_case(name, run, Needs::gpu);
      }
  for (const char* backend : {"auto", "simt", "sm80", "sm90"})
    for (int type = 0; type < 3; ++type)
      for (int layout = 0; layout < 3; ++layout)
        for (int dim : {64, 128, 192, 256}) {
          std::string name = std::string("cuda_prefill_over_pages_") + backend + "_" +
                             types[type].name + "_" + layouts[layout] + "_" + std::to_string(dim);
          DType dtype = types[type].dtype;
          auto run = [=] {
            check_kernel(backend, prefill_problems(dtype, static_cast<KvLayout>(layout), dim));
          };
          add_case(name, run, Needs::gpu);
        }
  return true;
}

const bool kAdded = add_cases();

}  // namespace
}  // namespace cuattn::test
