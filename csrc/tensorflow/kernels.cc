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

// The Python side sets static shapes, because it knows them.
void LeaveShapesUnknown(TF_ShapeInferenceContext* context, TF_Status* status) {
  api.ShapeInferenceContextSetUnknownShape(context, status);
}

}  // namespace

void Register(const Operation& operation, TfStatus* status) {
  TF_OpDefinitionBuilder* definition = api.NewOpDefinitionBuilder(operation.name);
  for (auto spec = operation.attributes; *spec != nullptr; ++spec) {
    api.OpDefinitionBuilderAddAttr(definition, *spec);
  }
  for (auto spec = operation.inputs; *spec != nullptr; ++spec) {
    api.OpDefinitionBuilderAddInput(definition, *spec);
  }
  for (auto spec = operation.outputs; *spec != nullptr; ++spec) {
    api.OpDefinitionBuilderAddOutput(definition, *spec);
  }
  // Even a call with false makes an operation stateful.
  if (operation.stateful) api.OpDefinitionBuilderSetIsStateful(definition, true);
  api.OpDefinitionBuilderSetShapeInferenceFunction(definition, LeaveShapesUnknown);
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

}  // namespace hororing::tensorflow
