#include "base/types.h"

#include <cctype>
#include <iterator>

namespace hororing {
namespace {

// By DataType, ReduceOp and Collective. Numbers from outside are checked where they come in.
constexpr struct {
  const char* name;
  size_t bytes;
} kTypes[] = {{"uint8", 1},   {"int8", 1},  {"uint16", 2},  {"int16", 2},
              {"int32", 4},   {"int64", 8}, {"float16", 2}, {"float32", 4},
              {"float64", 8}, {"bool", 1},  {"bfloat16", 2}};
constexpr const char* kOps[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
constexpr const char* kCollectives[] = {"allreduce", "allgather",       "broadcast",
                                        "barrier",   "alltoall",        "reducescatter",
                                        "join",      "add_process_set", "remove_process_set"};
static_assert(std::size(kTypes) == kDataTypeCount && std::size(kOps) == kReduceOpCount &&
              std::size(kCollectives) == static_cast<size_t>(Collective::kRemoveProcessSet) + 1);

}  // namespace

size_t ElementSize(DataType dtype) { return kTypes[static_cast<size_t>(dtype)].bytes; }
const char* Name(DataType dtype) { return kTypes[static_cast<size_t>(dtype)].name; }
const char* Name(ReduceOp op) { return kOps[static_cast<size_t>(op)]; }
const char* Name(Collective kind) { return kCollectives[static_cast<size_t>(kind)]; }

std::string UpperName(Collective kind) {
  std::string name = Name(kind);
  for (char& letter : name) letter = static_cast<char>(std::toupper(letter));
  return name;
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
