// Processes of this machine, and whether one is still the same process.
#pragma once

#include <cstdint>

namespace hororing {

struct ProcessIdentity {
  int pid = 0;             // 0: none
  int64_t start_time = 0;  // in clock ticks since boot: guards against pid reuse
};

ProcessIdentity ThisProcess();
// Also false if that cannot be determined.
bool IsGone(const ProcessIdentity& process);

}  // namespace hororing
