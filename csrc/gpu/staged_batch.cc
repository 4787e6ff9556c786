#include "gpu/staged_batch.h"

#include <algorithm>

#include "backend/common.h"
#include "collective/segments.h"

namespace hororing {
namespace {

// The intervals of polling an event, and of checking that all peers are alive.
constexpr TimeNs kEventInterval = 50 * kMicrosecond;
constexpr TimeNs kPeersInterval = 20 * kMillisecond;

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

Status StagedBatches::Run(const Batch& batch, const Device& device, TimeNs timeout,
                          TraceSink& trace) {
  // A broadcast's output is its input, which saves backends a copy.
  const bool in_place =
      batch.kind == Collective::kBroadcast || batch.kind == Collective::kAllreduce;
  std::vector<Extent> extents;
  size_t total = kCacheLine;  // never zero bytes
  for (const BatchEntry& entry : batch.entries) {
    const Extent extent = ExtentOf(batch, entry, transport_.rank());
    extents.push_back(extent);
    total += RoundUp(extent.input, kCacheLine);
    if (!in_place) total += RoundUp(extent.output, kCacheLine);
  }
  HORORING_RETURN_IF_ERROR(Reserve(device, total));
  Batch on_host = batch;
  on_host.on_device = false;
  std::byte* at = static_cast<std::byte*>(buffer_.get());
  for (size_t i = 0; i < extents.size(); ++i) {
    BatchEntry& entry = on_host.entries[i];
    entry.ready = nullptr;
    entry.input = entry.output = at;
    at += RoundUp(extents[i].input, kCacheLine);
    if (!in_place) {
      entry.output = at;
      at += RoundUp(extents[i].output, kCacheLine);
    }
    if (extents[i].input == 0) continue;
    HORORING_RETURN_IF_ERROR(device.CopyToHost(const_cast<void*>(entry.input),
                                               batch.entries[i].input, extents[i].input));
  }
  // Even if nothing was copied: the buffer may still be in transit to the device.
  std::shared_ptr<DeviceEvent> fetched;
  HORORING_RETURN_IF_ERROR(device.Record(device.stream(), &fetched));
  HORORING_RETURN_IF_ERROR(Synchronize(*fetched));
  const auto backend = std::find_if(host_.begin(), host_.end(),
                                    [&](Backend* each) { return each->Supports(on_host); });
  HORORING_RETURN_IF_ERROR((*backend)->Run(on_host, After(NowNs(), timeout), trace));
  for (size_t i = 0; i < extents.size(); ++i) {
    if (extents[i].output == 0) continue;
    HORORING_RETURN_IF_ERROR(
        device.CopyToDevice(batch.entries[i].output, on_host.entries[i].output, extents[i].output));
  }
  return Status::Ok();
}

// Provides at least `bytes`. A smaller buffer is freed when the device has finished with it.
Status StagedBatches::Reserve(const Device& device, size_t bytes) {
  if (bytes_ >= bytes) return Status::Ok();
  if (buffer_ != nullptr) {
    std::shared_ptr<DeviceEvent> idle;
    HORORING_RETURN_IF_ERROR(device.Record(device.stream(), &idle));
    HORORING_RETURN_IF_ERROR(Synchronize(*idle));
    buffer_ = nullptr;
    bytes_ = 0;
  }
  HORORING_RETURN_IF_ERROR(device.AllocatePinned(bytes, &buffer_));
  bytes_ = bytes;
  return Status::Ok();
}

// Waits for the framework's earlier kernels for as long as all peers are alive.
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
