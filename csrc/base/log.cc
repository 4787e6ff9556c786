#include "base/log.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace hororing {
namespace {

constexpr size_t kMaxRecords = 1024;

struct Queue {
  std::atomic<int> minimum{static_cast<int>(LogLevel::kWarning)};
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<LogRecord> records;  // GUARDED_BY(mutex)
  int64_t lost = 0;               // GUARDED_BY(mutex)
  bool closed = false;            // GUARDED_BY(mutex)
};

// Never destroyed: the engine's thread may outlive static destructors after a failed shutdown.
Queue& queue = *new Queue();

}  // namespace

void SetLogLevel(LogLevel minimum) { queue.minimum.store(static_cast<int>(minimum)); }

void Log(LogLevel level, std::string text) {
  if (static_cast<int>(level) < queue.minimum.load(std::memory_order_relaxed)) return;
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  LogRecord record{level, std::chrono::duration<double>(since_epoch).count(), std::move(text)};
  {
    std::lock_guard<std::mutex> lock(queue.mutex);
    if (queue.records.size() >= kMaxRecords) {
      queue.records.pop_front();
      ++queue.lost;
    }
    queue.records.push_back(std::move(record));
  }
  queue.changed.notify_one();
}

LogTake TakeLog(TimeNs timeout_ns, LogRecord* record) {
  std::unique_lock<std::mutex> lock(queue.mutex);
  queue.changed.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                         [&] { return queue.closed || !queue.records.empty(); });
  if (!queue.records.empty()) {
    *record = std::move(queue.records.front());
    queue.records.pop_front();
    if (queue.lost > 0) {
      record->text += " (" + std::to_string(queue.lost) + " earlier messages were dropped)";
      queue.lost = 0;
    }
    return LogTake::kRecord;
  }
  return queue.closed ? LogTake::kClosed : LogTake::kNothing;
}

void CloseLog() {
  std::lock_guard<std::mutex> lock(queue.mutex);
  queue.closed = true;
  queue.changed.notify_all();
}

void OpenLog() {
  std::lock_guard<std::mutex> lock(queue.mutex);
  queue.closed = false;
}

}  // namespace hororing
