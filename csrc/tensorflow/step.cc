// HororingStep: the token that ties a step's submissions to its execution.
#include "tensorflow/kernels.h"

namespace hororing::tensorflow {
namespace {

void Compute(void*, TF_OpKernelContext* context) {
  TfStatus status;
  TF_Tensor* token =
      api.AllocateOutput(context, 0, TfType::kInt64, nullptr, 0, sizeof(int64_t), status.get());
  if (!status.ok()) return api.OpKernelContext_Failure(context, status.get());
  *static_cast<int64_t*>(api.TensorData(token)) = 0;
  api.DeleteTensor(token);
}

}  // namespace

void RegisterStep(TfStatus* status) {
  static const char* const none[] = {nullptr};
  static const char* const outputs[] = {"token: int64", nullptr};
  Register(
      {"HororingStep", none, none, outputs, true,
       [](TF_OpKernelConstruction*) -> void* { return nullptr; }, Compute, [](void*) {}, nullptr},
      status);
}

}  // namespace hororing::tensorflow
