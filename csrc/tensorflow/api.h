// The part of TensorFlow's C interface that the plug-in needs, declared by ourselves.
//
// No header of TensorFlow is included and no library linked: the functions are looked up in the
// process that has TensorFlow loaded, so that one binary serves every version that has them (2.18
// to 2.22 were tried). Signatures: tensorflow/c/{ops,kernels,tf_tensor,tf_status,tf_datatype}.h,
// whose stability TensorFlow promises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// TensorFlow's own types, all of them opaque.
struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;

namespace hororing::tensorflow {

// Values of TF_Code.
enum class TfCode : int {
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kFailedPrecondition = 9,
  kAborted = 10,
};

// Values of TF_DataType.
enum class TfType : int {
  kFloat = 1,
  kDouble = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 5,
  kInt8 = 6,
  kInt64 = 9,
  kBool = 10,
  kBfloat16 = 14,
  kUint16 = 17,
  kHalf = 19,
  kUint32 = 22,
  kUint64 = 23,
  kFloat8E5m2 = 24,
  kFloat8E4m3fn = 25,
  kFloat8E4m3fnuz = 26,
  kFloat8E5m2fnuz = 28,
  kInt4 = 29,
  kUint4 = 30,
};

// The functions, named without the prefix TF_. X(result, name, parameters)
#define HORORING_TENSORFLOW_FUNCTIONS(X)                                                   \
  X(TF_Status*, NewStatus, ())                                                             \
  X(void, DeleteStatus, (TF_Status*))                                                      \
  X(void, SetStatus, (TF_Status*, TfCode, const char* text))                               \
  X(TfCode, GetCode, (const TF_Status*))                                                   \
  X(const char*, Message, (const TF_Status*))                                              \
  X(TF_Tensor*, NewTensor,                                                                 \
    (TfType, const int64_t* shape, int ndim, void* data, size_t bytes,                     \
     void (*deallocator)(void* data, size_t bytes, void* argument), void* argument))       \
  X(void, DeleteTensor, (TF_Tensor*))                                                      \
  X(TfType, TensorType, (const TF_Tensor*))                                                \
  X(int, NumDims, (const TF_Tensor*))                                                      \
  X(int64_t, Dim, (const TF_Tensor*, int index))                                           \
  X(size_t, TensorByteSize, (const TF_Tensor*))                                            \
  X(void*, TensorData, (const TF_Tensor*))                                                 \
  X(TF_OpDefinitionBuilder*, NewOpDefinitionBuilder, (const char* name))                   \
  X(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char* spec))         \
  X(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char* spec))        \
  X(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char* spec))       \
  X(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))               \
  X(void, OpDefinitionBuilderSetShapeInferenceFunction,                                    \
    (TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*)))            \
  X(void, RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                     \
  X(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))   \
  X(TF_KernelBuilder*, NewKernelBuilder,                                                   \
    (const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),        \
     void (*compute)(void* kernel, TF_OpKernelContext*), void (*destroy)(void* kernel)))   \
  X(void, RegisterKernelBuilder, (const char* name, TF_KernelBuilder*, TF_Status*))        \
  X(void, OpKernelConstruction_GetAttrInt64,                                               \
    (TF_OpKernelConstruction*, const char* name, int64_t* value, TF_Status*))              \
  X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))            \
  X(int, NumInputs, (TF_OpKernelContext*))                                                 \
  X(void, GetInput, (TF_OpKernelContext*, int index, TF_Tensor**, TF_Status*))             \
  X(void, SetOutput, (TF_OpKernelContext*, int index, const TF_Tensor*, TF_Status*))       \
  X(TF_Tensor*, AllocateOutput,                                                            \
    (TF_OpKernelContext*, int index, TfType, const int64_t* shape, int ndim, size_t bytes, \
     TF_Status*))                                                                          \
  X(TF_Tensor*, ForwardInputOrAllocateOutput,                                              \
    (TF_OpKernelContext*, const int* candidates, int candidates_count, int output,         \
     const int64_t* shape, int ndim, int* forwarded, TF_Status*))                          \
  X(void, OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))

struct Api {
#define HORORING_MEMBER(result, name, parameters) result(*name) parameters;
  HORORING_TENSORFLOW_FUNCTIONS(HORORING_MEMBER)
#undef HORORING_MEMBER
  // Null unless `done` is known to point to a std::function<void()> of the caller.
  TF_KernelBuilder* (*NewAsyncKernelBuilder)(const char* op, const char* device,
                                             void* (*create)(TF_OpKernelConstruction*),
                                             void (*compute)(void* kernel, TF_OpKernelContext*,
                                                             TF_AsyncOpKernelDoneCallback* done),
                                             void (*destroy)(void* kernel));
};

// Looks up the functions; false, with the reason, if one is missing. Called once, while the plug-in
// is loaded; `api` may be used afterwards, from any thread.
bool LoadApi(std::string* problem);

extern Api api;

// Owns a TF_Status for the duration of a call.
class TfStatus {
 public:
  TfStatus() : status_(api.NewStatus()) {}
  ~TfStatus() { api.DeleteStatus(status_); }
  TfStatus(const TfStatus&) = delete;

  bool ok() const { return api.GetCode(status_) == TfCode::kOk; }
  void Set(TfCode code, const std::string& text) { api.SetStatus(status_, code, text.c_str()); }
  TF_Status* get() { return status_; }

 private:
  TF_Status* const status_;
};

}  // namespace hororing::tensorflow
