// What the files of the C interface share: the process's engine, and the thread's last error.
#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "base/status.h"
#include "engine/engine.h"

#define HR_EXPORT extern "C" __attribute__((visibility("default")))

namespace hororing {

// Nothing of the parent's state may be touched in a forked child: locks may be held by nobody.
bool InForkedChild();
// Null before hr_init and after hr_shutdown.
std::shared_ptr<Engine> CurrentEngine();
Status NotInitialized();
// For hr_last_error; returns the code.
int Remember(const Status& status);

inline std::string Text(const char* text) { return text != nullptr ? text : ""; }

// Milliseconds and microseconds of the configuration; zero means none at all.
inline TimeNs Scaled(double value, TimeNs unit) {
  return value <= 0 ? 0 : static_cast<TimeNs>(value * static_cast<double>(unit));
}

}  // namespace hororing
