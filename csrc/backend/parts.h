#include "backend/host_backend.h"

#include <cstring>
#include <string>

#include "backend/common.h"
#include "collective/collectives.h"

namespace hororing {
namespace {

// The fusion buffer grows in these steps, so that a few batches of growing size do not each
// pay for fresh pages. The slack takes the padding between tensors: a full batch of 64 MiB
// needs no further step.
constexpr size_t kGrowth = 4 << 20;
constexpr size_t kSlack = 256 << 10;
// Tensors from this size on are broadcast from where they lie: copying them in and out would
// cost more than a further tree.
constexpr size_t kBroadcastAlone = 256 << 10;

void CopyIfMoved(void* to, const void* from, size_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

HostBackend::HostBackend(Transport& transport, const Options& options)
    : transport_(transport), options_(options) {}

bool HostBackend::Supports(const Batch& batch) const {
  return batch.kind != Collective::kAllreduce || batch.reduce.op != ReduceOp::kAdasum;
}

Status HostBackend::Run(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  switch (batch.kind) {
    case Collective::kAllreduce: return RunAllreduce(batch, deadline, trace);
    case Collective::kAllgather: return RunAllgather(batch, deadline, trace);
    case Collective::kBroadcast: return RunBroadcast(batch, deadline, trace);
    case Collective::kBarrier: return Barrier(transport_, deadline);
    default: break;
  }
  return Status(Code::kInternal, "a batch of an unknown collective");
}

Status HostBackend::RunAllreduce(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  HORORING_RETURN_IF_ERROR(Check(batch.reduce));
  if (transport_.size() == 1) {
    ReduceAlone(batch, trace);
    return Status::Ok();
  }
  const size_t element = ElementSize(batch.reduce.dtype);
  std::vector<const BatchEntry*> entries;
  size_t padded = 0;
  for (const BatchEntry& entry : batch.entries) {
    if (entry.elements == 0) continue;
    entries.push_back(&entry);
    padded += RoundUp(entry.elements * element, kEntryAlign);
  }
  if (entries.empty()) return Status::Ok();

  ReduceBuffer buffer;
  buffer.spec = batch.reduce;
  const bool fused = entries.size() > 1;
  if (fused) {
    StageSpan span(trace, Stage::kPack, batch);
    std::byte* to = nullptr;
    HORORING_RETURN_IF_ERROR(Fuse(padded, &to));
    buffer.data = to;
    buffer.elements = padded / element;
    for (const BatchEntry* entry : entries) {
      const size_t bytes = entry->elements * element;
      const size_t room = RoundUp(bytes, kEntryAlign);
      std::memcpy(to, entry->input, bytes);
      // The padding is reduced too: zeros are cheap, what lay there before may be not-a-number.
      std::memset(to + bytes, 0, room - bytes);
      to += room;
    }
    span.End(batch.bytes());
  } else {
    buffer.data = entries[0]->output;
    buffer.elements = entries[0]->elements;
    if (entries[0]->output != entries[0]->input) {
      StageSpan span(trace, Stage::kPack, batch);
      CopyIfMoved(entries[0]->output, entries[0]->input, entries[0]->elements * element);
      span.End(batch.bytes());
    }
  }
  {
    StageSpan span(trace, Stage::kReduce, batch);
    HORORING_RETURN_IF_ERROR(
        Allreduce(transport_, buffer, options_.reproducible, receive_buffer_, deadline));
    span.End(batch.bytes());
  }
  if (!fused) return Status::Ok();
  StageSpan span(trace, Stage::kUnpack, batch);
  const std::byte* from = static_cast<const std::byte*>(buffer.data);
  for (const BatchEntry* entry : entries) {
    const size_t bytes = entry->elements * element;
    std::memcpy(entry->output, from, bytes);
    from += RoundUp(bytes, kEntryAlign);
  }
  span.End(batch.bytes());
  return Status::Ok();
}

// Several tensors travel as one message per rank: its parts of all of them, back to back.
Status HostBackend::RunAllgather(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const size_t size = static_cast<size_t>(transport_.size());
  const size_t rank = static_cast<size_t>(transport_.rank());
  const size_t element = ElementSize(batch.reduce.dtype);
  std::vector<size_t> bytes_per_rank(size, 0);
  size_t total = 0;
  for (const BatchEntry& entry : batch.entries) {
    if (entry.receive_bytes.size() != size ||
        entry.receive_bytes[rank] != entry.elements * element) {
      return Status(Code::kInternal, "allgather of '" + entry.name +
                                         "': the agreed sizes do not fit this rank's tensor");
    }
    for (size_t r = 0; r < size; ++r) bytes_per_rank[r] += entry.receive_bytes[r];
  }
  for (size_t bytes : bytes_per_rank) total += bytes;
  if (total == 0) return Status::Ok();
  if (batch.entries.size() == 1) {
    return AllgatherV(transport_, batch.entries[0].input, bytes_per_rank, batch.entries[0].output,
                      deadline);
  }

  std::byte* buffer = nullptr;
  HORORING_RETURN_IF_ERROR(Fuse(total, &buffer));
  StageSpan pack(trace, Stage::kPack, batch);
  std::byte* own = buffer;
  for (size_t r = 0; r < rank; ++r) own += bytes_per_rank[r];
  std::byte* to = own;
  for (const BatchEntry& entry : batch.entries) {
    const size_t bytes = entry.receive_bytes[rank];
    CopyIfMoved(to, entry.input, bytes);
    to += bytes;
  }
  pack.End(bytes_per_rank[rank]);
  HORORING_RETURN_IF_ERROR(AllgatherV(transport_, own, bytes_per_rank, buffer, deadline));

  StageSpan unpack(trace, Stage::kUnpack, batch);
  std::vector<size_t> filled(batch.entries.size(), 0);
  const std::byte* from = buffer;
  for (size_t r = 0; r < size; ++r) {
    for (size_t i = 0; i < batch.entries.size(); ++i) {
      const BatchEntry& entry = batch.entries[i];
      const size_t bytes = entry.receive_bytes[r];
      CopyIfMoved(static_cast<std::byte*>(entry.output) + filled[i], from, bytes);
      filled[i] += bytes;
      from += bytes;
    }
  }
  unpack.End(total);
  return Status::Ok();
}

Status HostBackend::RunBroadcast(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const bool is_root = transport_.rank() == batch.root;
  const size_t element = ElementSize(batch.reduce.dtype);
  std::vector<const BatchEntry*> alone, together;
  for (const BatchEntry& entry : batch.entries) {
    const size_t bytes = entry.elements * element;
    if (bytes == 0) continue;
    if (is_root) CopyIfMoved(entry.output, entry.input, bytes);
    (bytes < kBroadcastAlone ? together : alone).push_back(&entry);
  }
  if (transport_.size() == 1) return Status::Ok();
  if (together.size() == 1) {
    alone.push_back(together[0]);
  } else if (!together.empty()) {
    HORORING_RETURN_IF_ERROR(BroadcastTogether(batch, together, deadline, trace));
  }
  for (const BatchEntry* entry : alone) {
    HORORING_RETURN_IF_ERROR(
        Broadcast(transport_, batch.root, entry->output, entry->elements * element, deadline));
  }
  return Status::Ok();
}

Status HostBackend::BroadcastTogether(const Batch& batch,
                                      const std::vector<const BatchEntry*>& entries,
                                      TimeNs deadline, TraceSink& trace) {
  const bool is_root = transport_.rank() == batch.root;
  const size_t element = ElementSize(batch.reduce.dtype);
  size_t total = 0;
  for (const BatchEntry* entry : entries) total += entry->elements * element;
  std::byte* buffer = nullptr;
  HORORING_RETURN_IF_ERROR(Fuse(total, &buffer));
  if (is_root) {
    StageSpan span(trace, Stage::kPack, batch);
    std::byte* to = buffer;
    for (const BatchEntry* entry : entries) {
      const size_t bytes = entry->elements * element;
      std::memcpy(to, entry->output, bytes);
      to += bytes;
    }
    span.End(total);
  }
  HORORING_RETURN_IF_ERROR(Broadcast(transport_, batch.root, buffer, total, deadline));
  if (is_root) return Status::Ok();
  StageSpan span(trace, Stage::kUnpack, batch);
  const std::byte* from = buffer;
  for (const BatchEntry* entry : entries) {
    const size_t bytes = entry->elements * element;
    std::memcpy(entry->output, from, bytes);
    from += bytes;
  }
  span.End(total);
  return Status::Ok();
}

Status HostBackend::Fuse(size_t bytes, std::byte** buffer) {
  const size_t room = kSlack + (bytes <= kSlack ? 0 : RoundUp(bytes - kSlack, kGrowth));
  *buffer = static_cast<std::byte*>(fusion_buffer_.Reserve(room));
  if (*buffer != nullptr) return Status::Ok();
  return Status(Code::kInternal, "no memory for a fusion buffer of " + std::to_string(room) +
                                     " bytes; lower the fusion threshold");
}

size_t HostBackend::scratch_bytes() const {
  return fusion_buffer_.bytes() + receive_buffer_.bytes();
}

}  // namespace hororing
