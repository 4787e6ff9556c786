#include "backend/nccl_batch.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "backend/common.h"
#include "base/half.h"

namespace hororing {
namespace {

bool IsFloating(DataType dtype) {
  return dtype == DataType::kFloat16 || dtype == DataType::kBfloat16 ||
         dtype == DataType::kFloat32 || dtype == DataType::kFloat64;
}

// Whether a number of that type is as good as `value`.
bool Holds(DataType dtype, double value) {
  const float narrow = static_cast<float>(value);
  if (dtype == DataType::kFloat16) return HalfToFloat(FloatToHalf(narrow)) == narrow;
  if (dtype == DataType::kBfloat16) return Bfloat16ToFloat(FloatToBfloat16(narrow)) == narrow;
  return true;
}

bool AllEqual(const std::vector<size_t>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(),
                     [&](size_t number) { return number == numbers[0]; });
}

// The calls of one group: those after the first that fails are left out.
class Calls {
 public:
  Calls(NcclCommunicator& communicator, const Device& device)
      : api_(communicator.api()), comm_(communicator.comm()), stream_(device.stream()) {}
  NcclResult result() const { return result_; }

  void AllReduce(const void* from, void* to, size_t count, NcclType type, NcclOp op) {
    Keep(api_.all_reduce(from, to, count, type, op, comm_, stream_));
  }
  void Reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, int root) {
    Keep(api_.reduce(from, to, count, type, op, root, comm_, stream_));
  }
  void ReduceScatter(const void* from, void* to, size_t count, NcclType type, NcclOp op) {
    Keep(api_.reduce_scatter(from, to, count, type, op, comm_, stream_));
  }
  void AllGather(const void* from, void* to, size_t bytes) {
    Keep(api_.all_gather(from, to, bytes, kNcclUint8, comm_, stream_));
  }
  void Broadcast(const void* from, void* to, size_t bytes, int root) {
    Keep(api_.broadcast(from, to, bytes, kNcclUint8, root, comm_, stream_));
  }
  void Send(const void* from, size_t bytes, int peer) {
    Keep(api_.send(from, bytes, kNcclUint8, peer, comm_, stream_));
  }
  void Receive(void* to, size_t bytes, int peer) {
    Keep(api_.receive(to, bytes, kNcclUint8, peer, comm_, stream_));
  }

 private:
  void Keep(NcclResult result) {
    if (result_ == kNcclSuccess || result_ == kNcclInProgress) result_ = result;
  }

  const NcclApi& api_;
  const NcclComm comm_;
  const CuStream stream_;
  NcclResult result_ = kNcclSuccess;
};

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
      *op = kNcclAvg;
      return factor == 1.0 ? Status::Ok() : communicator.ScaledSum(spec.dtype, factor / ranks, op);
    case ReduceOp::kAdasum: break;
  }
  return Status(Code::kInternal, std::string("NCCL has no ") + Name(spec.op));
}

std::vector<const BatchEntry*> NotEmpty(const Batch& batch) {
  std::vector<const BatchEntry*> entries;
  for (const BatchEntry& entry : batch.entries) {
    if (entry.elements > 0) entries.push_back(&entry);
  }
  return entries;
}

// Where each tensor lies in the fusion buffer, and its bytes without the padding.
std::vector<DeviceCopy> Packing(const std::vector<const BatchEntry*>& entries, size_t element,
                                std::byte* to) {
  std::vector<DeviceCopy> copies;
  for (const BatchEntry* entry : entries) {
    copies.push_back({to, entry->input, entry->elements * element});
    to += RoundUp(copies.back().amount, kEntryAlign);
  }
  return copies;
}

// How the kernels take tensors into the fusion buffer and back, and what they are there.
struct Widening {
  DeviceCast in, out;
  DataType dtype;
};

Widening WideningOf(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16:
      return {DeviceCast::kFloat16ToFloat32, DeviceCast::kFloat32ToFloat16, DataType::kFloat32};
    case DataType::kBfloat16:
      return {DeviceCast::kBfloat16ToFloat32, DeviceCast::kFloat32ToBfloat16, DataType::kFloat32};
    case DataType::kFloat64: return {DeviceCast::kFloat64, DeviceCast::kFloat64, dtype};
    default: return {DeviceCast::kFloat32, DeviceCast::kFloat32, DataType::kFloat32};
  }
}

NcclOp PlainOp(ReduceOp op) {
  if (op == ReduceOp::kMin) return kNcclMin;
  if (op == ReduceOp::kMax) return kNcclMax;
  return op == ReduceOp::kProduct ? kNcclProd : kNcclSum;
}

// By way of the fusion buffer, in pieces that fill it: scaled and cast there, reduced, and scaled,
// cast and rounded, once, on the way back. The order of the stream lets the pieces share the
// buffer.
Status RunScaled(const Batch& batch, NcclCommunicator& communicator, const Device& device,
                 size_t fusion_bytes, int ranks, TimeNs deadline, TraceSink& trace) {
  const ReduceSpec& spec = batch.reduce;
  const Widening widening = WideningOf(spec.dtype);
  const size_t element = ElementSize(spec.dtype), wide = ElementSize(widening.dtype);
  const NcclType type = NcclTypeOf(widening.dtype);
  const double after = spec.op == ReduceOp::kAverage ? spec.postscale / ranks : spec.postscale;
  auto* const buffer =
      static_cast<std::byte*>(communicator.FusionBuffer(kLeastScalingBytes, fusion_bytes));
  if (buffer == nullptr) {
    return Status(Code::kTransport, "no memory on " + device.name() +
                                        " for the fusion buffer, which tensors with scale factors "
                                        "need; lower HORORING_FUSION_BYTES");
  }
  Calls calls(communicator, device);
  std::vector<DeviceCopy> in, out;
  size_t filled = 0;  // bytes of the buffer
  const auto send = [&] {
    StageSpan pack(trace, Stage::kPack, batch);
    HORORING_RETURN_IF_ERROR(device.ScaleOnDevice(in, widening.in, spec.prescale));
    pack.End(filled);
    StageSpan reduce(trace, Stage::kReduce, batch);
    HORORING_RETURN_IF_ERROR(communicator.Group(
        [&] {
          calls.AllReduce(buffer, buffer, filled / wide, type, PlainOp(spec.op));
          return calls.result();
        },
        deadline));
    reduce.End(filled);
    StageSpan unpack(trace, Stage::kUnpack, batch);
    HORORING_RETURN_IF_ERROR(device.ScaleOnDevice(out, widening.out, after));
    unpack.End(filled);
    in.clear();
    out.clear();
    filled = 0;
    return Status::Ok();
  };
  for (const BatchEntry& entry : batch.entries) {
    const auto* from = static_cast<const std::byte*>(entry.input);
    auto* to = static_cast<std::byte*>(entry.output);
    for (size_t first = 0; first < entry.elements;) {
      if (fusion_bytes - filled < kEntryAlign) HORORING_RETURN_IF_ERROR(send());
      const size_t elements = std::min(entry.elements - first, (fusion_bytes - filled) / wide);
      in.push_back({buffer + filled, from + first * element, elements});
      out.push_back({to + first * element, buffer + filled, elements});
      first += elements;
      filled = std::min(filled + RoundUp(elements * wide, kEntryAlign), fusion_bytes);
    }
  }
  return filled > 0 ? send() : Status::Ok();
}

Status RunAllreduce(const Batch& batch, NcclCommunicator& communicator, const Device& device,
                    size_t fusion_bytes, int ranks, TimeNs deadline, TraceSink& trace) {
  const std::vector<const BatchEntry*> entries = NotEmpty(batch);
  if (entries.empty()) return Status::Ok();
  const size_t element = ElementSize(batch.reduce.dtype);
  const NcclType type = NcclTypeOf(batch.reduce.dtype);
  NcclOp op = kNcclSum;
  HORORING_RETURN_IF_ERROR(OpOf(batch.reduce, ranks, communicator, &op));
  size_t padded = 0;
  for (const BatchEntry* entry : entries) padded += RoundUp(entry->elements * element, kEntryAlign);
  Calls calls(communicator, device);
  void* const buffer =
      entries.size() > 1 ? communicator.FusionBuffer(padded, fusion_bytes) : nullptr;
  if (buffer == nullptr) {
    StageSpan span(trace, Stage::kReduce, batch);
    HORORING_RETURN_IF_ERROR(communicator.Group(
        [&] {
          for (const BatchEntry* entry : entries) {
            calls.AllReduce(entry->input, entry->output, entry->elements, type, op);
          }
          return calls.result();
        },
        deadline));
    span.End(batch.bytes());
    return Status::Ok();
  }
  std::vector<DeviceCopy> copies = Packing(entries, element, static_cast<std::byte*>(buffer));
  StageSpan pack(trace, Stage::kPack, batch);
  HORORING_RETURN_IF_ERROR(device.CopyOnDevice(copies));
  pack.End(batch.bytes());
  StageSpan reduce(trace, Stage::kReduce, batch);
  HORORING_RETURN_IF_ERROR(communicator.Group(
      [&] {
        // The padding, too: whatever lies there harms nobody.
        calls.AllReduce(buffer, buffer, padded / element, type, op);
        return calls.result();
      },
      deadline));
  reduce.End(batch.bytes());
  StageSpan unpack(trace, Stage::kUnpack, batch);
  for (size_t i = 0; i < copies.size(); ++i) {
    copies[i] = {entries[i]->output, copies[i].to, copies[i].amount};
  }
  HORORING_RETURN_IF_ERROR(device.CopyOnDevice(copies));
  unpack.End(batch.bytes());
  return Status::Ok();
}

void Gather(const BatchEntry& entry, Calls& calls) {
  const std::vector<size_t>& bytes = entry.receive_bytes;
  if (AllEqual(bytes)) {
    if (bytes[0] > 0) calls.AllGather(entry.input, entry.output, bytes[0]);
    return;
  }
  auto* to = static_cast<std::byte*>(entry.output);
  for (size_t root = 0; root < bytes.size(); ++root) {
    if (bytes[root] > 0) calls.Broadcast(entry.input, to, bytes[root], static_cast<int>(root));
    to += bytes[root];
  }
}

void Exchange(const BatchEntry& entry, Calls& calls) {
  const auto* from = static_cast<const std::byte*>(entry.input);
  auto* to = static_cast<std::byte*>(entry.output);
  for (size_t peer = 0; peer < entry.send_bytes.size(); ++peer) {
    const size_t sent = entry.send_bytes[peer], received = entry.receive_bytes[peer];
    if (sent > 0) calls.Send(from, sent, static_cast<int>(peer));
    if (received > 0) calls.Receive(to, received, static_cast<int>(peer));
    from += sent;
    to += received;
  }
}

void Scatter(const BatchEntry& entry, DataType dtype, NcclOp op, Calls& calls) {
  const NcclType type = NcclTypeOf(dtype);
  if (AllEqual(entry.parts)) {
    if (entry.parts[0] > 0) {
      calls.ReduceScatter(entry.input, entry.output, entry.parts[0], type, op);
    }
    return;
  }
  const auto* from = static_cast<const std::byte*>(entry.input);
  for (size_t root = 0; root < entry.parts.size(); ++root) {
    if (entry.parts[root] > 0) {
      calls.Reduce(from, entry.output, entry.parts[root], type, op, static_cast<int>(root));
    }
    from += entry.parts[root] * ElementSize(dtype);
  }
}

}  // namespace

NcclWay NcclWayOf(const Batch& batch, int ranks, bool scales) {
  const bool reduces =
      batch.kind == Collective::kAllreduce || batch.kind == Collective::kReducescatter;
  if (!reduces) return NcclWay::kPlain;  // bytes
  const ReduceSpec& spec = batch.reduce;
  if (!NcclHas(spec.dtype) || spec.op == ReduceOp::kAdasum) return NcclWay::kNot;
  const bool floating = IsFloating(spec.dtype);
  if (spec.op == ReduceOp::kAverage && !floating) return NcclWay::kNot;
  if (spec.prescale == 1.0 && spec.postscale == 1.0) return NcclWay::kPlain;
  if (!floating) return NcclWay::kNot;
  const double factor = spec.prescale * spec.postscale;
  if (spec.op == ReduceOp::kSum && Holds(spec.dtype, factor)) return NcclWay::kPlain;
  if (spec.op == ReduceOp::kAverage && Holds(spec.dtype, factor / ranks)) return NcclWay::kPlain;
  return scales && batch.kind == Collective::kAllreduce ? NcclWay::kScaled : NcclWay::kNot;
}

Status RunByNccl(const Batch& batch, NcclWay way, NcclCommunicator& communicator,
                 const Device& device, size_t fusion_bytes, int ranks, TimeNs deadline,
                 TraceSink& trace) {
  if (way == NcclWay::kScaled) {
    return RunScaled(batch, communicator, device, fusion_bytes, ranks, deadline, trace);
  }
  if (batch.kind == Collective::kAllreduce) {
    return RunAllreduce(batch, communicator, device, fusion_bytes, ranks, deadline, trace);
  }
  NcclOp op = kNcclSum;
  if (batch.kind == Collective::kReducescatter) {
    HORORING_RETURN_IF_ERROR(OpOf(batch.reduce, ranks, communicator, &op));
  }
  Calls calls(communicator, device);
  StageSpan span(trace, Stage::kReduce, batch);
  HORORING_RETURN_IF_ERROR(communicator.Group(
      [&] {
        for (const BatchEntry& entry : batch.entries) {
          const size_t bytes = entry.elements * ElementSize(batch.reduce.dtype);
          if (batch.kind == Collective::kAllgather) Gather(entry, calls);
          if (batch.kind == Collective::kAlltoall) Exchange(entry, calls);
          if (batch.kind == Collective::kReducescatter) {
            Scatter(entry, batch.reduce.dtype, op, calls);
          }
          if (batch.kind == Collective::kBroadcast && bytes > 0) {
            calls.Broadcast(entry.input, entry.output, bytes, batch.root);
          }
        }
        return calls.result();
      },
      deadline));
  span.End(batch.bytes());
  return Status::Ok();
}

}  // namespace hororing
