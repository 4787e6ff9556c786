// The one place that decides which backends an engine has, in order of preference.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "collective/algorithm.h"
#include "gpu/cuda_backend.h"
#include "transport/factory.h"
#include "transport/transport.h"

namespace hororing {

struct BackendOptions {
  std::string name = "auto";  // or "host"
  AllreduceOptions allreduce;
  CudaBackend::Options cuda;
};

// For batches of some ranks of `world`, or all, which `transport` connects. The last two backends
// of the list support every batch on the host and every batch on a device.
std::vector<std::unique_ptr<Backend>> MakeBackends(const BackendOptions& options,
                                                   const World& world, Transport& transport,
                                                   const Members& members);

}  // namespace hororing
