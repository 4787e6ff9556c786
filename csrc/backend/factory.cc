#include "backend/factory.h"

#include "backend/host_backend.h"
#include "backend/shm_direct.h"
#include "transport/shm_transport.h"

namespace hororing {
namespace {

// Null where the ranks share no memory, or too little.
ShmTransport* SharedBy(Transport& transport) {
  ShmTransport* shared = dynamic_cast<ShmTransport*>(&transport);
  const bool room = shared != nullptr && ShmDirectBackend::HasRoom(shared->segment().geometry());
  return room ? shared : nullptr;
}

}  // namespace

Status MakeBackends(const std::string& name, bool reproducible, Transport& transport,
                    std::vector<std::unique_ptr<Backend>>* backends) {
  if (name != "auto" && name != "host" && name != "shm_direct") {
    return Status(Code::kInvalidArgument,
                  "unknown backend '" + name + "'; choose auto, host or shm_direct");
  }
  ShmTransport* shared = SharedBy(transport);
  if (name == "shm_direct" && shared == nullptr) {
    return Status(Code::kInvalidArgument,
                  std::string("backend shm_direct needs memory that all ranks share, which the "
                              "transport '") +
                      transport.name() + "' does not offer; use backend auto or host");
  }
  backends->clear();
  if (shared != nullptr && name != "host") {
    backends->push_back(
        std::make_unique<ShmDirectBackend>(*shared, Members::World(transport.size())));
  }
  HostBackend::Options options;
  options.reproducible = reproducible;
  backends->push_back(std::make_unique<HostBackend>(transport, options));
  return Status::Ok();
}

std::vector<std::unique_ptr<Backend>> MakeSetBackends(const std::string& name, bool reproducible,
                                                      Transport& world, Transport& subgroup,
                                                      const Members& members) {
  std::vector<std::unique_ptr<Backend>> backends;
  ShmTransport* shared = SharedBy(world);
  if (shared != nullptr && name != "host" && members.set < kDirectSets) {
    backends.push_back(std::make_unique<ShmDirectBackend>(*shared, members));
  }
  HostBackend::Options options;
  options.reproducible = reproducible;
  backends.push_back(std::make_unique<HostBackend>(subgroup, options));
  return backends;
}

}  // namespace hororing
