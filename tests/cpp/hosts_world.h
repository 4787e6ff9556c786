// N ranks on emulated hosts: threads with a segment per host, and QueueTransport or the in-process
// transport between hosts.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backend/shared_memory_backend.h"
#include "backend_world.h"
#include "faulty_transport.h"
#include "queue_transport.h"
#include "transport/factory.h"
#include "world.h"

namespace hororing {

using hororing_test::CheckedTransport;
using hororing_test::Fault;
using hororing_test::FaultyTransport;
using hororing_test::QueueTransport;
using hororing_test::Watchdog;

// The host of every rank.
using Hosts = std::vector<int>;
inline const auto kLayouts = hororing_test::AllOrFew<Hosts>(
    {{0, 0, 1, 1}, {0, 1, 2, 3}, {0, 1, 1, 1}, {0, 1, 2, 0, 1, 2, 0}, {0, 0, 0, 1, 1}},
    {{0, 0, 1, 1}, {0, 1, 1, 1}});

inline std::string Text(const Hosts& hosts) {
  std::string text = "hosts";
  for (const int host : hosts) text += " " + std::to_string(host);
  return text;
}

inline std::vector<std::string> HostIds(const Hosts& hosts) {
  std::vector<std::string> ids;
  for (const int host : hosts) ids.push_back("host" + std::to_string(host));
  return ids;
}

// A fault in the wire transport of rank `faulty`.
struct Trouble {
  int faulty = -1;
  Fault fault;
};

// N ranks, each with its own World over shared wires and segments.
class HostsWorld {
 public:
  HostsWorld(const std::string& kind, const Hosts& hosts, const Trouble& trouble = {},
             size_t slot_bytes = 0) {
    auto wires = kind == "queue" ? QueueTransport::MakeWorld(static_cast<int>(hosts.size()))
                                 : MakeInprocWorld(static_cast<int>(hosts.size()), kSpin);
    std::vector<std::shared_ptr<ShmSegment>> segments;
    for (size_t r = 0; r < hosts.size(); ++r) {
      World world;
      world.topology = MakeTopology(static_cast<int>(r), HostIds(hosts));
      if (segments.empty()) segments = Segments(world.topology, slot_bytes);
      auto wire = std::move(wires[r]);
      if (static_cast<int>(r) == trouble.faulty) {
        wire = std::make_unique<FaultyTransport>(std::move(wire), trouble.fault);
      }
      world.transport = std::make_unique<CheckedTransport>(std::move(wire));
      world.local =
          std::make_unique<ShmTransport>(segments[static_cast<size_t>(world.topology.host_of[r])],
                                         world.topology.local_rank, kSpin);
      worlds_.push_back(std::move(world));
    }
  }

  int size() const { return static_cast<int>(worlds_.size()); }
  World& world(int rank) { return worlds_[static_cast<size_t>(rank)]; }
  CheckedTransport& wire(int rank) {
    return dynamic_cast<CheckedTransport&>(*world(rank).transport);
  }
  // Returns a backend for batches of `members`; without members, of all ranks.
  std::unique_ptr<SharedMemoryBackend> Backend(int rank, size_t latency_bytes = 0,
                                               Members members = {}) {
    AllreduceOptions options;
    options.latency_bytes = latency_bytes;
    if (members.ranks.empty()) members = Members::World(size());
    return std::make_unique<SharedMemoryBackend>(*world(rank).transport,
                                                 dynamic_cast<ShmTransport&>(*world(rank).local),
                                                 world(rank).topology, members, options);
  }
  // Runs body(rank) on one thread per rank.
  void Run(const std::function<void(int)>& body) {
    Watchdog watchdog(size(), hororing_test::kWorldLimit);
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] {
        watchdog.Enter(r, "body");
        body(r);
        watchdog.Enter(r, "done");
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  static constexpr TimeNs kSpin = 20 * kMicrosecond;

  static std::vector<std::shared_ptr<ShmSegment>> Segments(const Topology& topology,
                                                           size_t slot_bytes) {
    size_t most = 0;
    for (const auto& ranks : topology.ranks_on()) most = std::max(most, ranks.size());
    std::vector<std::shared_ptr<ShmSegment>> segments;
    for (const auto& ranks : topology.ranks_on()) {
      auto geometry =
          ShmSegment::Geometry::OfHost(static_cast<int>(ranks.size()), static_cast<int>(most));
      if (slot_bytes > 0) geometry.slot_bytes = slot_bytes;
      segments.push_back(ShmSegment::OnHeap(geometry));
    }
    return segments;
  }

  std::vector<World> worlds_;
};

}  // namespace hororing
