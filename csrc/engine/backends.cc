#include "engine/backends.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backend/hierarchical.h"
#include "backend/host_backend.h"
#include "backend/shm_direct.h"
#include "transport/shm_transport.h"

namespace hororing {
namespace {

// Null if the ranks do not share enough memory.
ShmTransport* SharedBy(Transport& transport) {
  ShmTransport* shared = dynamic_cast<ShmTransport*>(&transport);
  const bool fits = shared != nullptr && ShmDirectBackend::Fits(shared->segment().geometry());
  return fits ? shared : nullptr;
}

// After all host backends, which it uses. It looks for a device only when a batch needs one.
void AddCuda(const BackendOptions& options, Transport& transport,
             std::vector<std::unique_ptr<Backend>>* backends) {
  std::vector<Backend*> host;
  for (const auto& backend : *backends) host.push_back(backend.get());
  backends->push_back(std::make_unique<CudaBackend>(transport, options.cuda, std::move(host)));
}

}  // namespace

Status CheckBackends(const BackendOptions& options, const World& world) {
  const std::string& name = options.name;
  const Transport& transport = *world.transport;
  if (name != "auto" && name != "host" && name != "shm_direct") {
    return Status(Code::kInvalidArgument,
                  "unknown backend '" + name + "'; choose auto, host or shm_direct");
  }
  if (name == "shm_direct" && SharedBy(*world.transport) == nullptr) {
    return Status(Code::kInvalidArgument,
                  std::string("backend shm_direct needs memory that all ranks share, which the "
                              "transport '") +
                      transport.name() + "' does not offer; use backend auto or host");
  }
  const std::string algorithms = Names(options.allreduce);
  if (options.allreduce.reproducible && algorithms != Name(Algorithm::kAuto)) {
    return Status(Code::kInvalidArgument,
                  "HORORING_ALGORITHM=" + algorithms +
                      " cannot be had with HORORING_REPRODUCIBLE=1, which sums in the order of "
                      "ranks; leave out one of them");
  }
  const auto& chosen = options.allreduce.algorithms;
  const bool phases = std::any_of(chosen.begin(), chosen.end(), [](Algorithm each) {
    return each == Algorithm::kThreePhase || each == Algorithm::kLeader;
  });
  const size_t hosts = world.topology.hosts.size();
  const bool neighbours = hosts > 1 && static_cast<size_t>(transport.size()) > hosts;
  if (phases && neighbours && (world.local == nullptr || name == "host")) {
    return Status(Code::kInvalidArgument,
                  "HORORING_ALGORITHM=" + algorithms +
                      " needs memory that the ranks of a host share, which " +
                      (name == "host" ? "backend host does without" : "there is not") +
                      "; use auto or ring");
  }
  return Status::Ok();
}

Status MakeBackends(const BackendOptions& options, const World& world,
                    std::vector<std::unique_ptr<Backend>>* backends) {
  HORORING_RETURN_IF_ERROR(CheckBackends(options, world));
  const std::string& name = options.name;
  Transport& transport = *world.transport;
  backends->clear();
  ShmTransport* shared = SharedBy(transport);
  if (shared != nullptr && name != "host") {
    backends->push_back(std::make_unique<ShmDirectBackend>(
        *shared, Members::World(transport.size()), options.allreduce.chunk_bytes));
  }
  ShmTransport* const local = dynamic_cast<ShmTransport*>(world.local.get());
  if (local != nullptr && name != "host") {
    backends->push_back(std::make_unique<HierarchicalBackend>(
        transport, *local, world.topology, Members::World(transport.size()), options.allreduce));
  }
  backends->push_back(
      std::make_unique<HostBackend>(transport, options.allreduce, world.topology.ranks_on()));
  AddCuda(options, transport, backends);
  return Status::Ok();
}

std::vector<std::unique_ptr<Backend>> MakeSetBackends(const BackendOptions& options,
                                                      const World& world, Transport& subgroup,
                                                      const Members& members) {
  std::vector<std::unique_ptr<Backend>> backends;
  const bool counted = options.name != "host" && members.set < kDirectSets;
  ShmTransport* const shared = SharedBy(*world.transport);
  if (shared != nullptr && counted) {
    backends.push_back(
        std::make_unique<ShmDirectBackend>(*shared, members, options.allreduce.chunk_bytes));
  }
  const HostGroup group(world.topology, members);
  ShmTransport* const local = dynamic_cast<ShmTransport*>(world.local.get());
  // If each host has one member, only the wire connects them.
  if (local != nullptr && counted && group.hosts() < group.size()) {
    backends.push_back(std::make_unique<HierarchicalBackend>(
        *world.transport, *local, world.topology, members, options.allreduce));
  }
  backends.push_back(
      std::make_unique<HostBackend>(subgroup, options.allreduce, group.group_ranks_on));
  AddCuda(options, subgroup, &backends);
  return backends;
}

}  // namespace hororing
