// ResponseCache: the requests that were agreed upon before, so that later reports and agreements
// refer to them by a number.
//
// Every rank applies the same definitions and evictions in the same order, because they are part of
// agreements. Ids therefore mean the same everywhere. Only the coordinator decides what is evicted.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "negotiation/messages.h"

namespace hororing {

class ResponseCache {
 public:
  struct Record {
    Request request;            // as this rank submitted it
    std::vector<int64_t> rows;  // as in Decision::Details
  };

  // The id of exactly this request, or 0 if it is not cached.
  uint64_t Find(const Request& request) const;
  // The id of a request of that name, or 0.
  uint64_t Find(int32_t process_set, const std::string& name) const;
  // Null if `id` is not cached.
  const Record* Lookup(uint64_t id) const;
  // A name has at most one id: an older one is forgotten.
  void Define(uint64_t id, Request request, std::vector<int64_t> rows);
  void Evict(uint64_t id);
  // Forgets a removed process set. Returns the ids of its requests.
  std::vector<uint64_t> ForgetSet(int32_t process_set);
  size_t size() const { return records_.size(); }

 private:
  std::unordered_map<uint64_t, Record> records_;
  std::unordered_map<std::string, uint64_t> ids_;  // by Key
};

}  // namespace hororing
