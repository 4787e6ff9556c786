// HororingWait: waits for submitted requests, and returns their results. It blocks no thread of
// TensorFlow: ranks run operations in different orders, and a blocked thread may wait for a request
// that another rank has no free thread to submit. A thread of ours calls TensorFlow back.
#include <pthread.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/signals.h"
#include "capi/hororing.h"
#include "tensorflow/in_flight.h"
#include "tensorflow/kernels.h"

namespace hororing::tensorflow {
namespace {

void FreeResult(void* data, size_t, void*) { hr_free(reinterpret_cast<uintptr_t>(data)); }

// One execution of a node.
class Execution {
 public:
  // `done`: called at the end; may be empty.
  Execution(TF_OpKernelContext* context, std::function<void()> done)
      : context_(context), done_(std::move(done)) {
    for (int i = 0; status_.ok() && i < api.NumInputs(context_); ++i) {
      TF_Tensor* input = nullptr;
      api.GetInput(context_, i, &input, status_.get());
      if (!status_.ok()) break;
      const Tensor owner(input);
      handles_.push_back(*static_cast<const int64_t*>(api.TensorData(input)));
    }
    pending_ = handles_;
  }

  // Whether Run would not block. The core reports the polled requests at once, and
  // hr_next_completion returns when one completes.
  bool Complete() {
    while (!pending_.empty() && hr_poll(pending_.back()) != 0) pending_.pop_back();
    return pending_.empty();
  }

  // Drives the engine meanwhile.
  void WaitForLast(double timeout_s) const { hr_wait(pending_.back(), timeout_s); }

  void Run() {
    // Wait for all of them even if one fails: none may be in flight in the next step.
    for (const int64_t handle : handles_) {
      const int code = Finish(handle, [&](const InFlight& request) { HandOut(handle, request); });
      if (code != HR_OK && !failure_) failure_ = CoreFailure(code);
    }
    if (failure_) {
      Fail(context_, *failure_);
    } else if (!status_.ok()) {
      api.OpKernelContext_Failure(context_, status_.get());
    }
    if (done_) done_();
  }

 private:
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
    if (code != HR_OK && !failure_) failure_ = CoreFailure(code);
  }

  // The memory of the next output; null when TensorFlow has none.
  void* Allocate(TfType type, const std::vector<int64_t>& shape, size_t bytes) {
    if (!status_.ok()) return nullptr;
    const Tensor output(api.AllocateOutput(context_, next_++, type, shape.data(),
                                           static_cast<int>(shape.size()), bytes, status_.get()));
    return output ? api.TensorData(output.get()) : nullptr;
  }

  TF_OpKernelContext* const context_;
  const std::function<void()> done_;
  std::vector<int64_t> handles_;
  std::vector<int64_t> pending_;  // those not known to be complete
  TfStatus status_;
  std::optional<Failure> failure_;  // the core's first failure
  int next_ = 0;                    // output
};

struct Waiting {
  std::mutex mutex;
  std::condition_variable added;
  bool watched = false;                                // guarded by mutex; Watch was started
  std::vector<std::unique_ptr<Execution>> executions;  // guarded by mutex
};

// Never destroyed, as the table of in_flight.cc.
Waiting& waiting = *new Waiting;

void Watch() {
  constexpr double kCheckInterval = 0.5;  // seconds between calls of hr_poll
  pthread_setname_np(pthread_self(), "hororing-tf");
  for (int64_t seen = -1;;) {
    std::vector<std::unique_ptr<Execution>> complete, rest;
    {
      std::unique_lock<std::mutex> lock(waiting.mutex);
      waiting.added.wait(lock, [] { return !waiting.executions.empty(); });
      for (auto& each : waiting.executions) {
        (each->Complete() ? complete : rest).push_back(std::move(each));
      }
      waiting.executions = std::move(rest);
    }
    for (const auto& each : complete) each->Run();
    seen = hr_next_completion(complete.empty() ? seen : -1, kCheckInterval);
  }
}

void Compute(void*, TF_OpKernelContext* context) { Execution(context, nullptr).Run(); }

void ComputeAsync(void*, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* callback) {
  // kProofOfType in api.cc establishes the type. The callback is gone when this function returns.
  auto execution = std::make_unique<Execution>(
      context, std::move(*reinterpret_cast<std::function<void()>*>(callback)));
  // A step's only wait is usually short, and handing it to another thread takes longer.
  constexpr double kShort = 0.0005;  // seconds
  std::unique_lock<std::mutex> lock(waiting.mutex);
  const bool alone = waiting.executions.empty();
  lock.unlock();
  if (!execution->Complete() && alone) execution->WaitForLast(kShort);
  lock.lock();
  // Under the lock, or Watch might check between this and the next line, and not again.
  if (execution->Complete()) {
    lock.unlock();
    return execution->Run();
  }
  waiting.executions.push_back(std::move(execution));
  if (!std::exchange(waiting.watched, true)) {
    const SignalsBlocked blocked;
    std::thread(Watch).detach();
  }
  waiting.added.notify_one();
}

}  // namespace

void RegisterWait(TfStatus* status) {
  static const char* const attributes[] = {"N: int >= 1", "R: list(type) >= 0", nullptr};
  static const char* const inputs[] = {"handles: N * int64", nullptr};
  static const char* const outputs[] = {"results: R", nullptr};
  Register({"HororingWait", attributes, inputs, outputs, true,
            [](TF_OpKernelConstruction*) -> void* { return nullptr; }, Compute, [](void*) {},
            ComputeAsync},
           status);
}

}  // namespace hororing::tensorflow
