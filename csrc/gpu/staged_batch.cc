#include "gpu/staged_batch.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "backend/common.h"

namespace hororing {
namespace {

// The size of each of the two buffers: large enough to use a bus well, small enough to overlap.
constexpr size_t kPieceBytes = 4 << 20;

// The intervals of polling an event, and of checking that all peers are alive.
constexpr TimeNs kEventInterval = 50 * kMicrosecond;
constexpr TimeNs kPeersInterval = 20 * kMillisecond;

size_t Sum(const std::vector<size_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), size_t{0});
}

struct Extent {
  size_t input, output;  // bytes
};

Extent ExtentOf(const Batch& batch, const BatchEntry& entry, int rank) {
  const size_t bytes = entry.bytes();
  switch (batch.kind) {
    case Collective::kAllgather: return {bytes, Sum(entry.receive_bytes)};
    case Collective::kAlltoall: return {Sum(entry.send_bytes), Sum(entry.receive_bytes)};
    case Collective::kReducescatter:
      return {bytes, entry.parts[static_cast<size_t>(rank)] * ElementSize(entry.reduce.dtype)};
    default: return {bytes, bytes};
  }
}

}  // namespace

Status StagedBatches::Run(const Batch& batch, const std::shared_ptr<Device>& device, TimeNs timeout,
                          TraceSink& trace) {
  // Adasum looks at whole tensors.
  const bool pieces = batch.kind == Collective::kAllreduce && !batch.is_adasum();
  return pieces ? RunAllreduce(batch, *device, timeout, trace)
                : RunWhole(batch, *device, timeout, trace);
}

// Every rank comes to the same pieces.
std::vector<StagedBatches::Piece> StagedBatches::Pieces(const Batch& batch) {
  std::vector<Piece> pieces;
  size_t free_bytes = 0;
  for (size_t i = 0; i < batch.entries.size(); ++i) {
    const size_t bytes = batch.entries[i].bytes();
    for (size_t begin = 0; begin < bytes;) {
      if (free_bytes < kEntryAlign) {
        pieces.emplace_back();
        free_bytes = kPieceBytes;
      }
      const size_t part = std::min(bytes - begin, free_bytes);  // whole lines, so whole elements
      pieces.back().push_back({i, begin, part});
      begin += part;
      free_bytes -= RoundUp(part, kEntryAlign);
    }
  }
  return pieces;
}

Status StagedBatches::RunAllreduce(const Batch& batch, const Device& device, TimeNs timeout,
                                   TraceSink& trace) {
  const std::vector<Piece> pieces = Pieces(batch);
  std::shared_ptr<DeviceEvent> fetched[2];
  if (!pieces.empty()) {
    HORORING_RETURN_IF_ERROR(Fetch(batch, pieces[0], device, buffers_[0], &fetched[0]));
  }
  for (size_t k = 0; k < pieces.size(); ++k) {
    const size_t side = k % 2, other = 1 - side;
    if (k + 1 < pieces.size()) {
      HORORING_RETURN_IF_ERROR(
          Fetch(batch, pieces[k + 1], device, buffers_[other], &fetched[other]));
    }
    HORORING_RETURN_IF_ERROR(Synchronize(*fetched[side]));
    Batch on_host;
    on_host.kind = batch.kind;
    std::byte* at = buffers_[side].data();
    for (const Slice& slice : pieces[k]) {
      BatchEntry entry;
      entry.name = batch.entries[slice.entry].name;
      entry.input = entry.output = at;
      entry.reduce = batch.entries[slice.entry].reduce;
      entry.elements = slice.bytes / ElementSize(entry.reduce.dtype);
      on_host.entries.push_back(std::move(entry));
      at += RoundUp(slice.bytes, kEntryAlign);
    }
    HORORING_RETURN_IF_ERROR(RunOnHost(on_host, timeout, trace));
    for (size_t i = 0; i < pieces[k].size(); ++i) {
      const Slice& slice = pieces[k][i];
      auto* to = static_cast<std::byte*>(batch.entries[slice.entry].output);
      HORORING_RETURN_IF_ERROR(
          device.CopyToDevice(to + slice.begin, on_host.entries[i].output, slice.bytes));
    }
  }
  return Status::Ok();
}

// Copies a piece to `buffer`; what was in there goes back to the device before, in the stream.
Status StagedBatches::Fetch(const Batch& batch, const Piece& piece, const Device& device,
                            Buffer& buffer, std::shared_ptr<DeviceEvent>* fetched) {
  HORORING_RETURN_IF_ERROR(Reserve(device, kPieceBytes, &buffer));
  std::byte* to = buffer.data();
  for (const Slice& slice : piece) {
    const auto* from = static_cast<const std::byte*>(batch.entries[slice.entry].input);
    HORORING_RETURN_IF_ERROR(device.CopyToHost(to, from + slice.begin, slice.bytes));
    to += RoundUp(slice.bytes, kEntryAlign);
  }
  return device.Record(device.stream(), fetched);
}

Status StagedBatches::RunWhole(const Batch& batch, const Device& device, TimeNs timeout,
                               TraceSink& trace) {
  // A broadcast's output is its input, so that backends move nothing they need not.
  const bool in_place =
      batch.kind == Collective::kBroadcast || batch.kind == Collective::kAllreduce;
  std::vector<Extent> extents;
  size_t total = kEntryAlign;  // something, so that there is memory
  for (const BatchEntry& entry : batch.entries) {
    const Extent extent = ExtentOf(batch, entry, transport_.rank());
    extents.push_back(extent);
    total += RoundUp(extent.input, kEntryAlign);
    if (!in_place) total += RoundUp(extent.output, kEntryAlign);
  }
  Buffer& buffer = buffers_[0];
  HORORING_RETURN_IF_ERROR(Reserve(device, total, &buffer));
  Batch on_host = batch;
  on_host.on_device = false;
  std::byte* at = buffer.data();
  for (size_t i = 0; i < extents.size(); ++i) {
    BatchEntry& entry = on_host.entries[i];
    entry.ready = nullptr;
    entry.input = entry.output = at;
    at += RoundUp(extents[i].input, kEntryAlign);
    if (!in_place) {
      entry.output = at;
      at += RoundUp(extents[i].output, kEntryAlign);
    }
    if (extents[i].input == 0) continue;
    HORORING_RETURN_IF_ERROR(device.CopyToHost(const_cast<void*>(entry.input),
                                               batch.entries[i].input, extents[i].input));
  }
  // Also where nothing was copied: the buffer may still be on its way to the device.
  std::shared_ptr<DeviceEvent> fetched;
  HORORING_RETURN_IF_ERROR(device.Record(device.stream(), &fetched));
  HORORING_RETURN_IF_ERROR(Synchronize(*fetched));
  HORORING_RETURN_IF_ERROR(RunOnHost(on_host, timeout, trace));
  for (size_t i = 0; i < extents.size(); ++i) {
    if (extents[i].output == 0) continue;
    HORORING_RETURN_IF_ERROR(
        device.CopyToDevice(batch.entries[i].output, on_host.entries[i].output, extents[i].output));
  }
  return Status::Ok();
}

Status StagedBatches::RunOnHost(const Batch& batch, TimeNs timeout, TraceSink& trace) {
  const auto backend = std::find_if(host_.begin(), host_.end(),
                                    [&](Backend* each) { return each->Supports(batch); });
  return (*backend)->Run(batch, After(NowNs(), timeout), trace);
}

// At least `bytes`. What lies there is given up when the device is done with it.
Status StagedBatches::Reserve(const Device& device, size_t bytes, Buffer* buffer) {
  if (buffer->bytes >= bytes) return Status::Ok();
  if (buffer->memory != nullptr) {
    std::shared_ptr<DeviceEvent> idle;
    HORORING_RETURN_IF_ERROR(device.Record(device.stream(), &idle));
    HORORING_RETURN_IF_ERROR(Synchronize(*idle));
    buffer->memory = nullptr;
    buffer->bytes = 0;
  }
  HORORING_RETURN_IF_ERROR(device.AllocatePinned(bytes, &buffer->memory));
  buffer->bytes = bytes;
  return Status::Ok();
}

// However long the framework's kernels before it take: as long as all peers are alive.
Status StagedBatches::Synchronize(const DeviceEvent& event) {
  TimeNs look_at_peers = After(NowNs(), kPeersInterval);
  for (;;) {
    bool reached = false;
    HORORING_RETURN_IF_ERROR(event.Poll(&reached));
    if (reached) return Status::Ok();
    const TimeNs now = NowNs();
    if (now >= look_at_peers) {
      HORORING_RETURN_IF_ERROR(transport_.CheckPeers());
      look_at_peers = After(now, kPeersInterval);
    }
    transport_.Sleep(After(now, kEventInterval));
  }
}

}  // namespace hororing
