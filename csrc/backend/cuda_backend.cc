#include "backend/cuda_backend.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "backend/common.h"
#include "backend/device_wait.h"
#include "base/log.h"
#include "collective/collectives.h"

namespace hororing {
namespace {

constexpr TimeNs kLookInterval = kMillisecond;

// By DeviceWay.
const char* const kWays[] = {"auto", "nccl", "hierarchical", "staged"};

std::string Setting(DeviceWay way) {
  return std::string("HORORING_GPU=") + kWays[static_cast<size_t>(way)];
}

// On one host, NCCL within hosts is NCCL; with one rank on each, it has nothing to do.
DeviceWay WayAmong(DeviceWay way, const RanksOn& ranks_on) {
  if (way != DeviceWay::kHierarchical || HierarchicalNccl::MakesSense(ranks_on)) return way;
  return ranks_on.size() > 1 ? DeviceWay::kStaged : DeviceWay::kNccl;
}

}  // namespace

// What every rank shows the others when they choose.
struct CudaBackend::Card {
  CuUuid device = {};
  int32_t nccl_version = 0;  // 0: none
  int32_t scales = 0;        // its kernels scale, in a fusion buffer
};

// The same on every rank.
struct CudaBackend::Choice {
  std::string obstacle;  // why it cannot be NCCL; empty where it can
  std::string between;   // why not between hosts; empty where it can
};

Status Parse(const std::string& name, DeviceWay* way) {
  const auto found = std::find(std::begin(kWays), std::end(kWays), name.empty() ? "auto" : name);
  if (found == std::end(kWays)) {
    return Status(Code::kInvalidArgument,
                  "unknown HORORING_GPU '" + name + "'; choose auto, nccl, hierarchical or staged");
  }
  *way = static_cast<DeviceWay>(found - std::begin(kWays));
  return Status::Ok();
}

CudaBackend::CudaBackend(Transport& transport, const Options& options, std::vector<Backend*> host)
    : transport_(transport),
      options_(options),
      way_(WayAmong(options.way, options.ranks_on)),
      staged_(transport, std::move(host)) {
  const bool possible = way_ == DeviceWay::kAuto || way_ == DeviceWay::kHierarchical;
  if (possible && HierarchicalNccl::MakesSense(options.ranks_on)) {
    by_host_ = std::make_unique<HierarchicalNccl>(transport, options.ranks_on, options.wire);
  }
}

CudaBackend::~CudaBackend() = default;

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
    HORORING_RETURN_IF_ERROR(entry.ready->HoldBack(device_->stream()));
    flight.ready.push_back(entry.ready);
  }
  NcclWay way = NcclWay::kNot;
  bool by_host = false;
  const HierarchicalNccl::Gpu gpu{nccl_.get(), *device_, options_.fusion_bytes, scales_};
  if (by_host_ != nullptr) {
    HORORING_RETURN_IF_ERROR(by_host_->Accept(batch, gpu, deadline, &by_host));
  } else {
    HORORING_RETURN_IF_ERROR(ChooseWay(batch, deadline, &way));
  }
  if (by_host) {
    HORORING_RETURN_IF_ERROR(by_host_->Run(batch, gpu, flight.ready, timeout, trace));
  } else if (way != NcclWay::kNot) {
    HORORING_RETURN_IF_ERROR(
        RunByNccl(batch, way, *nccl_, *device_, transport_.size(), After(NowNs(), timeout), trace));
  } else {
    HORORING_RETURN_IF_ERROR(staged_.Run(batch, device_, timeout, trace));
  }
  std::shared_ptr<DeviceEvent> done;
  HORORING_RETURN_IF_ERROR(device_->Record(device_->stream(), &done));
  done_ = flight.done = std::move(done);
  in_flight_.push_back(std::move(flight));
  return Status::Ok();
}

// All ranks come to the same.
Status CudaBackend::ChooseWay(const Batch& batch, TimeNs deadline, NcclWay* way) {
  *way = nccl_ != nullptr ? NcclWayOf(batch, transport_.size(), scales_) : NcclWay::kNot;
  if (*way == NcclWay::kNot || !WantsFusionBuffer(batch, *way)) return Status::Ok();
  if (options_.fusion_bytes > 0) {
    HORORING_RETURN_IF_ERROR(nccl_->MakeFusionBuffer(options_.fusion_bytes, deadline));
  }
  if (*way == NcclWay::kScaled && !FitsScaled(batch, transport_.size(), nccl_->fusion_bytes())) {
    *way = NcclWay::kNot;
  }
  return Status::Ok();
}

// All ranks come here with the same batch, so they may exchange something.
Status CudaBackend::Choose(TimeNs deadline) {
  HORORING_RETURN_IF_ERROR(options_.devices->Any(&device_));
  std::shared_ptr<const NcclApi> api;
  Status loaded;
  if (way_ != DeviceWay::kStaged && !options_.reproducible) {
    loaded = options_.devices->Nccl(&api);
  }
  Choice choice;
  HORORING_RETURN_IF_ERROR(
      Compare(api != nullptr, api != nullptr ? api->version : 0, deadline, &choice));
  const bool demanded = way_ == DeviceWay::kNccl || way_ == DeviceWay::kHierarchical;
  if (demanded && !choice.obstacle.empty()) {
    return Status(Code::kInvalidArgument, Setting(options_.way) + ": " +
                                              (loaded.ok() ? choice.obstacle : loaded.message()));
  }
  if (choice.obstacle.empty()) {
    if (choice.between.empty()) by_host_ = nullptr;
    Transport& connected = by_host_ != nullptr ? by_host_->local() : transport_;
    HORORING_RETURN_IF_ERROR(NcclCommunicator::Make(api, device_, connected, deadline, &nccl_));
  } else if (way_ == DeviceWay::kAuto && !options_.reproducible && !loaded.ok()) {
    Log(LogLevel::kWarning,
        "tensors on the device travel by way of the host, which is slow: " + loaded.message());
  }
  Log(LogLevel::kInfo,
      std::string("tensors on ") + device_->name() + " " + std::to_string(device_->ordinal()) +
          (nccl_ != nullptr
               ? " travel by NCCL " + api->version_text() + " (" + api->library.path() + ")"
               : " travel by way of the host: " + choice.obstacle) +
          (by_host_ != nullptr ? ", between hosts by way of these: " + choice.between : ""));
  if (narrow_ && nccl_ != nullptr && by_host_ == nullptr && options_.ranks_on.size() > 1 &&
      transport_.rank() == 0) {
    Log(LogLevel::kWarning,
        "HORORING_WIRE has no effect on tensors on devices that NCCL carries between hosts; "
        "HORORING_GPU=hierarchical leaves it the way within them");
  }
  chosen_ = true;
  return Status::Ok();
}

Status CudaBackend::Compare(bool has_nccl, int version, TimeNs deadline, Choice* choice) {
  const size_t size = static_cast<size_t>(transport_.size());
  Card mine;
  mine.device = device_->uuid();
  mine.nccl_version = has_nccl ? version : 0;
  mine.scales = device_->scales_by_kernel() && options_.fusion_bytes >= kLeastScalingBytes;
  std::vector<Card> cards(size);
  HORORING_RETURN_IF_ERROR(AllgatherV(transport_, &mine, std::vector<size_t>(size, sizeof mine),
                                      cards.data(), deadline));
  scales_ = std::all_of(cards.begin(), cards.end(), [](const Card& c) { return c.scales != 0; });
  if (options_.reproducible) {
    choice->obstacle = "HORORING_REPRODUCIBLE=1 sums in the order of ranks";
  } else if (way_ == DeviceWay::kStaged) {
    choice->obstacle = Setting(options_.way);
    if (options_.way != way_) choice->obstacle += ", and each host has one rank of the process set";
  } else if (way_ == DeviceWay::kHierarchical) {
    choice->between = Setting(way_);
    choice->obstacle = Obstacle(cards, options_.ranks_on);
  } else {
    choice->obstacle = Obstacle(cards, {Members::World(transport_.size()).ranks});
    if (by_host_ != nullptr && !choice->obstacle.empty() &&
        Obstacle(cards, options_.ranks_on).empty()) {
      std::swap(choice->between, choice->obstacle);
    }
  }
  if (!choice->obstacle.empty()) by_host_ = nullptr;
  return Status::Ok();
}

// Why NCCL cannot connect the ranks of each group; empty where it can.
std::string CudaBackend::Obstacle(const std::vector<Card>& cards, const RanksOn& groups) const {
  const auto who = [](int rank) { return "rank " + std::to_string(rank); };
  for (const std::vector<int>& group : groups) {
    const Card& first = cards[static_cast<size_t>(group[0])];
    std::set<std::string> devices;
    for (const int rank : group) {
      const Card& card = cards[static_cast<size_t>(rank)];
      if (card.nccl_version == 0) {
        return who(rank) +
               " of the process set has no NCCL; `python -m hororing info` there says why";
      }
      if (card.nccl_version / 100 != first.nccl_version / 100) {
        return who(rank) + " of the process set has NCCL " + std::to_string(card.nccl_version) +
               ", " + who(group[0]) + " has " + std::to_string(first.nccl_version) +
               "; install the same release";
      }
      if (!devices.emplace(card.device.bytes, sizeof card.device.bytes).second &&
          way_ == DeviceWay::kAuto) {
        return who(rank) + " of the process set shares its device with another one";
      }
    }
  }
  return "";
}

Status CudaBackend::Look() {
  while (!in_flight_.empty()) {
    bool done = false;
    HORORING_RETURN_IF_ERROR(LookAt(in_flight_.front(), &done));
    if (!done) break;
    in_flight_.pop_front();
  }
  return nccl_ != nullptr ? nccl_->Look() : Status::Ok();
}

// The time that a batch may take begins when its tensors are ready on this rank.
Status CudaBackend::LookAt(InFlight& batch, bool* done) {
  HORORING_RETURN_IF_ERROR(batch.done->Look(done));
  if (*done) return Status::Ok();
  if (batch.deadline == 0) {
    for (const auto& event : batch.ready) {
      bool ready = false;
      HORORING_RETURN_IF_ERROR(event->Look(&ready));
      if (!ready) return Status::Ok();
    }
    batch.deadline = After(NowNs(), batch.timeout);
  }
  if (NowNs() < batch.deadline) return Status::Ok();
  return TookTooLong(batch.label);
}

Status CudaBackend::Leave(TimeNs deadline) {
  while (!in_flight_.empty()) {
    bool done = false;
    HORORING_RETURN_IF_ERROR(LookAt(in_flight_.front(), &done));
    if (done) {
      in_flight_.pop_front();
      continue;
    }
    if (NowNs() >= deadline) return TookTooLong(in_flight_.front().label);
    HORORING_RETURN_IF_ERROR(transport_.CheckPeers());
    transport_.Sleep(After(NowNs(), kLookInterval));
  }
  if (nccl_ == nullptr) return Status::Ok();
  const Status left = nccl_->Leave(deadline);
  nccl_ = nullptr;
  return left;
}

void CudaBackend::BreakOff() {
  if (nccl_ != nullptr) nccl_->Abort();
}

void CudaBackend::Tune(const Tuning& tuning) {
  if (by_host_ != nullptr) by_host_->Tune(tuning);
  narrow_ = tuning.wires != Tuning().wires;
}

int64_t CudaBackend::narrow_bytes() const {
  return staged_.narrow_bytes() + (by_host_ != nullptr ? by_host_->narrow_bytes() : 0);
}

size_t CudaBackend::scratch_bytes() const {
  return staged_.scratch_bytes() + (nccl_ != nullptr ? nccl_->fusion_bytes() : 0) +
         (by_host_ != nullptr ? by_host_->scratch_bytes() : 0);
}

}  // namespace hororing
