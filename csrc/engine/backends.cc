#include "engine/backends.h"

#include <utility>

#include "backend/host_backend.h"
#include "backend/shared_memory_backend.h"
#include "transport/shm/shm_transport.h"

namespace hororing {
std::vector<std::unique_ptr<Backend>> MakeBackends(const BackendOptions& options,
                                                   const World& world, Transport& transport,
                                                   const Members& members) {
  std::vector<std::unique_ptr<Backend>> backends;
  const HostGroup group(world.topology, members);
  auto* const shared = dynamic_cast<ShmTransport*>(world.transport.get());
  auto* const local = shared != nullptr ? shared : dynamic_cast<ShmTransport*>(world.local.get());
  // If each host has one member, there is only the wire.
  const bool share = shared != nullptr || group.hosts() < group.size();
  if (local != nullptr && share && options.name != "host" && members.set < kSlotSets) {
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
