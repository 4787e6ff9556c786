#include "negotiation/planned_reports.h"

#include <algorithm>
#include <iterator>

namespace hororing {

void PlannedReports::Learn(int32_t process_set, const std::vector<PlannedBucket>& buckets) {
  std::vector<Bucket>& known = buckets_[process_set];
  for (auto place = places_.begin(); place != places_.end();) {
    place = place->second.process_set == process_set ? places_.erase(place) : std::next(place);
  }
  known.assign(buckets.size(), {});
  for (size_t i = 0; i < buckets.size(); ++i) {
    known[i].size = buckets[i].ids.size();
    known[i].wait_ns = buckets[i].wait_ns;
    for (const uint64_t id : buckets[i].ids) places_[id] = {process_set, &known[i]};
  }
  Reported();
}

void PlannedReports::Add(uint64_t id, TimeNs when) {
  const auto place = places_.find(id);
  if (place == places_.end()) {
    if (others_.count++ == 0) others_.first_ns = when;
    return;
  }
  Bucket& bucket = *place->second.bucket;
  const auto begin_round = [&bucket] {
    ++bucket.round;
    bucket.here = 0;
  };
  // The next step has begun without the rest.
  const bool again = place->second.round == bucket.round;
  if (again || (bucket.here > 0 && when > After(bucket.first_ns, bucket.wait_ns))) begin_round();
  place->second.round = bucket.round;
  if (bucket.here == 0) bucket.first_ns = when;
  due_ns_ = std::min(due_ns_, After(when, bucket.wait_ns));
  if (++bucket.here < bucket.size) return;
  due_ns_ = 0;
  begin_round();
}

void PlannedReports::Reported() {
  due_ns_ = kForever;
  others_ = {};
}

}  // namespace hororing
