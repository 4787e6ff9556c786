#include "base/types.h"

#include <cctype>
#include <iterator>

#include "base/text.h"

namespace hororing {
namespace {

// By DataType, ReduceOp and Collective. Numbers from outside are checked where they come in.
constexpr const char* kTypes[] = {"uint8",
                                  "int8",
                                  "uint16",
                                  "int16",
                                  "int32",
                                  "int64",
                                  "float16",
                                  "float32",
                                  "float64",
                                  "bool",
                                  "bfloat16",
                                  "uint32",
                                  "uint64",
                                  "float8_e4m3fn",
                                  "float8_e5m2",
                                  "float8_e4m3fnuz",
                                  "float8_e5m2fnuz",
                                  "float8_e8m0fnu",
                                  "float4_e2m1fn_x2",
                                  "int4",
                                  "uint4"};
constexpr size_t kBytes[] = {1, 1, 2, 2, 4, 8, 2, 4, 8, 1, 2, 4, 8, 1, 1, 1, 1, 1, 1, 1, 1};
constexpr const char* kOps[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
constexpr const char* kCollectives[] = {"allreduce", "allgather",       "broadcast",
                                        "barrier",   "alltoall",        "reducescatter",
                                        "join",      "add_process_set", "remove_process_set"};
static_assert(std::size(kTypes) == kCopiedTypeCount && std::size(kBytes) == kCopiedTypeCount &&
              std::size(kOps) == kReduceOpCount &&
              std::size(kCollectives) == static_cast<size_t>(Collective::kRemoveProcessSet) + 1);

}  // namespace

size_t ElementSize(DataType dtype) { return kBytes[static_cast<size_t>(dtype)]; }
const char* Name(DataType dtype) { return kTypes[static_cast<size_t>(dtype)]; }
const char* Name(ReduceOp op) { return kOps[static_cast<size_t>(op)]; }
const char* Name(Collective kind) { return kCollectives[static_cast<size_t>(kind)]; }

std::string UpperName(Collective kind) {
  std::string name = Name(kind);
  for (char& letter : name) letter = static_cast<char>(std::toupper(letter));
  return name;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return "[" + Listed(shape, [](int64_t extent) { return std::to_string(extent); }) + "]";
}

int64_t Elements(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t extent : shape) product *= extent;
  return product;
}

}  // namespace hororing
