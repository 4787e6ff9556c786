// HororingSubmit: hands tensors to the engine and returns a handle at once.
#include <string>
#include <vector>

#include "capi/hororing.h"
#include "tensorflow/in_flight.h"
#include "tensorflow/kernels.h"

namespace hororing::tensorflow {
namespace {

// Inputs: a token, then these, then the tensors. Factors are prescale, postscale and, of a
// weighted average, this rank's weight. Name and factors are inputs because TensorFlow keeps one
// kernel for every combination of attributes in eager calls; the number of the process set, because
// it may change during the life of a graph.
constexpr int kName = 1;
constexpr int kProcessSet = 2;
constexpr int kFactors = 3;
constexpr int kSplits = 4;
constexpr int kFirstTensor = 5;

// The attributes of one node of a graph.
struct Submit {
  int64_t collective, op, root;
  int64_t has_splits, blocking;
  int64_t awaits_abandoned;  // finishes abandoned requests of this name; not in eager mode: Ctrl-C

  bool preallocates() const { return collective != HR_ALLGATHER && collective != HR_ALLTOALL; }
};

void* Create(TF_OpKernelConstruction* construction) {
  TfStatus status;
  const auto integer = [&](const char* name) {
    int64_t value = 0;
    if (status.ok()) {
      api.OpKernelConstruction_GetAttrInt64(construction, name, &value, status.get());
    }
    return value;
  };
  const Submit submit{integer("collective"), integer("op"),       integer("root"),
                      integer("has_splits"), integer("blocking"), integer("awaits_abandoned")};
  if (status.ok()) return new Submit(submit);
  api.OpKernelConstruction_Failure(construction, status.get());
  return nullptr;
}

// The hr_dtype; -1 for types that the core lacks.
int32_t DtypeOf(TfType type) {
  switch (type) {
    case TfType::kUint8: return HR_UINT8;
    case TfType::kInt8: return HR_INT8;
    case TfType::kUint16: return HR_UINT16;
    case TfType::kInt16: return HR_INT16;
    case TfType::kInt32: return HR_INT32;
    case TfType::kInt64: return HR_INT64;
    case TfType::kHalf: return HR_FLOAT16;
    case TfType::kFloat: return HR_FLOAT32;
    case TfType::kDouble: return HR_FLOAT64;
    case TfType::kBool: return HR_BOOL;
    case TfType::kBfloat16: return HR_BFLOAT16;
    case TfType::kUint32: return HR_UINT32;
    case TfType::kUint64: return HR_UINT64;
    case TfType::kFloat8E5m2: return HR_FLOAT8_E5M2;
    case TfType::kFloat8E4m3fn: return HR_FLOAT8_E4M3FN;
    case TfType::kFloat8E4m3fnuz: return HR_FLOAT8_E4M3FNUZ;
    case TfType::kFloat8E5m2fnuz: return HR_FLOAT8_E5M2FNUZ;
    case TfType::kInt4: return HR_INT4;
    case TfType::kUint4: return HR_UINT4;
  }
  return -1;
}

std::vector<int64_t> ShapeOf(const TF_Tensor* tensor) {
  std::vector<int64_t> shape;
  for (int d = 0; d < api.NumDims(tensor); ++d) shape.push_back(api.Dim(tensor, d));
  return shape;
}

uintptr_t AddressOf(const Tensor& tensor) {
  return tensor ? reinterpret_cast<uintptr_t>(api.TensorData(tensor.get())) : 0;
}

// One execution of a node.
class Execution {
 public:
  Execution(const Submit& submit, TF_OpKernelContext* context)
      : submit_(submit), context_(context) {}

  void Run() {
    const int count = api.NumInputs(context_) - kFirstTensor;
    const Tensor name = Input(kName);
    const Tensor process_set = name ? Input(kProcessSet) : nullptr;
    if (process_set) {
      name_.assign(static_cast<const char*>(api.TensorData(name.get())),
                   api.TensorByteSize(name.get()));
      process_set_ =
          static_cast<int32_t>(*static_cast<int64_t*>(api.TensorData(process_set.get())));
    }
    shapes_.reserve(static_cast<size_t>(count));  // the core's views point into it
    for (int i = 0; i < count && status_.ok(); ++i) AddTensor(i);
    const Tensor factors = status_.ok() ? Input(kFactors) : nullptr;
    const Tensor splits = status_.ok() ? Input(kSplits) : nullptr;
    // Made first, because nothing may fail once the core has the request.
    const Tensor handle = status_.ok() ? NewHandle() : nullptr;
    if (status_.ok()) {
      api.SetOutput(context_, submit_.preallocates() ? count : 0, handle.get(), status_.get());
    }
    if (!status_.ok()) return api.OpKernelContext_Failure(context_, status_.get());
    const int64_t submitted = HandOver(factors, splits);
    if (submitted <= 0) return Fail(context_, CoreFailure(static_cast<int>(-submitted)));
    *static_cast<int64_t*>(api.TensorData(handle.get())) = submitted;
    Keep(submitted, std::move(in_flight_));
  }

 private:
  Tensor Input(int index) {
    TF_Tensor* tensor = nullptr;
    api.GetInput(context_, index, &tensor, status_.get());
    return Tensor(status_.ok() ? tensor : nullptr);
  }

  void AddTensor(int i) {
    Tensor input = Input(kFirstTensor + i);
    if (!status_.ok()) return;
    const TfType type = api.TensorType(input.get());
    shapes_.push_back(ShapeOf(input.get()));
    const std::vector<int64_t>& shape = shapes_.back();
    Tensor output;
    if (submit_.collective == HR_REDUCESCATTER) {
      output = AllocateRows(i, type, shape, api.TensorByteSize(input.get()));
    } else if (submit_.preallocates()) {
      output = TakeOverOrAllocate(i, shape, &input);
    }
    hr_tensor view{};
    view.output = AddressOf(output);
    view.input = input ? AddressOf(input) : view.output;
    view.dtype = DtypeOf(type);
    view.ndim = static_cast<int32_t>(shape.size());
    view.shape = shape.data();
    if (view.dtype < 0) {
      status_.Set(TfCode::kInvalidArgument,
                  "ValueError: '" + name_ + "': tensors of this type are not supported");
    }
    views_.push_back(view);
    in_flight_.inputs.push_back(std::move(input));
    in_flight_.outputs.push_back(std::move(output));
  }

  // Uses the current ranks, which may differ from those when the graph was made.
  Tensor AllocateRows(int i, TfType type, std::vector<int64_t> shape, size_t bytes) {
    int32_t rank = 0, parts = 1;
    if (shape.empty() || hr_group_rank_now(process_set_, &rank, &parts) != HR_OK) {
      return nullptr;  // the core reports the error
    }
    const int64_t rows = shape[0];
    shape[0] = rows / parts + (rank < rows % parts ? 1 : 0);
    const size_t size = rows == 0 ? 0 : bytes / static_cast<size_t>(rows);
    return Tensor(api.AllocateOutput(context_, i, type, shape.data(),
                                     static_cast<int>(shape.size()),
                                     size * static_cast<size_t>(shape[0]), status_.get()));
  }

  // If the input is no longer needed, the result reuses its memory. TensorFlow decides that by the
  // number of references, including ours. *input is then null.
  Tensor TakeOverOrAllocate(int i, const std::vector<int64_t>& shape, Tensor* input) {
    const int candidate = kFirstTensor + i;
    int forwarded = -1;
    input->reset();
    Tensor output(api.ForwardInputOrAllocateOutput(context_, &candidate, 1, i, shape.data(),
                                                   static_cast<int>(shape.size()), &forwarded,
                                                   status_.get()));
    if (status_.ok() && forwarded < 0) *input = Input(candidate);
    return output;
  }

  int64_t HandOver(const Tensor& factors, const Tensor& splits) {
    if (!submit_.preallocates()) in_flight_.outputs.clear();
    in_flight_.collective = submit_.collective;
    in_flight_.key = std::to_string(process_set_) + "/" + name_;
    if (submit_.awaits_abandoned != 0) FinishAbandoned(in_flight_.key);
    hr_request request{};
    request.collective = static_cast<int32_t>(submit_.collective);
    request.name = name_.c_str();
    request.process_set = process_set_;
    request.op = static_cast<int32_t>(submit_.op);
    request.root = static_cast<int32_t>(submit_.root);
    const auto* const numbers = static_cast<const double*>(api.TensorData(factors.get()));
    request.prescale = numbers[0];
    request.postscale = numbers[1];
    if (api.Dim(factors.get(), 0) > 2) request.weight = numbers + 2;
    request.tensors_count = static_cast<int32_t>(views_.size());
    request.tensors = views_.data();
    if (submit_.has_splits != 0) {
      // Never NULL, which has another meaning. An empty list is an error.
      static const int64_t kNone = 0;
      request.integers_count = static_cast<int32_t>(api.Dim(splits.get(), 0));
      request.integers = request.integers_count == 0
                             ? &kNone
                             : static_cast<const int64_t*>(api.TensorData(splits.get()));
    }
    request.blocking = static_cast<int32_t>(submit_.blocking);
    return hr_submit(&request);
  }

  const Submit& submit_;
  TF_OpKernelContext* const context_;
  TfStatus status_;
  std::string name_;
  int32_t process_set_ = 0;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<hr_tensor> views_;
  InFlight in_flight_;
};

void Compute(void* kernel, TF_OpKernelContext* context) {
  Execution(*static_cast<const Submit*>(kernel), context).Run();
}

void Destroy(void* kernel) { delete static_cast<Submit*>(kernel); }

}  // namespace

void RegisterSubmit(TfStatus* status) {
  static const char* const attributes[] = {
      "T: list(type) >= 1",  // the core checks the types
      "P: list(type) >= 0",  // T if the outputs have their final size in advance; else none
      "collective: int",       "op: int", "root: int", "has_splits: int", "blocking: int",
      "awaits_abandoned: int", nullptr,
  };
  static const char* const inputs[] = {"token: int64",
                                       "request_name: uint8",
                                       "process_set: int64",
                                       "factors: double",
                                       "splits: int64",
                                       "tensors: T",
                                       nullptr};
  // `pending` will hold the results. No other operation reads it: HororingWait returns them.
  static const char* const outputs[] = {"pending: P", "handle: int64", nullptr};
  Register(
      {"HororingSubmit", attributes, inputs, outputs, false, Create, Compute, Destroy, nullptr},
      status);
}

}  // namespace hororing::tensorflow
