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

// By way of the fusion buffer, in pieces that fill it: scaled and cast there, reduced, and scaled,
// cast and rounded, once, on the way back. The order of the stream lets the pieces share the
// buffer.
class Scaling {
 public:
  Scaling(const Batch& batch, NcclCommunicator& communicator, const Device& device, int ranks,
          TimeNs deadline, TraceSink& trace)
      : batch_(batch),
        communicator_(communicator),
        device_(device),
        ranks_(ranks),
        deadline_(deadline),
        trace_(trace),
        scatters_(batch.kind == Collective::kReducescatter),
        rows_(scatters_ ? static_cast<size_t>(ranks) : 1) {}

  Status Run() {
    const size_t room = RowBytes(communicator_.fusion_bytes(), rows_, scatters_);
    for (const BatchEntry& entry : batch_.entries) {
      const std::vector<size_t> parts = Parts(entry);
      const size_t most = *std::max_element(parts.begin(), parts.end());
      for (size_t first = 0; first < most;) {
        if (room - row_ < kEntryAlign) HORORING_RETURN_IF_ERROR(Send());
        const size_t elements = std::min(most - first, (room - row_) / wide_);
        stretches_.push_back({&entry, first, elements});
        first += elements;
        row_ += RoundUp(elements * wide_, kEntryAlign);
      }
    }
    return stretches_.empty() ? Status::Ok() : Send();
  }

  // Of one of `rows` rows in a buffer; behind those is one for what comes back, if it scatters.
  static size_t RowBytes(size_t buffer_bytes, size_t rows, bool scatters) {
    return buffer_bytes / (rows + (scatters ? 1 : 0)) / kEntryAlign * kEntryAlign;
  }

 private:
  // So many elements of each part of an entry, or what there is of them.
  struct Stretch {
    const BatchEntry* entry;
    size_t first, elements;
  };

  std::vector<size_t> Parts(const BatchEntry& entry) const {
    return scatters_ ? entry.parts : std::vector<size_t>{entry.elements};
  }

  // The buffer has a row for each part, that is for each rank that gets one: NCCL scatters parts
  // of equal size, so where one is shorter than the others, whatever lies there is summed as well.
  Status Send() {
    const ReduceSpec& spec = batch_.reduce;
    std::byte* const buffer = communicator_.fusion_buffer();
    std::byte* const reduced = scatters_ ? buffer + rows_ * row_ : buffer;
    const size_t own = scatters_ ? static_cast<size_t>(communicator_.rank()) : 0;
    std::vector<DeviceCopy> in, out;
    size_t at = 0;
    for (const Stretch& stretch : stretches_) {
      const auto* from = static_cast<const std::byte*>(stretch.entry->input);
      auto* const to = static_cast<std::byte*>(stretch.entry->output);
      const std::vector<size_t> parts = Parts(*stretch.entry);
      for (size_t row = 0; row < rows_; ++row) {
        const size_t left = parts[row] - std::min(parts[row], stretch.first);
        const size_t elements = std::min(stretch.elements, left), first = stretch.first * element_;
        in.push_back({buffer + row * row_ + at, from + first, elements});
        if (row == own) out.push_back({to + first, reduced + at, elements});
        from += parts[row] * element_;
      }
      at += RoundUp(stretch.elements * wide_, kEntryAlign);
    }
    StageSpan pack(trace_, Stage::kPack, batch_);
    HORORING_RETURN_IF_ERROR(device_.ScaleOnDevice(in, widening_.in, spec.prescale));
    pack.End(rows_ * row_);
    StageSpan reduce(trace_, Stage::kReduce, batch_);
    HORORING_RETURN_IF_ERROR(communicator_.Group(
        [&] {
          Calls calls(communicator_, device_);
          const NcclType type = NcclTypeOf(widening_.dtype);
          const NcclOp op = PlainOp(spec.op);
          if (scatters_) calls.ReduceScatter(buffer, reduced, row_ / wide_, type, op);
          if (!scatters_) calls.AllReduce(buffer, buffer, row_ / wide_, type, op);
          return calls.result();
        },
        deadline_));
    reduce.End(rows_ * row_);
    StageSpan unpack(trace_, Stage::kUnpack, batch_);
    const double after = spec.op == ReduceOp::kAverage ? spec.postscale / ranks_ : spec.postscale;
    HORORING_RETURN_IF_ERROR(device_.ScaleOnDevice(out, widening_.out, after));
    unpack.End(row_);
    stretches_.clear();
    row_ = 0;
    return Status::Ok();
  }

  const Batch& batch_;
  NcclCommunicator& communicator_;
  const Device& device_;
  const int ranks_;
  const TimeNs deadline_;
  TraceSink& trace_;
  const bool scatters_;
  const size_t rows_;
  const Widening widening_ = WideningOf(batch_.reduce.dtype);
  const size_t element_ = ElementSize(batch_.reduce.dtype), wide_ = ElementSize(widening_.dtype);
  std::vector<Stretch> stretches_;
  size_t row_ = 0;  // bytes of a row that are taken
};

Status RunAllreduce(const Batch& batch, NcclCommunicator& communicator, const Device& device,
                    int ranks, TimeNs deadline, TraceSink& trace) {
  const std::vector<const BatchEntry*> entries = NotEmpty(batch);
  if (entries.empty()) return Status::Ok();
  const size_t element = ElementSize(batch.reduce.dtype);
  const NcclType type = NcclTypeOf(batch.reduce.dtype);
  NcclOp op = kNcclSum;
  HORORING_RETURN_IF_ERROR(OpOf(batch.reduce, ranks, communicator, &op));
  size_t padded = 0;
  for (const BatchEntry* entry : entries) padded += RoundUp(entry->elements * element, kEntryAlign);
  Calls calls(communicator, device);
  std::byte* const buffer = communicator.fusion_buffer();
  if (entries.size() == 1 || padded > communicator.fusion_bytes()) {
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
  std::vector<DeviceCopy> copies = Packing(entries, element, buffer);
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
  return scales ? NcclWay::kScaled : NcclWay::kNot;
}

bool WantsFusionBuffer(const Batch& batch, NcclWay way) {
  return way == NcclWay::kScaled ||
         (batch.kind == Collective::kAllreduce && NotEmpty(batch).size() > 1);
}

bool FitsScaled(const Batch& batch, int ranks, size_t fusion_bytes) {
  const bool scatters = batch.kind == Collective::kReducescatter;
  return Scaling::RowBytes(fusion_bytes, scatters ? static_cast<size_t>(ranks) : 1, scatters) > 0;
}

Status RunByNccl(const Batch& batch, NcclWay way, NcclCommunicator& communicator,
                 const Device& device, int ranks, TimeNs deadline, TraceSink& trace) {
  if (way == NcclWay::kScaled) {
    return Scaling(batch, communicator, device, ranks, deadline, trace).Run();
  }
  if (batch.kind == Collective::kAllreduce) {
    return RunAllreduce(batch, communicator, device, ranks, deadline, trace);
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
