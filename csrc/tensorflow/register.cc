// Registers everything when TensorFlow loads the library.
#include <string>

#include "tensorflow/kernels.h"

namespace hororing::tensorflow {
namespace {

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

// TensorFlow collects what a library registers while it is loaded, so this is a static object.
const std::string problem = RegisterAll();

}  // namespace
}  // namespace hororing::tensorflow

// Why there are no operations; "" if they are registered.
extern "C" __attribute__((visibility("default"))) const char* hororing_tensorflow_problem() {
  return hororing::tensorflow::problem.c_str();
}

// Whether a waiting operation blocks a thread of TensorFlow.
extern "C" __attribute__((visibility("default"))) int hororing_tensorflow_blocks() {
  return hororing::tensorflow::api.NewAsyncKernelBuilder == nullptr;
}
