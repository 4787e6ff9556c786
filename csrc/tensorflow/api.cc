#include "tensorflow/api.h"

#include <dlfcn.h>

#include <type_traits>

namespace hororing::tensorflow {

Api api;

// The library with TensorFlow's C interface, at least since 2.16.
constexpr char kLibrary[] = "libtensorflow_framework.so.2";

// ThreadPoolDevice::ComputeAsync(AsyncOpKernel*, OpKernelContext*, std::function<void()>), of
// libstdc++, as here. Asynchronous kernels get a pointer to that parameter, which is destroyed when
// they return. They must move it, so its type must be this one.
constexpr char kProofOfType[] =
    "_ZN10tensorflow16ThreadPoolDevice12ComputeAsyncEPNS_13AsyncOpKernelEPNS_15OpKernelContextE"
    "St8functionIFvvEE";

bool LoadApi(std::string* problem) {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    *problem = std::string(kLibrary) + " is not loaded in this process";
    return false;
  }
  std::string missing;
  const auto look = [&](const char* name, auto** function) {
    *function =
        reinterpret_cast<std::remove_reference_t<decltype(*function)>>(dlsym(library, name));
    if (*function == nullptr && missing.empty()) missing = name;
  };
#define HORORING_FIND(result, name, parameters) look("TF_" #name, &api.name);
  HORORING_TENSORFLOW_FUNCTIONS(HORORING_FIND)
#undef HORORING_FIND
  api.NewAsyncKernelBuilder = nullptr;
  if (dlsym(library, kProofOfType) != nullptr) {
    look("TF_NewAsyncKernelBuilder", &api.NewAsyncKernelBuilder);
  }
  if (missing.empty()) return true;
  *problem = std::string(kLibrary) + " of this TensorFlow has no function " + missing;
  return false;
}

}  // namespace hororing::tensorflow
