// Which sums of floats, on the host, were not finite, as seen where they are computed; for a guard
// (hororing/guard). All ranks have the same bits, so they tell one another only where from.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "kernels/reduce.h"

namespace hororing {

struct FiniteWatch {
  std::atomic<bool> on{false};
  std::mutex mutex;
  // "set -1 elements 0 name": a result; then "set rank nan infinite name": inputs of ranks.
  std::deque<std::string> notes;  // GUARDED_BY(mutex)

  void Note(int32_t set, const std::string& name, int rank, const NonFinite& elements) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (notes.size() == 4096) notes.pop_front();
    std::string& text = notes.emplace_back();
    for (int64_t number : {int64_t{set}, int64_t{rank}, elements.nan, elements.infinite})
      text += std::to_string(number) + " ";
    text += name;
  }
};
inline FiniteWatch finite_watch;  // one per process: a guard outlives engines

}  // namespace hororing
