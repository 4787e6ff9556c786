// Processes of this machine: is one still the one that we knew?
#pragma once

#include <cstdint>

namespace hororing {

struct ProcessIdentity {
  int pid = 0;             // 0: none that can be asked about
  int64_t start_time = 0;  // in clock ticks since boot: guards against pid reuse
};

ProcessIdentity ThisProcess();
// False also where nobody can tell.
bool IsGone(const ProcessIdentity& process);

}  // namespace hororing
