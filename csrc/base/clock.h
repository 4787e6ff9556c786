// The one clock: CLOCK_MONOTONIC, which all processes of a host share, in nanoseconds.
// Code that must be testable without waiting takes time as an argument instead.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace hororing {

using TimeNs = int64_t;
constexpr TimeNs kForever = std::numeric_limits<TimeNs>::max();
constexpr TimeNs kMicrosecond = 1000;
constexpr TimeNs kMillisecond = 1000 * 1000;
constexpr TimeNs kSecond = 1000 * 1000 * 1000;

TimeNs NowNs();
TimeNs CoarseNowNs();  // the same clock, some milliseconds late, but cheaper

// Seconds as the user gave them; zero or less means "never".
inline TimeNs SecondsToNs(double seconds) {
  return seconds <= 0 ? kForever : static_cast<TimeNs>(seconds * 1e9);
}

// "5 s", "200 ms".
std::string Seconds(TimeNs span);

// now + span without overflowing past kForever.
inline TimeNs After(TimeNs now, TimeNs span) {
  return span >= kForever - now ? kForever : now + span;
}

}  // namespace hororing
