#include "base/clock.h"

#include <time.h>

namespace hororing {
TimeNs CoarseNowNs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<TimeNs>(now.tv_sec) * kSecond + now.tv_nsec;
}

TimeNs NowNs() {
  // Not std::chrono::steady_clock, whose clock may differ: times of processes are compared here.
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<TimeNs>(now.tv_sec) * kSecond + now.tv_nsec;
}

std::string Seconds(TimeNs span) {
  if (span < kSecond) return std::to_string(span / kMillisecond) + " ms";
  return std::to_string(span / kSecond) + " s";
}

}  // namespace hororing
