#include "tensorflow/kernels.h"

#include "capi/hororing.h"

namespace hororing::tensorflow {
namespace {

// The exceptions of hororing/errors.py, which reads code and rank from the end of the text.
const char* ExceptionName(int code) {
  switch (code) {
    case HR_INVALID_ARGUMENT: return "ValueError";
    case HR_MISMATCH: return "MismatchError";
    case HR_DUPLICATE_NAME: return "DuplicateNameError";
    case HR_NOT_INITIALIZED: return "NotInitializedError";
    case HR_SHUT_DOWN: return "ShutDownError";
    case HR_PEER_LOST: return "PeerLostError";
    case HR_STALLED: return "StalledError";
    case HR_TRANSPORT: return "TransportError";
    default: return "HororingInternalError";
  }
}

// Not UNAVAILABLE, which TensorFlow rewrites to INTERNAL in graphs.
TfCode CodeFor(int code) {
  switch (code) {
    case HR_INVALID_ARGUMENT:
    case HR_DUPLICATE_NAME: return TfCode::kInvalidArgument;
    case HR_MISMATCH:
    case HR_NOT_INITIALIZED: return TfCode::kFailedPrecondition;
    case HR_STALLED: return TfCode::kDeadlineExceeded;
    default: return TfCode::kAborted;
  }
}

// HororingStep: the token that ties a step's submissions to its execution.
void MakeToken(void*, TF_OpKernelContext* context) {
  TfStatus status;
  TF_Tensor* token =
      api.AllocateOutput(context, 0, TfType::kInt64, nullptr, 0, sizeof(int64_t), status.get());
  if (!status.ok()) return api.OpKernelContext_Failure(context, status.get());
  *static_cast<int64_t*>(api.TensorData(token)) = 0;
  api.DeleteTensor(token);
}

void RegisterStep(TfStatus* status) {
  static const char* const none[] = {nullptr};
  static const char* const outputs[] = {"token: int64", nullptr};
  Register(
      {"HororingStep", none, none, outputs, true,
       [](TF_OpKernelConstruction*) -> void* { return nullptr; }, MakeToken, [](void*) {}, nullptr},
      status);
}

std::string RegisterAll() {
  std::string problem;
  if (!LoadApi(&problem)) return problem;
  TfStatus status;
  for (const auto step : {RegisterStep, RegisterSubmit, RegisterWait}) {
    step(&status);
    if (!status.ok()) return api.Message(status.get());
  }
  return "";
}

}  // namespace

void Register(const Operation& operation, TfStatus* status) {
  TF_OpDefinitionBuilder* definition = api.NewOpDefinitionBuilder(operation.name);
  const auto add = [&](const auto& function, const char* const* specs) {
    for (; *specs != nullptr; ++specs) function(definition, *specs);
  };
  add(api.OpDefinitionBuilderAddAttr, operation.attributes);
  add(api.OpDefinitionBuilderAddInput, operation.inputs);
  add(api.OpDefinitionBuilderAddOutput, operation.outputs);
  // Even a call with false makes an operation stateful.
  if (operation.stateful) api.OpDefinitionBuilderSetIsStateful(definition, true);
  // The Python side sets static shapes, because it knows them.
  api.OpDefinitionBuilderSetShapeInferenceFunction(definition,
                                                   api.ShapeInferenceContextSetUnknownShape);
  api.RegisterOpDefinition(definition, status->get());
  if (!status->ok()) return;
  const bool async = operation.compute_async != nullptr && api.NewAsyncKernelBuilder != nullptr;
  TF_KernelBuilder* kernel =
      async ? api.NewAsyncKernelBuilder(operation.name, "CPU", operation.create,
                                        operation.compute_async, operation.destroy)
            : api.NewKernelBuilder(operation.name, "CPU", operation.create, operation.compute,
                                   operation.destroy);
  api.RegisterKernelBuilder(operation.name, kernel, status->get());
}

Failure CoreFailure(int code) {
  return {CodeFor(code), std::string(ExceptionName(code)) + ": " + hr_last_error() + " [hororing " +
                             std::to_string(code) + " " + std::to_string(hr_last_error_rank()) +
                             "]"};
}

void Fail(TF_OpKernelContext* context, const Failure& failure) {
  TfStatus status;
  status.Set(failure.code, failure.text);
  api.OpKernelContext_Failure(context, status.get());
}

// TensorFlow collects what a library registers while it is loaded, so this is a static object.
static const std::string problem = RegisterAll();

}  // namespace hororing::tensorflow

// Why there are no operations; "" if they are registered.
extern "C" __attribute__((visibility("default"))) const char* hororing_tensorflow_problem() {
  return hororing::tensorflow::problem.c_str();
}

// Whether a waiting operation blocks a thread of TensorFlow.
extern "C" __attribute__((visibility("default"))) int hororing_tensorflow_blocks() {
  return hororing::tensorflow::api.NewAsyncKernelBuilder == nullptr;
}
