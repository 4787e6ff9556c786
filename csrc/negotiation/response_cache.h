// ResponseCache: what a rank remembers of requests that were agreed before, so that the next
// report and the next agreement name them by a number.
//
// Every rank applies the same definitions and evictions in the same order (they travel in
// agreements), so ids mean the same everywhere. The coordinator alone decides what is evicted.
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

  // The id under which exactly this request is cached, or 0.
  uint64_t Find(const Request& request) const;
  // The id under which a request of that name is, or 0.
  uint64_t Find(int32_t process_set, const std::string& name) const;
  // Null when `id` is not cached.
  const Record* Lookup(uint64_t id) const;
  // A name has at most one id: an older one is forgotten.
  void Define(uint64_t id, Request request, std::vector<int64_t> rows);
  void Evict(uint64_t id);
  // The process set is no more. Returns the ids of its requests.
  std::vector<uint64_t> ForgetSet(int32_t process_set);
  size_t size() const { return records_.size(); }

 private:
  std::unordered_map<uint64_t, Record> records_;
  std::unordered_map<std::string, uint64_t> ids_;  // by Key
};

}  // namespace hororing
