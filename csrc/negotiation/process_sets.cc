#include "negotiation/process_sets.h"

#include <algorithm>
#include <numeric>

namespace hororing {
int ProcessSet::Search(int rank) const {
  const auto found = std::lower_bound(ranks.begin(), ranks.end(), rank);
  if (found == ranks.end() || *found != rank) return -1;
  return static_cast<int>(found - ranks.begin());
}

ProcessSets::ProcessSets(int size) : size_(size) {
  auto world = std::make_shared<ProcessSet>();
  world->ranks.resize(static_cast<size_t>(size));
  std::iota(world->ranks.begin(), world->ranks.end(), 0);
  sets_[kWorldSet] = world_ = std::move(world);
}

Status ProcessSets::Check(const std::vector<int32_t>& ranks, bool internal) const {
  std::vector<int> sorted(ranks.begin(), ranks.end());
  std::sort(sorted.begin(), sorted.end());
  const std::string given =
      "a process set of ranks " + ShapeText({sorted.begin(), sorted.end()}) + " is not possible: ";
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] < 0 || sorted[i] >= size_) {
      return Status(Code::kInvalidArgument,
                    given + "rank " + std::to_string(sorted[i]) +
                        " is not a rank of this job, which has ranks 0 to " +
                        std::to_string(size_ - 1));
    }
    if (i > 0 && sorted[i] == sorted[i - 1]) {
      return Status(Code::kInvalidArgument,
                    given + "rank " + std::to_string(sorted[i]) + " occurs twice");
    }
  }
  for (const auto& [id, set] : sets_) {
    if (internal || set->internal || set->ranks != sorted) continue;
    return Status(Code::kInvalidArgument,
                  "attempted to add a duplicate process set: process set " + std::to_string(id) +
                      " has the ranks " + ShapeText({sorted.begin(), sorted.end()}) + " already");
  }
  return Status::Ok();
}

int32_t ProcessSets::NextId() const {
  int32_t id = kWorldSet + 1;
  while (sets_.count(id) != 0) ++id;
  return id;
}

void ProcessSets::Add(int32_t id, const std::vector<int32_t>& ranks, bool internal) {
  auto set = std::make_shared<ProcessSet>();
  set->internal = internal;
  set->ranks.assign(ranks.begin(), ranks.end());
  std::sort(set->ranks.begin(), set->ranks.end());
  std::lock_guard<std::mutex> lock(mutex_);
  sets_[id] = std::move(set);
}

void ProcessSets::Remove(int32_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  sets_.erase(id);
}

const ProcessSet* ProcessSets::Find(int32_t id) const {
  const auto set = sets_.find(id);
  return set == sets_.end() ? nullptr : set->second.get();
}

std::shared_ptr<const ProcessSet> ProcessSets::Share(int32_t id) const {
  if (id == kWorldSet) return world_;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto set = sets_.find(id);
  return set == sets_.end() ? nullptr : set->second;
}

}  // namespace hororing
