// Shared: what callers and the loop of one engine have in common. Each member is safe to use from
// any thread, or constant.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "collective/algorithm.h"
#include "engine/backends.h"
#include "engine/handle_table.h"
#include "engine/mailbox.h"
#include "engine/shared_process_sets.h"
#include "engine/stats.h"
#include "engine/tensor_table.h"
#include "gpu/devices.h"
#include "negotiation/stall_inspector.h"
#include "negotiation/tuner.h"
#include "trace/trace.h"

namespace hororing {

struct EngineConfig {
  // Rank-visible.
  int64_t fusion_bytes = 64 << 20;
  TimeNs cycle_time_ns = kMillisecond;
  int cache_capacity = 8192;
  AllreduceOptions allreduce;  // but for what the wire costs, which is measured
  // Finds fusion_bytes and cycle_time_ns by trying. Its initial setting is those.
  std::optional<Tuner::Options> tune;
  std::string tune_log;     // path, for rank 0; empty: none
  std::string fingerprint;  // see CompareFingerprints
  // Local.
  std::string backend = "auto";
  GpuMode gpu = GpuMode::kAuto;  // rank-visible
  Devices::Options devices;      // but for `likely`
  StallInspector::Options stall;
  TimeNs timeout_ns = kForever;  // for every wait on a peer
  // How often a rank that has nothing to do looks whether its peers and its parent are alive.
  TimeNs checks_ns = 250 * kMillisecond;
  int cpu = -1;               // core for the loop thread; -1: any
  bool watch_parent = false;  // end the process when its parent dies
  std::string timeline;       // path; rank 0's counts
  bool timeline_cycles = false;
  int64_t timeline_bytes = 0;  // most of any timeline; 0: no limit
  // The steps of training that `timeline` is about, counted from 1; 0: everything.
  int64_t timeline_from = 0, timeline_to = 0;
};

struct Shared {
  Shared(const EngineConfig& with, std::shared_ptr<HandleTable> results)
      : config(with), handles(std::move(results)), tensors(handles.get()) {}

  const EngineConfig config;
  const std::shared_ptr<HandleTable> handles;
  Mailbox mailbox;
  TensorTable tensors;
  SharedProcessSets sets;
  TraceSink trace;
  Stats stats;
  // Constant once the engine has started.
  std::shared_ptr<Devices> devices;
  bool transport_lets_callers = false;  // run the loop

  // Whether callers may run the loop now. A call of NVIDIA's that does not return must not be one
  // that a caller is in: nobody could abandon it, so with a device the loop stays with its thread.
  // So it does while this rank has joined, when tensors of the others may be its first on a device.
  bool CallersMayProgress() const {
    return transport_lets_callers && !devices->in_use() && !tensors.joining();
  }
};

}  // namespace hororing
