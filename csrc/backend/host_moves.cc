// HostBackend's collectives without arithmetic.

#include "backend/common.h"
#include "backend/host_backend.h"
#include "backend/parts.h"
#include "collective/collectives.h"
#include "collective/segments.h"
#include "kernels/copy.h"

namespace hororing {

// Tensors from this size on are broadcast without copies, which would cost more than another tree.
constexpr size_t kBroadcastAlone = 256 << 10;

// Several tensors share one message per rank, with the rank's parts of all of them, contiguous.
Status HostBackend::RunAllgather(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const size_t size = static_cast<size_t>(transport_.size());
  const size_t rank = static_cast<size_t>(transport_.rank());
  std::vector<size_t> bytes_per_rank(size, 0);
  for (const BatchEntry& entry : batch.entries) {
    HORORING_RETURN_IF_ERROR(CheckSizes(batch, entry, size, rank));
    for (size_t r = 0; r < size; ++r) bytes_per_rank[r] += entry.receive_bytes[r];
  }
  const size_t total = Sum(bytes_per_rank);
  if (total == 0) return Status::Ok();
  if (batch.entries.size() == 1) {
    return AllgatherV(transport_, batch.entries[0].input, bytes_per_rank, batch.entries[0].output,
                      deadline, gather_options());
  }

  std::byte* buffer = nullptr;
  HORORING_RETURN_IF_ERROR(Fuse(total, &buffer));
  StageSpan pack(trace, Stage::kPack, batch);
  std::byte* const own = buffer + ContiguousSpans(bytes_per_rank)[rank].begin;
  PackParts(
      batch.entries, 1,
      [rank](const BatchEntry& entry, size_t) { return entry.receive_bytes[rank]; }, own);
  pack.End(bytes_per_rank[rank]);
  HORORING_RETURN_IF_ERROR(
      AllgatherV(transport_, own, bytes_per_rank, buffer, deadline, gather_options()));

  StageSpan unpack(trace, Stage::kUnpack, batch);
  UnpackParts(
      batch.entries, size, [](const BatchEntry& entry, size_t r) { return entry.receive_bytes[r]; },
      buffer);
  unpack.End(total);
  return Status::Ok();
}

// Several tensors share one message per pair of ranks.
Status HostBackend::RunAlltoall(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const size_t size = static_cast<size_t>(transport_.size());
  std::vector<size_t> send_bytes(size, 0), receive_bytes(size, 0);
  for (const BatchEntry& entry : batch.entries) {
    HORORING_RETURN_IF_ERROR(CheckSizes(batch, entry, size, 0));
    for (size_t r = 0; r < size; ++r) {
      send_bytes[r] += entry.send_bytes[r];
      receive_bytes[r] += entry.receive_bytes[r];
    }
  }
  if (batch.entries.size() == 1) {
    return AlltoallV(transport_, batch.entries[0].input, send_bytes, batch.entries[0].output,
                     receive_bytes, deadline, MessageBytes());
  }

  const size_t sent = Sum(send_bytes), received = Sum(receive_bytes);
  std::byte* buffer = nullptr;
  HORORING_RETURN_IF_ERROR(Fuse(sent + received, &buffer));
  StageSpan pack(trace, Stage::kPack, batch);
  PackParts(
      batch.entries, size, [](const BatchEntry& entry, size_t r) { return entry.send_bytes[r]; },
      buffer);
  pack.End(sent);
  HORORING_RETURN_IF_ERROR(AlltoallV(transport_, buffer, send_bytes, buffer + sent, receive_bytes,
                                     deadline, MessageBytes()));
  StageSpan unpack(trace, Stage::kUnpack, batch);
  UnpackParts(
      batch.entries, size, [](const BatchEntry& entry, size_t r) { return entry.receive_bytes[r]; },
      buffer + sent);
  unpack.End(received);
  return Status::Ok();
}

// Small tensors share one message.
Status HostBackend::RunBroadcast(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const auto small_bytes = [](const BatchEntry& entry, size_t) {
    return entry.bytes() < kBroadcastAlone ? entry.bytes() : 0;
  };
  const bool is_root = transport_.rank() == batch.root;
  size_t total = 0, count = 0;  // of the small tensors
  for (const BatchEntry& entry : batch.entries) {
    if (is_root && entry.output != entry.input) CopyBytes(entry.output, entry.input, entry.bytes());
    total += small_bytes(entry, 0);
    count += small_bytes(entry, 0) > 0 ? 1 : 0;
  }
  if (transport_.size() == 1) return Status::Ok();
  if (count > 1) {
    std::byte* buffer = nullptr;
    HORORING_RETURN_IF_ERROR(Fuse(total, &buffer));
    if (is_root) {
      StageSpan pack(trace, Stage::kPack, batch);
      PackParts(batch.entries, 1, small_bytes, buffer);
      pack.End(total);
    }
    HORORING_RETURN_IF_ERROR(BroadcastByHost(batch.root, buffer, total, deadline));
    if (!is_root) {
      StageSpan unpack(trace, Stage::kUnpack, batch);
      UnpackParts(batch.entries, 1, small_bytes, buffer);
      unpack.End(total);
    }
  }
  for (const BatchEntry& entry : batch.entries) {
    if (entry.bytes() == 0 || (count > 1 && small_bytes(entry, 0) > 0)) continue;
    HORORING_RETURN_IF_ERROR(BroadcastByHost(batch.root, entry.output, entry.bytes(), deadline));
  }
  return Status::Ok();
}

Status HostBackend::BroadcastByHost(int root, void* data, size_t bytes, TimeNs deadline) {
  const size_t message = MessageBytes();
  if (by_host_ == nullptr) return Broadcast(transport_, root, data, bytes, deadline, message);
  return Broadcast(*by_host_, by_host_->RankOf(root), data, bytes, deadline, message);
}

}  // namespace hororing
