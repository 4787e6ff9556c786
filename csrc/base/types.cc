#include "base/types.h"

namespace hororing {

// The switches below have no default, so that a new enumerator causes a compiler warning. The
// values after them are for invalid numbers from outside.

size_t ElementSize(DataType dtype) {
  switch (dtype) {
    case DataType::kUint8:
    case DataType::kInt8:
    case DataType::kBool: return 1;
    case DataType::kUint16:
    case DataType::kInt16:
    case DataType::kFloat16:
    case DataType::kBfloat16: return 2;
    case DataType::kInt32:
    case DataType::kFloat32: return 4;
    case DataType::kInt64:
    case DataType::kFloat64: return 8;
  }
  return 0;
}

const char* Name(DataType dtype) {
  switch (dtype) {
    case DataType::kUint8: return "uint8";
    case DataType::kInt8: return "int8";
    case DataType::kUint16: return "uint16";
    case DataType::kInt16: return "int16";
    case DataType::kInt32: return "int32";
    case DataType::kInt64: return "int64";
    case DataType::kFloat16: return "float16";
    case DataType::kFloat32: return "float32";
    case DataType::kFloat64: return "float64";
    case DataType::kBool: return "bool";
    case DataType::kBfloat16: return "bfloat16";
  }
  return "unknown dtype";
}

const char* Name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAverage: return "Average";
    case ReduceOp::kSum: return "Sum";
    case ReduceOp::kAdasum: return "Adasum";
    case ReduceOp::kMin: return "Min";
    case ReduceOp::kMax: return "Max";
    case ReduceOp::kProduct: return "Product";
  }
  return "unknown op";
}

const char* Name(Collective kind) {
  switch (kind) {
    case Collective::kAllreduce: return "allreduce";
    case Collective::kAllgather: return "allgather";
    case Collective::kBroadcast: return "broadcast";
    case Collective::kBarrier: return "barrier";
    case Collective::kAlltoall: return "alltoall";
    case Collective::kReducescatter: return "reducescatter";
    case Collective::kJoin: return "join";
    case Collective::kAddProcessSet: return "add_process_set";
    case Collective::kRemoveProcessSet: return "remove_process_set";
  }
  return "unknown collective";
}

const char* UpperName(Collective kind) {
  switch (kind) {
    case Collective::kAllreduce: return "ALLREDUCE";
    case Collective::kAllgather: return "ALLGATHER";
    case Collective::kBroadcast: return "BROADCAST";
    case Collective::kBarrier: return "BARRIER";
    case Collective::kAlltoall: return "ALLTOALL";
    case Collective::kReducescatter: return "REDUCESCATTER";
    case Collective::kJoin: return "JOIN";
    case Collective::kAddProcessSet: return "ADD_PROCESS_SET";
    case Collective::kRemoveProcessSet: return "REMOVE_PROCESS_SET";
  }
  return "UNKNOWN COLLECTIVE";
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

int64_t TensorView::elements() const {
  int64_t product = 1;
  for (const int64_t extent : shape) product *= extent;
  return product;
}

}  // namespace hororing
