#include "backend/factory.h"

#include "backend/host_backend.h"
#include "backend/shm_direct.h"
#include "transport/shm_transport.h"

namespace hororing {

Status MakeBackends(const std::string& name, bool reproducible, Transport& transport,
                    std::vector<std::unique_ptr<Backend>>* backends) {
  if (name != "auto" && name != "host" && name != "shm_direct") {
    return Status(Code::kInvalidArgument,
                  "unknown backend '" + name + "'; choose auto, host or shm_direct");
  }
  ShmTransport* shared = dynamic_cast<ShmTransport*>(&transport);
  if (shared != nullptr && !ShmDirectBackend::HasRoom(shared->segment().geometry())) {
    shared = nullptr;
  }
  if (name == "shm_direct" && shared == nullptr) {
    return Status(Code::kInvalidArgument,
                  std::string("backend shm_direct needs memory that all ranks share, which the "
                              "transport '") +
                      transport.name() + "' does not offer; use backend auto or host");
  }
  backends->clear();
  if (shared != nullptr && name != "host") {
    backends->push_back(std::make_unique<ShmDirectBackend>(*shared));
  }
  HostBackend::Options options;
  options.reproducible = reproducible;
  backends->push_back(std::make_unique<HostBackend>(transport, options));
  return Status::Ok();
}

}  // namespace hororing
