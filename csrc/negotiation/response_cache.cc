#include "negotiation/response_cache.h"

#include <utility>

namespace hororing {

uint64_t ResponseCache::Find(const Request& request) const {
  const uint64_t id = Find(request.process_set, request.name);
  return id != 0 && records_.at(id).request == request ? id : 0;
}

uint64_t ResponseCache::Find(int32_t process_set, const std::string& name) const {
  const auto id = ids_.find(Key(process_set, name));
  return id == ids_.end() ? 0 : id->second;
}

const ResponseCache::Record* ResponseCache::Lookup(uint64_t id) const {
  const auto record = records_.find(id);
  return record == records_.end() ? nullptr : &record->second;
}

void ResponseCache::Define(uint64_t id, Request request, std::vector<int64_t> rows) {
  const auto older = ids_.find(Key(request));
  if (older != ids_.end()) records_.erase(older->second);
  ids_[Key(request)] = id;
  records_[id] = Record{std::move(request), std::move(rows)};
}

void ResponseCache::Evict(uint64_t id) {
  const auto record = records_.find(id);
  if (record == records_.end()) return;
  ids_.erase(Key(record->second.request));
  records_.erase(record);
}

std::vector<uint64_t> ResponseCache::ForgetSet(int32_t process_set) {
  std::vector<uint64_t> forgotten;
  for (auto record = records_.begin(); record != records_.end();) {
    if (record->second.request.process_set == process_set) {
      ids_.erase(Key(record->second.request));
      forgotten.push_back(record->first);
      record = records_.erase(record);
    } else {
      ++record;
    }
  }
  return forgotten;
}

}  // namespace hororing
