// Engines on emulated hosts: threads with a segment per host, and the in-process transport between
// hosts.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine_world.h"
#include "transport/routed_transport.h"

namespace hororing_test {

using Hosts = std::vector<int>;  // the host of every rank

// The same as Play, on several hosts.
inline void PlayOn(const Hosts& hosts, const EngineConfig& base,
                   const std::function<void(Player&)>& script, size_t pipe_bytes = 0,
                   const std::function<void(int, World&)>& adjust = {}) {
  const int size = static_cast<int>(hosts.size());
  auto wires = MakeInprocWorld(size, 20 * kMicrosecond);
  std::vector<std::string> ids;
  for (const int host : hosts) ids.push_back("host" + std::to_string(host));
  std::vector<std::shared_ptr<ShmSegment>> segments;
  for (const auto& ranks : MakeTopology(0, ids).ranks_on()) {
    auto geometry = ShmSegment::Geometry::OfHost(static_cast<int>(ranks.size()), size);
    if (pipe_bytes > 0) geometry.control_pipe_bytes = pipe_bytes;
    segments.push_back(ShmSegment::OnHeap(geometry));
  }
  std::vector<World> worlds;
  for (int rank = 0; rank < size; ++rank) {
    World world;
    world.transport = std::move(wires[static_cast<size_t>(rank)]);
    world.topology = MakeTopology(rank, ids);
    const int host = world.topology.host_of[static_cast<size_t>(rank)];
    world.local = std::make_unique<ShmTransport>(segments[static_cast<size_t>(host)],
                                                 world.topology.local_rank, 20 * kMicrosecond);
    RouteControl({}, &world);
    if (adjust) adjust(rank, world);
    worlds.push_back(std::move(world));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      EngineConfig config = base;
      if (config.timeout_ns == kForever) config.timeout_ns = kTestTimeout;
      Player player;
      player.rank = rank;
      player.size = size;
      const auto make_world = [&](World* world) {
        *world = std::move(worlds[static_cast<size_t>(rank)]);
        return Status::Ok();
      };
      const Status started = Start(config, make_world, &player);
      CHECK_OK(started);
      if (started.ok()) script(player);
      if (player.engine != nullptr) CHECK(player.engine->Shutdown("", kTestTimeout));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace hororing_test
