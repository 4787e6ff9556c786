#include "negotiation/response_cache.h"

#include <utility>

namespace hororing {

uint64_t ResponseCache::Find(const Request& request) const {
  const auto id = ids_.find(request.name);
  if (id == ids_.end()) return 0;
  return records_.at(id->second).request == request ? id->second : 0;
}

const ResponseCache::Record* ResponseCache::Lookup(uint64_t id) const {
  const auto record = records_.find(id);
  return record == records_.end() ? nullptr : &record->second;
}

void ResponseCache::Define(uint64_t id, Request request, std::vector<int64_t> rows) {
  const auto older = ids_.find(request.name);
  if (older != ids_.end()) records_.erase(older->second);
  ids_[request.name] = id;
  records_[id] = Record{std::move(request), std::move(rows)};
}

void ResponseCache::Evict(uint64_t id) {
  const auto record = records_.find(id);
  if (record == records_.end()) return;
  ids_.erase(record->second.request.name);
  records_.erase(record);
}

}  // namespace hororing
