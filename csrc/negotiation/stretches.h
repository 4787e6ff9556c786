// Stretches: the cache ids that may be reported and agreed upon as runs. Requests that were agreed
// upon one after the other have ids that follow one another, and in later steps mostly come in the
// same order again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace hororing {

// Ids that follow one another.
struct IdRun {
  uint64_t first = 0, count = 0;

  uint64_t end() const { return first + count; }
  bool operator==(const IdRun& other) const { return first == other.first && count == other.count; }
};

class Stretches {
 public:
  // Part of a stretch.
  struct Part {
    IdRun ids;
    int32_t process_set = 0;
  };

  // REQUIRES: `id` is above all that were added before.
  void Add(uint64_t id, int32_t process_set);
  // It is in none from now on.
  void Remove(uint64_t id);
  // `ids`, in their order, as parts. False: they are more than `most`, or some id is in no stretch.
  bool Cut(const std::vector<uint64_t>& ids, size_t most, std::vector<Part>* parts) const;

 private:
  struct Stretch {
    uint64_t count = 0;
    int32_t process_set = 0;
  };
  using ByFirst = std::map<uint64_t, Stretch>;
  ByFirst::const_iterator Find(uint64_t id) const;  // end(): it is in none

  ByFirst stretches_;
};

}  // namespace hororing
