// Shared: what callers and the loop of one engine share. Members are thread-safe or constant.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "collective/algorithm.h"
#include "engine/backends.h"
#include "engine/handle_table.h"
#include "engine/mailbox.h"
#include "engine/stats.h"
#include "engine/tensor_table.h"
#include "gpu/devices.h"
#include "negotiation/process_sets.h"
#include "negotiation/stall_inspector.h"
#include "trace/trace.h"

namespace hororing {

struct EngineConfig {
  // Visible to other ranks.
  int64_t fusion_bytes = 64 << 20;
  int64_t verify = 0;  // every n-th batch of allreduces is; 0: none
  TimeNs cycle_time_ns = kMillisecond;
  // The cycle time once NCCL reduces tensors. Other batches occupy the loop while tensors gather
  // for the next one. NCCL's run on the device: the loop would start a small one each millisecond.
  TimeNs nccl_cycle_time_ns = 5 * kMillisecond;
  int cache_capacity = 8192;
  AllreduceOptions allreduce;
  std::string fingerprint;  // see CompareFingerprints
  // Local to this rank.
  std::string backend = "auto";
  GpuMode gpu = GpuMode::kAuto;  // visible to other ranks
  Devices::Options devices;      // except for `likely`
  StallInspector::Options stall;
  TimeNs timeout_ns = kForever;  // for every wait on a peer
  // How often an idle rank checks that its peers and its parent process are alive.
  TimeNs checks_ns = 250 * kMillisecond;
  int cpu = -1;               // core for the loop thread; -1: any
  bool watch_parent = false;  // end the process when its parent dies
  std::string timeline;       // path; rank 0's is used
  bool timeline_cycles = false;
  int64_t timeline_bytes = 0;  // limit for any timeline; 0: none
  // The first and last training step that `timeline` covers, counted from 1; 0: everything.
  int64_t timeline_from = 0, timeline_to = 0;
};

struct Shared {
  Shared(const EngineConfig& with, std::shared_ptr<HandleTable> results)
      : config(with), handles(std::move(results)), tensors(handles.get()) {}

  const EngineConfig config;
  const std::shared_ptr<HandleTable> handles;
  Mailbox mailbox;
  TensorTable tensors;
  TraceSink trace;
  Stats stats;
  // These are there once the engine has started.
  std::optional<ProcessSets> sets;
  std::shared_ptr<Devices> devices;
  bool transport_allows_callers = false;  // the transport allows callers to run the loop

  TimeNs CycleTime() const {
    return devices->nccl_in_use() ? config.nccl_cycle_time_ns : config.cycle_time_ns;
  }

  // Whether callers may run the loop now. Not with a device: a call of NVIDIA's driver that does
  // not return can be abandoned only on the loop's own thread. Not while this rank has joined: the
  // other ranks' tensors may be its first on a device.
  bool CallersMayProgress() const {
    return transport_allows_callers && !devices->in_use() && !tensors.joining();
  }
};

}  // namespace hororing
