// The one place that decides which backends an engine has, in order of preference.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "transport/transport.h"

namespace hororing {

// For batches of all ranks. `name` is "auto", "host" or "shm_direct"; the last one is an error
// where the transport shares no memory. The last backend of the list supports every batch.
Status MakeBackends(const std::string& name, bool reproducible, Transport& transport,
                    std::vector<std::unique_ptr<Backend>>* backends);
// For batches of some ranks of `world`, which `subgroup` connects: what `name` permits.
std::vector<std::unique_ptr<Backend>> MakeSetBackends(const std::string& name, bool reproducible,
                                                      Transport& world, Transport& subgroup,
                                                      const Members& members);

}  // namespace hororing
