// HororingWait: waits for what was submitted, and hands the results out.
#include <optional>
#include <vector>

#include "capi/hororing.h"
#include "tensorflow/in_flight.h"
#include "tensorflow/kernels.h"

namespace hororing::tensorflow {
namespace {

void FreeResult(void* data, size_t, void*) { hr_free(reinterpret_cast<uintptr_t>(data)); }

// One execution of a node.
class Execution {
 public:
  explicit Execution(TF_OpKernelContext* context) : context_(context) {}

  void Run() {
    // All of them, also when one fails: none may be in flight in the next step.
    for (int i = 0; i < api.NumInputs(context_); ++i) Wait(i);
    if (failure_) return Fail(context_, *failure_);
    if (!status_.ok()) api.OpKernelContext_Failure(context_, status_.get());
  }

 private:
  void Wait(int index) {
    TF_Tensor* input = nullptr;
    api.GetInput(context_, index, &input, status_.get());
    if (!status_.ok()) return;
    const Tensor owner(input);
    const int64_t handle = *static_cast<const int64_t*>(api.TensorData(input));
    const int code = Finish(handle, [&](const InFlight& request) { HandOut(handle, request); });
    if (code != HR_OK && !failure_) failure_ = OfCore(code);
  }

  void HandOut(int64_t handle, const InFlight& request) {
    for (const Tensor& output : request.outputs) Set(output.get());
    if (!request.outputs.empty()) return;
    for (size_t i = 0; i < request.inputs.size(); ++i) TakeRows(handle, i, request.inputs[i]);
    if (request.collective == HR_ALLTOALL) TakeReceivedSplits(handle);
  }

  void Set(TF_Tensor* output) {
    if (status_.ok()) api.SetOutput(context_, next_, output, status_.get());
    ++next_;
  }

  // A result in the core's memory: rows like those of the input.
  void TakeRows(int64_t handle, size_t index, const Tensor& input) {
    hr_result result{};
    Take(handle, static_cast<int32_t>(index), &result);
    std::vector<int64_t> shape{result.rows};
    for (int d = 1; d < api.NumDims(input.get()); ++d) shape.push_back(api.Dim(input.get(), d));
    const TfType type = api.TensorType(input.get());
    if (result.bytes == 0) {
      Allocate(type, shape, 0);
      return;
    }
    const Tensor output(api.NewTensor(type, shape.data(), static_cast<int>(shape.size()),
                                      reinterpret_cast<void*>(result.data),
                                      static_cast<size_t>(result.bytes), FreeResult, nullptr));
    Set(output.get());
  }

  void TakeReceivedSplits(int64_t handle) {
    hr_result result{};
    Take(handle, 1, &result);
    const auto count = result.bytes / static_cast<int64_t>(sizeof(int64_t));
    int32_t* const splits = static_cast<int32_t*>(
        Allocate(TfType::kInt32, {count}, static_cast<size_t>(count) * sizeof(int32_t)));
    for (int64_t i = 0; splits != nullptr && i < count; ++i) {
      splits[i] = static_cast<int32_t>(reinterpret_cast<const int64_t*>(result.data)[i]);
    }
    hr_free(result.data);
  }

  void Take(int64_t handle, int32_t index, hr_result* result) {
    const int code = hr_take_result(handle, index, result);
    if (code != HR_OK && !failure_) failure_ = OfCore(code);
  }

  // The memory of the next output; null when TensorFlow has none.
  void* Allocate(TfType type, const std::vector<int64_t>& shape, size_t bytes) {
    if (!status_.ok()) return nullptr;
    const Tensor output(api.AllocateOutput(context_, next_++, type, shape.data(),
                                           static_cast<int>(shape.size()), bytes, status_.get()));
    return output ? api.TensorData(output.get()) : nullptr;
  }

  TF_OpKernelContext* const context_;
  TfStatus status_;
  std::optional<Failure> failure_;  // of the core, the first one
  int next_ = 0;                    // output
};

void Compute(void*, TF_OpKernelContext* context) { Execution(context).Run(); }

}  // namespace

void RegisterWait(TfStatus* status) {
  static const char* const attributes[] = {"N: int >= 1", "R: list(type) >= 0", nullptr};
  static const char* const inputs[] = {"handles: N * int64", nullptr};
  static const char* const outputs[] = {"results: R", nullptr};
  Register({"HororingWait", attributes, inputs, outputs, true,
            [](TF_OpKernelConstruction*) -> void* { return nullptr; }, Compute, [](void*) {}},
           status);
}

}  // namespace hororing::tensorflow
