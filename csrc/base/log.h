// Log: a bounded queue of messages from the core to their printer (the Python package forwards them
// to the `logging` module). The engine's thread never runs Python, so it cannot log there itself.
//
// One queue per process: messages must also be delivered without an engine. Thread-safe.
#pragma once

#include <string>

#include "base/clock.h"

namespace hororing {

// The numbers of Python's logging levels.
enum class LogLevel : int { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };

struct LogRecord {
  LogLevel level = LogLevel::kInfo;
  double time_s = 0;  // since the epoch
  std::string text;
};

void SetLogLevel(LogLevel minimum);
// Drops records below the level; if kMaxRecords wait, the oldest, which the next taken one counts.
void Log(LogLevel level, std::string text);

enum class LogTake { kRecord, kNothing, kClosed };
// Waits for a record until `timeout_ns` has passed.
LogTake TakeLog(TimeNs timeout_ns, LogRecord* record);
// Ends every wait of TakeLog, now and until OpenLog.
void CloseLog();
void OpenLog();

}  // namespace hororing
