#include "gpu/cuda_backend.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "backend/common.h"
#include "base/log.h"
#include "collective/collectives.h"

namespace hororing {
namespace {

constexpr TimeNs kCheckInterval = kMillisecond;

// By GpuMode.
const char* const kModes[] = {"auto", "nccl", "staged"};

std::string Setting(GpuMode mode) {
  return std::string("HORORING_GPU=") + kModes[static_cast<size_t>(mode)];
}

Status TimedOut(const std::string& label) {
  return Status(Code::kTransport,
                "GPU batch '" + label +
                    "' timed out (HORORING_TIMEOUT_S sets the limit); another rank may be stuck");
}

}  // namespace

// Each rank sends this to the others; together they choose NCCL or not.
struct CudaBackend::Card {
  CuUuid device = {};
  int32_t nccl_version = 0;  // 0: none
};

Status Parse(const std::string& name, GpuMode* mode) {
  const auto found = std::find(std::begin(kModes), std::end(kModes), name.empty() ? "auto" : name);
  if (found == std::end(kModes)) {
    return Status(Code::kInvalidArgument,
                  "unknown HORORING_GPU '" + name + "'; choose auto, nccl or staged");
  }
  *mode = static_cast<GpuMode>(found - std::begin(kModes));
  return Status::Ok();
}

CudaBackend::CudaBackend(Transport& transport, const Options& options, std::vector<Backend*> host)
    : transport_(transport), options_(options), staged_(transport, std::move(host)) {}

Status CudaBackend::Run(const Batch& batch, TimeNs deadline, TraceSink& trace) {
  const TimeNs timeout = deadline == kForever ? kForever : deadline - NowNs();
  if (!chosen_) HORORING_RETURN_IF_ERROR(Choose(deadline));
  InFlight flight;
  flight.label = TraceLabel(batch);
  flight.timeout = timeout;
  for (const BatchEntry& entry : batch.entries) {
    const bool known =
        std::find(flight.ready.begin(), flight.ready.end(), entry.ready) != flight.ready.end();
    if (entry.ready == nullptr || known) continue;
    HORORING_RETURN_IF_ERROR(entry.ready->StreamWait(device_->stream()));
    flight.ready.push_back(entry.ready);
  }
  // All ranks compute the same.
  const auto by_nccl = [&](const BatchEntry& entry) {
    return nccl_ != nullptr && NcclSupports(batch.kind, entry.reduce, transport_.size());
  };
  const auto without = std::find_if_not(batch.entries.begin(), batch.entries.end(), by_nccl);
  if (without == batch.entries.end()) {
    HORORING_RETURN_IF_ERROR(RunOnDevice(batch, timeout, trace));
  } else if (std::none_of(batch.entries.begin(), batch.entries.end(), by_nccl)) {
    HORORING_RETURN_IF_ERROR(staged_.Run(batch, *device_, timeout, trace));
  } else {  // one batch for NCCL, and one for the host
    Batch on_device = batch;
    const auto rest =
        std::stable_partition(on_device.entries.begin(), on_device.entries.end(), by_nccl);
    Batch through_host = on_device;
    through_host.entries.assign(rest, on_device.entries.end());
    on_device.entries.erase(rest, on_device.entries.end());
    HORORING_RETURN_IF_ERROR(RunOnDevice(on_device, timeout, trace));
    HORORING_RETURN_IF_ERROR(staged_.Run(through_host, *device_, timeout, trace));
  }
  scratch_bytes_ = staged_.scratch_bytes() + (nccl_ != nullptr ? nccl_->fusion_bytes() : 0);
  std::shared_ptr<DeviceEvent> done;
  HORORING_RETURN_IF_ERROR(device_->Record(device_->stream(), &done));
  done_ = flight.done = std::move(done);
  in_flight_.push_back(std::move(flight));
  return Status::Ok();
}

Status CudaBackend::RunOnDevice(const Batch& batch, TimeNs timeout, TraceSink& trace) {
  const TimeNs deadline = After(NowNs(), timeout);
  if (WantsFusionBuffer(batch) && options_.fusion_bytes > 0) {
    HORORING_RETURN_IF_ERROR(nccl_->MakeFusionBuffer(options_.fusion_bytes, deadline));
  }
  return RunByNccl(batch, *nccl_, *device_, transport_.size(), deadline, trace);
}

// All ranks get here with the same batch, so they may exchange data.
Status CudaBackend::Choose(TimeNs deadline) {
  HORORING_RETURN_IF_ERROR(options_.devices->Any(&device_));
  std::shared_ptr<const NcclApi> api;
  Status loaded;
  if (options_.mode != GpuMode::kStaged && !options_.reproducible) {
    loaded = options_.devices->Nccl(&api);
  }
  std::string obstacle;
  HORORING_RETURN_IF_ERROR(Compare(api != nullptr ? api->version : 0, deadline, &obstacle));
  if (options_.mode == GpuMode::kNccl && !obstacle.empty()) {
    return Status(Code::kInvalidArgument,
                  Setting(options_.mode) + ": " + (loaded.ok() ? obstacle : loaded.message()));
  }
  if (obstacle.empty()) {
    HORORING_RETURN_IF_ERROR(NcclCommunicator::Make(api, device_, transport_, deadline, &nccl_));
    options_.devices->set_nccl_in_use();
  } else if (options_.mode == GpuMode::kAuto && !options_.reproducible && !loaded.ok()) {
    Log(LogLevel::kWarning,
        "tensors on the device travel by way of the host, which is slow: " + loaded.message());
  }
  Log(LogLevel::kInfo,
      std::string("tensors on ") + device_->name() + " " + std::to_string(device_->ordinal()) +
          (nccl_ != nullptr
               ? " travel by NCCL " + api->version_text() + " (" + api->library.path() + ")"
               : " travel by way of the host: " + obstacle));
  chosen_ = true;
  return Status::Ok();
}

// `nccl_version`: 0: none. `obstacle`: why NCCL cannot be used, the same everywhere; empty: none.
Status CudaBackend::Compare(int nccl_version, TimeNs deadline, std::string* obstacle) {
  const size_t size = static_cast<size_t>(transport_.size());
  Card mine;
  mine.device = device_->uuid();
  mine.nccl_version = nccl_version;
  std::vector<Card> cards(size);
  HORORING_RETURN_IF_ERROR(AllgatherV(transport_, &mine, std::vector<size_t>(size, sizeof mine),
                                      cards.data(), deadline));
  if (options_.reproducible) {
    *obstacle = "HORORING_REPRODUCIBLE=1 sums in the order of ranks";
  } else if (options_.mode == GpuMode::kStaged) {
    *obstacle = Setting(options_.mode);
  } else {
    *obstacle = Obstacle(cards);
  }
  return Status::Ok();
}

// Why NCCL cannot connect the ranks; empty if it can.
std::string CudaBackend::Obstacle(const std::vector<Card>& cards) const {
  std::set<std::string> devices;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    const Card& card = cards[rank];
    const std::string who = "rank " + std::to_string(rank) + " of the process set ";
    if (card.nccl_version == 0) {
      return who + "has no NCCL; `python -m hororing info` there says why";
    }
    if (card.nccl_version / 100 != cards[0].nccl_version / 100) {
      return who + "has NCCL " + std::to_string(card.nccl_version) + ", rank 0 has " +
             std::to_string(cards[0].nccl_version) + "; install the same release";
    }
    if (!devices.emplace(card.device.bytes, sizeof card.device.bytes).second &&
        options_.mode == GpuMode::kAuto) {
      return who + "shares its device with another one";
    }
  }
  return "";
}

Status CudaBackend::Poll() {
  while (!in_flight_.empty()) {
    bool done = false;
    HORORING_RETURN_IF_ERROR(PollBatch(in_flight_.front(), &done));
    if (!done) break;
    in_flight_.pop_front();
  }
  return nccl_ != nullptr ? nccl_->Poll() : Status::Ok();
}

// The time that a batch may take begins when its tensors are ready on this rank.
Status CudaBackend::PollBatch(InFlight& batch, bool* done) {
  HORORING_RETURN_IF_ERROR(batch.done->Poll(done));
  if (*done) return Status::Ok();
  if (batch.deadline == 0) {
    for (const auto& event : batch.ready) {
      bool ready = false;
      HORORING_RETURN_IF_ERROR(event->Poll(&ready));
      if (!ready) return Status::Ok();
    }
    batch.deadline = After(NowNs(), batch.timeout);
  }
  if (NowNs() < batch.deadline) return Status::Ok();
  return TimedOut(batch.label);
}

Status CudaBackend::Leave(TimeNs deadline) {
  while (!in_flight_.empty()) {
    bool done = false;
    HORORING_RETURN_IF_ERROR(PollBatch(in_flight_.front(), &done));
    if (done) {
      in_flight_.pop_front();
      continue;
    }
    if (NowNs() >= deadline) return TimedOut(in_flight_.front().label);
    HORORING_RETURN_IF_ERROR(transport_.CheckPeers());
    transport_.Sleep(After(NowNs(), kCheckInterval));
  }
  if (nccl_ == nullptr) return Status::Ok();
  const Status left = nccl_->Leave(deadline);
  nccl_ = nullptr;
  return left;
}

void CudaBackend::Abort() {
  if (nccl_ != nullptr) nccl_->Abort();
}

}  // namespace hororing
