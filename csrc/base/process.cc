#include "base/process.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hororing {
namespace {

constexpr int64_t kUnknownStart = -1;  // no file descriptor was free, for example

// The start time of a process according to the kernel, in clock ticks since boot; 0 if it has ended
// or is a zombie, kUnknownStart if unknown. Field 22 of /proc/<pid>/stat, see proc(5). The name in
// field 2 may contain anything, so parsing starts after its closing bracket.
int64_t StartTime(int pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return errno == ENOENT || errno == ESRCH ? 0 : kUnknownStart;
  const size_t bytes = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[bytes] = '\0';
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || std::strlen(at) < 4) return 0;
  const char state = at[2];  // field 3
  for (int field = 2; field < 22 && at != nullptr; ++field) at = std::strchr(at + 1, ' ');
  if (state == 'Z' || state == 'X' || at == nullptr) return 0;
  return std::strtoll(at, nullptr, 10);
}

}  // namespace

ProcessIdentity ThisProcess() { return {getpid(), StartTime(getpid())}; }

bool IsGone(const ProcessIdentity& process) {
  if (process.pid == 0) return false;
  if (kill(process.pid, 0) != 0 && errno == ESRCH) return true;
  const int64_t began = StartTime(process.pid), known = process.start_time;
  return began != known && began != kUnknownStart && known != kUnknownStart;
}

}  // namespace hororing
