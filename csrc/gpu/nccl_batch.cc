#include "gpu/nccl_batch.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "backend/common.h"
#include "kernels/half.h"

namespace hororing {
namespace {

// Whether NCCL, which computes with the tensor's type, multiplies by `factor` as the host rounds.
bool MultipliesExactly(DataType dtype, double factor) {
  int exponent = 0;
  if (ElementSize(dtype) == 2 && std::abs(std::frexp(factor, &exponent)) != 0.5) return false;
  const float narrow = static_cast<float>(factor);
  if (dtype == DataType::kFloat16) return HalfToFloat(FloatToHalf(narrow)) == narrow;
  if (dtype == DataType::kBfloat16) return Bfloat16ToFloat(FloatToBfloat16(narrow)) == narrow;
  return true;
}

bool AllEqual(const std::vector<size_t>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(),
                     [&](size_t number) { return number == numbers[0]; });
}

// The calls of one group. `result` is that of the first that fails.
class Calls {
 public:
  Calls(NcclCommunicator& communicator, const Device& device)
      : api(communicator.api()), comm_(communicator.comm()), stream_(device.stream()) {}
  NcclResult result() const { return result_; }

  template <typename Function, typename... Arguments>
  void operator()(const Function& function, Arguments... arguments) {
    const NcclResult result = function(arguments..., comm_, stream_);
    if (result_ == kNcclSuccess || result_ == kNcclInProgress) result_ = result;
  }

  const NcclApi& api;

 private:
  const NcclComm comm_;
  const CuStream stream_;
  NcclResult result_ = kNcclSuccess;
};

std::vector<const BatchEntry*> NotEmpty(const Batch& batch) {
  std::vector<const BatchEntry*> entries;
  for (const BatchEntry& entry : batch.entries) {
    if (entry.elements > 0) entries.push_back(&entry);
  }
  return entries;
}

// One allreduce: a tensor, or tensors of one spec in the fusion buffer.
struct Run {
  const std::byte* from;
  std::byte* to;
  size_t bytes;
  ReduceSpec spec;
  NcclOp op;
};

// The same tensors as separate runs, and in the fusion buffer. `copies`: the place of each tensor
// there, and its bytes without the padding.
std::vector<Run> Alone(const std::vector<const BatchEntry*>& entries) {
  std::vector<Run> runs;
  for (const BatchEntry* entry : entries) {
    runs.push_back({static_cast<const std::byte*>(entry->input),
                    static_cast<std::byte*>(entry->output), entry->bytes(), entry->reduce,
                    kNcclSum});
  }
  return runs;
}
std::vector<Run> Packed(const std::vector<const BatchEntry*>& entries, std::byte* to,
                        std::vector<DeviceCopy>* copies) {
  std::vector<Run> runs;
  for (const BatchEntry* entry : entries) {
    const size_t padded = RoundUp(entry->bytes(), kCacheLine);
    copies->push_back({to, entry->input, entry->bytes()});
    if (runs.empty() || !(runs.back().spec == entry->reduce)) {
      runs.push_back({to, to, 0, entry->reduce, kNcclSum});
    }
    runs.back().bytes += padded;  // reducing the padding is harmless
    to += padded;
  }
  return runs;
}

// Booleans are bytes of 0 and 1: their sum is whether any is set, their product whether all are.
Status OpOf(const ReduceSpec& spec, int ranks, NcclCommunicator& communicator, NcclOp* op) {
  const double factor = spec.prescale * spec.postscale;
  switch (spec.op) {
    case ReduceOp::kMin: *op = kNcclMin; return Status::Ok();
    case ReduceOp::kMax: *op = kNcclMax; return Status::Ok();
    case ReduceOp::kProduct:
      *op = spec.dtype == DataType::kBool ? kNcclMin : kNcclProd;
      return Status::Ok();
    case ReduceOp::kSum:
      *op = spec.dtype == DataType::kBool ? kNcclMax : kNcclSum;
      return factor == 1.0 ? Status::Ok() : communicator.ScaledSum(spec.dtype, factor, op);
    case ReduceOp::kAverage:
      *op = ranks > 1 ? kNcclAvg : kNcclSum;
      if (spec.weights != nullptr) {
        return communicator.ScaledSum(spec.dtype, factor / spec.weights->back(), op);
      }
      return factor == 1.0 ? Status::Ok() : communicator.ScaledSum(spec.dtype, factor / ranks, op);
    case ReduceOp::kAdasum: break;
  }
  return Status(Code::kInternal, std::string("NCCL has no ") + Name(spec.op));
}

Status RunAllreduce(const Batch& batch, NcclCommunicator& communicator, const Device& device,
                    int ranks, TimeNs deadline, TraceSink& trace) {
  const std::vector<const BatchEntry*> entries = NotEmpty(batch);
  if (entries.empty()) return Status::Ok();
  size_t padded = 0;
  for (const BatchEntry* entry : entries) padded += RoundUp(entry->bytes(), kCacheLine);
  const bool packs = entries.size() > 1 && padded <= communicator.fusion_bytes();
  std::vector<DeviceCopy> copies;
  std::vector<Run> runs =
      packs ? Packed(entries, communicator.fusion_buffer(), &copies) : Alone(entries);
  for (Run& run : runs) HORORING_RETURN_IF_ERROR(OpOf(run.spec, ranks, communicator, &run.op));
  if (packs) {
    StageSpan pack(trace, Stage::kPack, batch);
    HORORING_RETURN_IF_ERROR(device.CopyOnDevice(copies));
  }
  Calls calls(communicator, device);
  StageSpan reduce(trace, Stage::kReduce, batch);
  HORORING_RETURN_IF_ERROR(communicator.Group(
      [&] {
        for (const Run& run : runs) {
          calls(calls.api.all_reduce, run.from, run.to, run.bytes / ElementSize(run.spec.dtype),
                NcclTypeOf(run.spec.dtype), run.op);
        }
        return calls.result();
      },
      deadline));
  reduce.End(batch.bytes());
  if (!packs) return Status::Ok();
  StageSpan unpack(trace, Stage::kUnpack, batch);
  for (size_t i = 0; i < copies.size(); ++i) {
    copies[i] = {entries[i]->output, copies[i].to, copies[i].bytes};
  }
  return device.CopyOnDevice(copies);
}

void Broadcast(const void* from, void* to, size_t bytes, int root, Calls& calls) {
  calls(calls.api.broadcast, from, to, bytes, kNcclUint8, root);
}

void Gather(const BatchEntry& entry, Calls& calls) {
  const std::vector<size_t>& bytes = entry.receive_bytes;
  if (AllEqual(bytes)) {
    if (bytes[0] > 0) calls(calls.api.all_gather, entry.input, entry.output, bytes[0], kNcclUint8);
    return;
  }
  auto* to = static_cast<std::byte*>(entry.output);
  for (size_t root = 0; root < bytes.size(); ++root) {
    if (bytes[root] > 0) Broadcast(entry.input, to, bytes[root], static_cast<int>(root), calls);
    to += bytes[root];
  }
}

void Exchange(const BatchEntry& entry, Calls& calls) {
  const auto* from = static_cast<const std::byte*>(entry.input);
  auto* to = static_cast<std::byte*>(entry.output);
  for (size_t peer = 0; peer < entry.send_bytes.size(); ++peer) {
    const size_t sent = entry.send_bytes[peer], received = entry.receive_bytes[peer];
    const int rank = static_cast<int>(peer);
    if (sent > 0) calls(calls.api.send, from, sent, kNcclUint8, rank);
    if (received > 0) calls(calls.api.receive, to, received, kNcclUint8, rank);
    from += sent;
    to += received;
  }
}

void Scatter(const BatchEntry& entry, DataType dtype, NcclOp op, Calls& calls) {
  const NcclType type = NcclTypeOf(dtype);
  if (AllEqual(entry.parts)) {
    if (entry.parts[0] > 0) {
      calls(calls.api.reduce_scatter, entry.input, entry.output, entry.parts[0], type, op);
    }
    return;
  }
  const auto* from = static_cast<const std::byte*>(entry.input);
  for (size_t root = 0; root < entry.parts.size(); ++root) {
    if (entry.parts[root] > 0) {
      calls(calls.api.reduce, from, entry.output, entry.parts[root], type, op,
            static_cast<int>(root));
    }
    from += entry.parts[root] * ElementSize(dtype);
  }
}

}  // namespace

bool NcclSupports(Collective kind, const ReduceSpec& spec, int ranks) {
  if (!IsReduction(kind)) return true;  // bytes
  if (!NcclSupportsType(spec.dtype) || spec.op == ReduceOp::kAdasum) return false;
  const bool floating = IsFloating(spec.dtype);
  if (spec.op == ReduceOp::kAverage && !floating) return false;
  // NCCL 2.28 does not write the last elements of one rank's sum with a factor; 2.30.7 does.
  const bool scales = spec.prescale != 1.0 || spec.postscale != 1.0 || spec.weights != nullptr;
  if (ranks == 1 && scales) return false;
  if (spec.weights != nullptr) {  // 16-bit factors would be rounded; 0 times NaN is NaN
    const std::vector<double>& weights = *spec.weights;
    return ElementSize(spec.dtype) > 2 && std::count(weights.begin(), weights.end(), 0.0) == 0;
  }
  const double factor = spec.prescale * spec.postscale;
  // NCCL's own average, too, multiplies by 1/ranks in the tensor's type: a bias of 0.2 % for
  // bfloat16 on 3 ranks. gradient_predivide_factor cancels out.
  if (spec.op == ReduceOp::kAverage) return MultipliesExactly(spec.dtype, factor / ranks);
  if (spec.prescale == 1.0 && spec.postscale == 1.0) return true;
  if (!floating) return false;
  if (spec.op == ReduceOp::kSum) return MultipliesExactly(spec.dtype, factor);
  return false;
}

bool WantsFusionBuffer(const Batch& batch) {
  return batch.kind == Collective::kAllreduce && NotEmpty(batch).size() > 1;
}

Status RunByNccl(const Batch& batch, NcclCommunicator& communicator, const Device& device,
                 int ranks, TimeNs deadline, TraceSink& trace) {
  HORORING_RETURN_IF_ERROR(communicator.LimitScaledSums());
  if (batch.kind == Collective::kAllreduce) {
    return RunAllreduce(batch, communicator, device, ranks, deadline, trace);
  }
  NcclOp op = kNcclSum;
  if (batch.kind == Collective::kReducescatter) {
    HORORING_RETURN_IF_ERROR(OpOf(batch.reduce(), ranks, communicator, &op));
  }
  Calls calls(communicator, device);
  StageSpan span(trace, Stage::kReduce, batch);
  return communicator.Group(
      [&] {
        for (const BatchEntry& entry : batch.entries) {
          if (batch.kind == Collective::kAllgather) Gather(entry, calls);
          if (batch.kind == Collective::kAlltoall) Exchange(entry, calls);
          if (batch.kind == Collective::kReducescatter) {
            Scatter(entry, batch.reduce().dtype, op, calls);
          }
          if (batch.kind == Collective::kBroadcast && entry.elements > 0) {
            Broadcast(entry.input, entry.output, entry.bytes(), batch.root, calls);
          }
        }
        return calls.result();
      },
      deadline);
}

}  // namespace hororing
