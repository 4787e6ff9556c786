#include "backend/host_backend.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "backend/common.h"
#include "backend/parts.h"
#include "collective/segments.h"
#include "kernels/copy.h"

namespace hororing {
namespace {

// The fusion buffer grows in these steps, lest growing batches fault in fresh pages each time. The
// slack takes the padding between tensors: a full batch of 64 MiB needs no other step.
constexpr size_t kGrowth = 4 << 20;
constexpr size_t kSlack = 256 << 10;

// An allreduce goes around a ring if each rank's part has at least this size. The direct exchange
// of a sum in rank order has fewer steps. It takes as long for large sums, but three times the
// processor time over TCP among four hosts (ADR 38).
constexpr size_t kRingChunk = 64 << 10;

// Orders the ranks host by host: a ring enters and leaves each once. Null: they are in that order.
std::unique_ptr<Subgroup> HostByHost(Transport& transport,
                                     const std::vector<std::vector<int>>& ranks_on) {
  std::vector<int> order;
  for (const std::vector<int>& ranks : ranks_on) {
    order.insert(order.end(), ranks.begin(), ranks.end());
  }
  if (std::is_sorted(order.begin(), order.end())) return nullptr;
  return std::make_unique<Subgroup>(transport, std::move(order));
}

}  // namespace

HostBackend::HostBackend(Transport& transport, const AllreduceOptions& options,
                         const std::vector<std::vector<int>>& ranks_on)
    : transport_(transport),
      options_(options),
      hosts_(ranks_on.size()),
      by_host_(HostByHost(transport, ranks_on)) {}

Status HostBackend::Run(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  algorithm_used_ = AlgorithmUsed::kNotCounted;
  switch (batch.kind) {
    case Collective::kAllreduce:
      return batch.is_adasum() ? RunAdasum(batch, deadline, trace)
                               : RunAllreduce(batch, deadline, trace);
    case Collective::kAllgather: return RunAllgather(batch, deadline, trace);
    case Collective::kBroadcast: return RunBroadcast(batch, deadline, trace);
    case Collective::kAlltoall: return RunAlltoall(batch, deadline, trace);
    case Collective::kReducescatter: return RunReducescatter(batch, deadline, trace);
    default:
      return Status(Code::kInternal,
                    std::string(Name(batch.kind)) + " is not an operation of backends");
  }
}

// Moves a tensor to its output, where it is reduced.
void HostBackend::MoveToOutput(const Batch& batch, const BatchEntry& entry, TraceSink& trace) {
  if (entry.output == entry.input) return;
  StageSpan span(trace, Stage::kPack, batch);
  CopyBytes(entry.output, entry.input, entry.bytes());
}

// Every message between hosts is as large as TCP sends at once: its overhead is small even on a
// fast wire. 0: the size depends on the batch.
size_t HostBackend::MessageBytes() const { return hosts_ > 1 ? kHostMessage : 0; }

Status HostBackend::RunAllreduce(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  if (transport_.size() == 1) {
    ReduceAlone(batch, trace);
    return Status::Ok();
  }
  std::vector<const BatchEntry*> entries;
  ReduceBuffer buffer;
  for (const BatchEntry& entry : batch.entries) {
    if (entry.elements == 0) continue;
    entries.push_back(&entry);
    buffer.layout.Add(entry.reduce, RoundUp(entry.bytes(), kCacheLine));
  }
  if (entries.empty()) return Status::Ok();

  const bool fused = entries.size() > 1;
  if (fused) {
    StageSpan span(trace, Stage::kPack, batch);
    std::byte* to = nullptr;
    HORORING_RETURN_IF_ERROR(Fuse(buffer.layout.bytes(), &to));
    buffer.data = to;
    for (const BatchEntry* entry : entries) {
      const size_t bytes = entry->bytes();
      const size_t room = RoundUp(bytes, kCacheLine);
      CopyBytes(to, entry->input, bytes);
      // The padding is reduced, too: zeros are cheap, and stale bytes may be NaNs.
      std::memset(to + bytes, 0, room - bytes);
      to += room;
    }
  } else {
    buffer = {entries[0]->output, entries[0]->elements, entries[0]->reduce};
    MoveToOutput(batch, *entries[0], trace);
  }
  {
    StageSpan span(trace, Stage::kReduce, batch);
    const GatherOptions gather = gather_options();
    const bool around =
        !options_.reproducible && !buffer.layout.wide() &&
        buffer.layout.bytes() >= kRingChunk * static_cast<size_t>(transport_.size());
    algorithm_used_ = around ? AlgorithmUsed::kRing : AlgorithmUsed::kRankOrder;
    HORORING_RETURN_IF_ERROR(
        around ? RingAllreduce(gather.ring != nullptr ? *gather.ring : transport_, buffer,
                               receive_buffer_, deadline, gather.segment_bytes)
               : RankOrderAllreduce(transport_, buffer, receive_buffer_, deadline, gather));
  }
  if (!fused) return Status::Ok();
  StageSpan span(trace, Stage::kUnpack, batch);
  const std::byte* from = buffer.data;
  for (const BatchEntry* entry : entries) {
    const size_t bytes = entry->bytes();
    CopyBytes(entry->output, from, bytes);
    from += RoundUp(bytes, kCacheLine);
  }
  return Status::Ok();
}

Status HostBackend::RunAdasum(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const int size = transport_.size();
  if (size == 1) {
    ReduceAlone(batch, trace);
    return Status::Ok();
  }
  std::vector<size_t> tensors;
  const BatchEntry* only = nullptr;
  for (const BatchEntry& entry : batch.entries) {
    if (entry.elements == 0) continue;
    tensors.push_back(entry.elements);
    only = &entry;
  }
  if (tensors.empty()) return Status::Ok();

  const size_t ranks = static_cast<size_t>(size);
  const bool fused = tensors.size() > 1;
  std::byte* data = nullptr;
  const auto chunk = [&](const BatchEntry& entry, size_t r) {
    return Chunk(entry.elements, size, static_cast<int>(r)).size *
           ElementSize(batch.reduce().dtype);
  };
  if (fused) {
    StageSpan span(trace, Stage::kPack, batch);
    HORORING_RETURN_IF_ERROR(Fuse(batch.bytes(), &data));
    PackParts(batch.entries, ranks, chunk, data);
  } else {
    data = static_cast<std::byte*>(only->output);
    MoveToOutput(batch, *only, trace);
  }
  {
    StageSpan span(trace, Stage::kReduce, batch);
    HORORING_RETURN_IF_ERROR(
        AdasumAllreduce(transport_, batch.reduce(), data, tensors, receive_buffer_, deadline));
  }
  if (!fused) return Status::Ok();
  StageSpan span(trace, Stage::kUnpack, batch);
  UnpackParts(batch.entries, ranks, chunk, data);
  return Status::Ok();
}

Status HostBackend::RunReducescatter(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const size_t size = static_cast<size_t>(transport_.size());
  const size_t rank = static_cast<size_t>(transport_.rank());
  const size_t element = ElementSize(batch.reduce().dtype);
  std::vector<size_t> parts(size, 0);
  for (const BatchEntry& entry : batch.entries) {
    for (size_t r = 0; r < size; ++r) parts[r] += entry.parts[r] * element;
  }
  if (batch.bytes() == 0) return Status::Ok();
  if (size == 1) {
    ReduceAlone(batch, trace);
    return Status::Ok();
  }

  const bool fused = batch.entries.size() > 1;
  ScatterBuffer buffer(batch.entries[0].input, parts, batch.entries[0].output, batch.reduce());
  if (fused) {
    StageSpan span(trace, Stage::kPack, batch);
    std::byte* packed = nullptr;
    HORORING_RETURN_IF_ERROR(Fuse(batch.bytes(), &packed));
    PackParts(
        batch.entries, size,
        [&](const BatchEntry& entry, size_t r) { return entry.parts[r] * element; }, packed);
    buffer.input = packed;
    buffer.result = packed + ContiguousSpans(parts)[rank].begin;
  }
  {
    StageSpan span(trace, Stage::kReduce, batch);
    HORORING_RETURN_IF_ERROR(
        RankOrderReduceScatter(transport_, buffer, receive_buffer_, deadline, MessageBytes()));
  }
  if (!fused) return Status::Ok();
  StageSpan span(trace, Stage::kUnpack, batch);
  UnpackParts(
      batch.entries, 1,
      [&](const BatchEntry& entry, size_t) { return entry.parts[rank] * element; }, buffer.result);
  span.End(parts[rank]);
  return Status::Ok();
}

Status HostBackend::Fuse(size_t bytes, std::byte** buffer) {
  const size_t room = kSlack + (bytes <= kSlack ? 0 : RoundUp(bytes - kSlack, kGrowth));
  return fusion_buffer_.Reserve(room, "lower the fusion threshold: no memory for a fusion buffer",
                                buffer);
}

}  // namespace hororing
