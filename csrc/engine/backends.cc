#include "engine/backends.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backend/host_backend.h"
#include "backend/shared_memory_backend.h"
#include "transport/shm_transport.h"

namespace hororing {
Status CheckBackends(const BackendOptions& options, const World& world) {
  const std::string& name = options.name;
  const Transport& transport = *world.transport;
  if (name != "auto" && name != "host") {
    return Status(Code::kInvalidArgument, "unknown backend '" + name + "'; choose auto or host");
  }
  const Algorithm algorithm = options.allreduce.algorithm;
  const std::string setting = std::string("HORORING_ALGORITHM=") + Name(algorithm);
  if (options.allreduce.reproducible && algorithm != Algorithm::kAuto) {
    return Status(Code::kInvalidArgument,
                  setting +
                      " is not possible with HORORING_REPRODUCIBLE=1, which sums in the order of "
                      "ranks; leave out one of them");
  }
  const bool phases = algorithm == Algorithm::kThreePhase;
  const size_t hosts = world.topology.hosts.size();
  const bool neighbours = hosts > 1 && static_cast<size_t>(transport.size()) > hosts;
  if (phases && neighbours && (world.local == nullptr || name == "host")) {
    return Status(Code::kInvalidArgument,
                  setting + " needs memory that the ranks of a host share, which " +
                      (name == "host" ? "backend host does not use" : "they do not have") +
                      "; use auto or ring");
  }
  return Status::Ok();
}

std::vector<std::unique_ptr<Backend>> MakeBackends(const BackendOptions& options,
                                                   const World& world, Transport& transport,
                                                   const Members& members) {
  std::vector<std::unique_ptr<Backend>> backends;
  const HostGroup group(world.topology, members);
  auto* const shared = dynamic_cast<ShmTransport*>(world.transport.get());
  auto* const local = shared != nullptr ? shared : dynamic_cast<ShmTransport*>(world.local.get());
  // If each host has one member, there is only the wire.
  const bool share = shared != nullptr || group.hosts() < group.size();
  if (local != nullptr && share && options.name != "host" && members.set < kDirectSets) {
    backends.push_back(std::make_unique<SharedMemoryBackend>(
        *world.transport, *local, world.topology, members, options.allreduce));
  }
  backends.push_back(
      std::make_unique<HostBackend>(transport, options.allreduce, group.group_ranks_on));
  // CudaBackend uses the host's backends, and looks for a device only at its first batch.
  std::vector<Backend*> host;
  for (const auto& backend : backends) host.push_back(backend.get());
  backends.push_back(std::make_unique<CudaBackend>(transport, options.cuda, std::move(host)));
  return backends;
}

}  // namespace hororing
