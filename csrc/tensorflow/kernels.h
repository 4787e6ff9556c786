// The operations of the plug-in. A graph reduces tensors in two phases, so that all gradients of a
// step are in flight together while the rest of the graph runs:
//
//   HororingStep   -> token             stateful: TensorFlow may neither drop nor precompute it,
//                                       and therefore nothing that depends on the token
//   HororingSubmit token, name, tensors -> handle
//                                       stateless: runs as soon as its tensors are ready, in any
//                                       order. Token and name together are unique, so that equal
//                                       operations are not merged
//   HororingWait   handles -> results   stateful; blocks no thread of the inter-op pool
//
// See ADR 14 and ADR 40.
#pragma once

#include <string>

#include "tensorflow/api.h"

namespace hororing::tensorflow {

// Each registers one operation and its kernel.
void RegisterSubmit(TfStatus* status);
void RegisterWait(TfStatus* status);

// Arguments of a registration: specifications as in TensorFlow's REGISTER_OP.
struct Operation {
  const char* name;
  const char* const* attributes;  // these three end with nullptr
  const char* const* inputs;
  const char* const* outputs;
  bool stateful;
  void* (*create)(TF_OpKernelConstruction*);
  void (*compute)(void* kernel, TF_OpKernelContext*);
  void (*destroy)(void* kernel);
  // Used instead of `compute` if TensorFlow has asynchronous kernels. May be null.
  void (*compute_async)(void* kernel, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
};
void Register(const Operation& operation, TfStatus* status);

// Why an operation fails.
struct Failure {
  TfCode code;
  std::string text;
};
// Translates the core's last failure on this thread, which has `code`, for TensorFlow.
Failure CoreFailure(int code);
void Fail(TF_OpKernelContext* context, const Failure& failure);

}  // namespace hororing::tensorflow
