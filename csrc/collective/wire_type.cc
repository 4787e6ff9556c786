#include "collective/wire_type.h"

#include <algorithm>
#include <iterator>

#include "collective/size_classes.h"

namespace hororing {
namespace {

constexpr const char* kNames[] = {"full", "bfloat16", "float16"};
constexpr size_t kPacketOrTwo = 4 << 10;

DataType ElementOf(WireType type) {
  return type == WireType::kFloat16 ? DataType::kFloat16 : DataType::kBfloat16;
}

}  // namespace

const char* Name(WireType type) { return kNames[static_cast<size_t>(type)]; }

Status ParseWires(const std::string& names, Tuning* tuning) {
  WordsByClass words;
  HORORING_RETURN_IF_ERROR(SplitByClass(names, "wires", &words));
  for (size_t i = 0; i < words.size(); ++i) {
    const auto found = std::find(std::begin(kNames), std::end(kNames), words[i]);
    if (found == std::end(kNames)) {
      return Status(Code::kInvalidArgument,
                    "unknown wire '" + words[i] + "'; choose full, bfloat16 or float16");
    }
    tuning->wires[i] = static_cast<uint8_t>(found - std::begin(kNames));
  }
  return Status::Ok();
}

std::string WireNames(const Tuning& tuning) {
  WordsByClass words;
  std::transform(tuning.wires.begin(), tuning.wires.end(), words.begin(),
                 [](uint8_t each) { return Name(static_cast<WireType>(each)); });
  return JoinByClass(words);
}

WireType WireFor(const Tuning& tuning, size_t bytes, const ReduceSpec& spec, bool reproducible) {
  const bool sum = spec.op == ReduceOp::kSum || spec.op == ReduceOp::kAverage;
  if (!sum || spec.dtype != DataType::kFloat32) return WireType::kFull;
  if (bytes <= kPacketOrTwo && !reproducible) return WireType::kFull;
  // Batches of all sizes go alike where it must not matter what a tensor is fused with.
  return static_cast<WireType>(tuning.wires[Tuning::ClassOf(bytes)]);
}

ReduceSpec OnWire(const ReduceSpec& spec, WireType type) {
  if (type == WireType::kFull) return spec;
  return {ElementOf(type), spec.op, 1.0, spec.postscale};
}

size_t PartialOnWire(const ReduceSpec& spec, WireType type) {
  return type == WireType::kFull ? PartialSize(spec) : ElementSize(ElementOf(type));
}

void Narrow(WireType type, double factor, void* to, const void* from, size_t n) {
  FinishPartial({ElementOf(type), ReduceOp::kSum, 1.0, factor}, 1, to, from, n);
}

void Widen(WireType type, void* to, const void* from, size_t n) {
  StartPartial({ElementOf(type), ReduceOp::kSum, 1.0, 1.0}, to, from, n);
}

}  // namespace hororing
