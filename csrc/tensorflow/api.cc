#include "tensorflow/api.h"

#include <dlfcn.h>

namespace hororing::tensorflow {

Api api;

namespace {

// The library with TensorFlow's C interface, at least since 2.16.
constexpr char kLibrary[] = "libtensorflow_framework.so.2";

// ThreadPoolDevice::ComputeAsync(AsyncOpKernel*, OpKernelContext*, std::function<void()>), of
// libstdc++, as here. Asynchronous kernels get a pointer to that parameter, which is destroyed when
// they return. They must move it, so its type must be this one.
constexpr char kProofOfType[] =
    "_ZN10tensorflow16ThreadPoolDevice12ComputeAsyncEPNS_13AsyncOpKernelEPNS_15OpKernelContextE"
    "St8functionIFvvEE";

class Lookup {
 public:
  explicit Lookup(void* library) : library_(library) {}

  template <typename Function>
  void operator()(const char* name, Function** function) {
    *function = reinterpret_cast<Function*>(dlsym(library_, name));
    if (*function == nullptr && missing_.empty()) missing_ = name;
  }

  const std::string& missing() const { return missing_; }

 private:
  void* const library_;
  std::string missing_;
};

}  // namespace

bool LoadApi(std::string* problem) {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    *problem = std::string(kLibrary) + " is not loaded in this process";
    return false;
  }
  Lookup look(library);
  look("TF_NewStatus", &api.NewStatus);
  look("TF_DeleteStatus", &api.DeleteStatus);
  look("TF_SetStatus", &api.SetStatus);
  look("TF_GetCode", &api.GetCode);
  look("TF_Message", &api.Message);
  look("TF_NewTensor", &api.NewTensor);
  look("TF_DeleteTensor", &api.DeleteTensor);
  look("TF_TensorType", &api.TensorType);
  look("TF_NumDims", &api.NumDims);
  look("TF_Dim", &api.Dim);
  look("TF_TensorByteSize", &api.TensorByteSize);
  look("TF_TensorData", &api.TensorData);
  look("TF_NewOpDefinitionBuilder", &api.NewOpDefinitionBuilder);
  look("TF_OpDefinitionBuilderAddAttr", &api.OpDefinitionBuilderAddAttr);
  look("TF_OpDefinitionBuilderAddInput", &api.OpDefinitionBuilderAddInput);
  look("TF_OpDefinitionBuilderAddOutput", &api.OpDefinitionBuilderAddOutput);
  look("TF_OpDefinitionBuilderSetIsStateful", &api.OpDefinitionBuilderSetIsStateful);
  look("TF_OpDefinitionBuilderSetShapeInferenceFunction",
       &api.OpDefinitionBuilderSetShapeInferenceFunction);
  look("TF_RegisterOpDefinition", &api.RegisterOpDefinition);
  look("TF_ShapeInferenceContextSetUnknownShape", &api.ShapeInferenceContextSetUnknownShape);
  look("TF_NewKernelBuilder", &api.NewKernelBuilder);
  look("TF_RegisterKernelBuilder", &api.RegisterKernelBuilder);
  look("TF_OpKernelConstruction_GetAttrInt64", &api.OpKernelConstruction_GetAttrInt64);
  look("TF_OpKernelConstruction_Failure", &api.OpKernelConstruction_Failure);
  look("TF_NumInputs", &api.NumInputs);
  look("TF_NumOutputs", &api.NumOutputs);
  look("TF_GetInput", &api.GetInput);
  look("TF_SetOutput", &api.SetOutput);
  look("TF_AllocateOutput", &api.AllocateOutput);
  look("TF_ForwardInputOrAllocateOutput", &api.ForwardInputOrAllocateOutput);
  look("TF_OpKernelContext_Failure", &api.OpKernelContext_Failure);
  api.NewAsyncKernelBuilder = nullptr;
  if (dlsym(library, kProofOfType) != nullptr) {
    look("TF_NewAsyncKernelBuilder", &api.NewAsyncKernelBuilder);
  }
  if (look.missing().empty()) return true;
  *problem = std::string(kLibrary) + " of this TensorFlow has no function " + look.missing();
  return false;
}

}  // namespace hororing::tensorflow
