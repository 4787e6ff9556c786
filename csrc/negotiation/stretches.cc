#include "negotiation/stretches.h"

#include <algorithm>
#include <iterator>

namespace hororing {

void Stretches::Add(uint64_t id, int32_t process_set) {
  if (!stretches_.empty()) {
    auto& [first, last] = *stretches_.rbegin();
    if (first + last.count == id && last.process_set == process_set) {
      ++last.count;
      return;
    }
  }
  stretches_[id] = {1, process_set};
}

Stretches::ByFirst::const_iterator Stretches::Find(uint64_t id) const {
  auto found = stretches_.upper_bound(id);
  if (found == stretches_.begin()) return stretches_.end();
  --found;
  return id < found->first + found->second.count ? found : stretches_.end();
}

void Stretches::Remove(uint64_t id) {
  const auto found = Find(id);
  if (found == stretches_.end()) return;
  const auto [first, whole] = *found;
  stretches_.erase(found);
  const uint64_t before = id - first, after = whole.count - before - 1;
  if (before > 0) stretches_[first] = {before, whole.process_set};
  if (after > 0) stretches_[id + 1] = {after, whole.process_set};
}

bool Stretches::Cut(const std::vector<uint64_t>& ids, size_t most, std::vector<Part>* parts) const {
  parts->clear();
  for (size_t begin = 0; begin < ids.size();) {
    const auto found = Find(ids[begin]);
    if (found == stretches_.end() || parts->size() == most) return false;
    const uint64_t left = found->first + found->second.count - ids[begin];
    const size_t longest = begin + std::min<uint64_t>(left, ids.size() - begin);
    size_t end = begin + 1;
    while (end < longest && ids[end] == ids[end - 1] + 1) ++end;
    parts->push_back({{ids[begin], end - begin}, found->second.process_set});
    begin = end;
  }
  return true;
}

}  // namespace hororing
