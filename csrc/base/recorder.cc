#include "base/recorder.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace hororing {
namespace {

constexpr size_t kEvents = 1024, kName = 49, kMaxText = 3500;
constexpr size_t kTotals = static_cast<size_t>(Total::kEnd);

// hororing/_engine/recorder.py reads this layout.
struct Entry {
  std::atomic<int64_t> time_ns;  // 0: it is being written
  int32_t process_set;
  Event event;
  uint8_t collective;
  uint8_t length;  // of the name; a longer one than kName is cut at the front
  char name[kName];
};
struct File {
  char of_python[1024];
  std::atomic<uint64_t> events;
  std::atomic<uint32_t> stacks;  // how often the main thread has written its stack
  std::atomic<int64_t> totals[kTotals];
  char more_of_python[1008 - sizeof(totals)];
  Entry ring[kEvents];
};
static_assert(sizeof(Entry) == 64 && sizeof(File) == 2048 + kEvents * 64);

std::atomic<File*> opened{nullptr};
std::atomic<int64_t> totals_of_nobody[kTotals];  // before it is opened
std::atomic<std::atomic<int64_t>*> totals{totals_of_nobody};
// Written before `opened`, constant afterwards.
int file = -1, signal_number = 0;
struct sigaction writes_stack;

// Runs in the main thread, between any two instructions.
void OnStackSignal(int number) {
  const int error = errno;
  if (syscall(SYS_gettid) != getpid()) {  // a signal from another process may reach any thread
    syscall(SYS_tgkill, getpid(), getpid(), number);
    errno = error;
    return;
  }
  File* const to = opened.load();
  // The handler appends to the file.
  if (ftruncate(file, sizeof(File)) == 0) writes_stack.sa_handler(number);
  ++to->stacks;
  syscall(SYS_futex, &to->stacks, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  errno = error;
}

std::string StackOfMainThread(File* from, TimeNs patience) {
  struct sigaction now;
  if (signal_number == 0 || sigaction(signal_number, nullptr, &now) != 0 ||
      now.sa_handler != OnStackSignal) {
    return "its stack is not known (HORORING_STACK_SIGNAL is 0, or the script uses that signal)";
  }
  const uint32_t before = from->stacks.load();
  const TimeNs deadline = After(NowNs(), patience);
  syscall(SYS_tgkill, getpid(), getpid(), signal_number);
  while (from->stacks.load() == before) {
    const TimeNs left = deadline - NowNs();
    if (left <= 0) return "its main thread takes no signal";
    const timespec most{left / kSecond, left % kSecond};
    syscall(SYS_futex, &from->stacks, FUTEX_WAIT, before, &most, nullptr, 0);
  }
  std::string text(kMaxText, '\0');
  const ssize_t bytes = pread(file, text.data(), text.size(), sizeof(File));
  text.resize(static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  if (text.empty()) return "its main thread runs no Python";
  if (bytes == static_cast<ssize_t>(kMaxText)) text.erase(text.rfind('\n') + 1).append("  ...");
  return "its main thread:\n" + text.substr(text.find('\n') + 1);  // without a title
}

}  // namespace

Status OpenRecorder(int to, int stack_signal) {
  void* const mapped = mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED, to, 0);
  if (mapped == MAP_FAILED) {
    return Status(Code::kInvalidArgument, std::string("no flight recorder: ") + strerror(errno));
  }
  file = to;
  opened = static_cast<File*>(mapped);
  totals = opened.load()->totals;
  struct sigaction ours;
  if (stack_signal == 0 || sigaction(stack_signal, nullptr, &writes_stack) != 0) return {};
  ours = writes_stack;
  ours.sa_handler = OnStackSignal;
  if (sigaction(stack_signal, &ours, nullptr) == 0) signal_number = stack_signal;
  return {};
}

void Record(Event event, TimeNs now, Collective collective, int32_t process_set,
            std::string_view name) {
  File* const to = opened.load(std::memory_order_relaxed);
  if (to == nullptr) return;
  Entry& entry = to->ring[to->events.fetch_add(1, std::memory_order_relaxed) % kEvents];
  entry.time_ns.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  entry.process_set = process_set;
  entry.event = event;
  entry.collective = static_cast<uint8_t>(collective);
  entry.length = static_cast<uint8_t>(std::min<size_t>(name.size(), 255));
  const size_t kept = std::min(name.size(), kName);
  std::memcpy(entry.name, name.data() + name.size() - kept, kept);
  entry.time_ns.store(now, std::memory_order_release);
}

void Add(Total total, int64_t amount) {
  totals.load(std::memory_order_relaxed)[static_cast<size_t>(total)].fetch_add(
      amount, std::memory_order_relaxed);
}

void Set(Total total, int64_t value) {
  totals.load(std::memory_order_relaxed)[static_cast<size_t>(total)].store(
      value, std::memory_order_relaxed);
}

std::string DescribeActivity(TimeNs patience) {
  const std::string pid = "pid " + std::to_string(getpid());
  File* const from = opened.load();
  if (from == nullptr) return pid;
  std::string last = "no event yet; ";
  if (const uint64_t events = from->events.load(); events > 0) {
    static const char* const kNames[] = {"", "submitted", "agreed", "done", "failed"};
    const Entry& entry = from->ring[(events - 1) % kEvents];
    const size_t kept = std::min<size_t>(entry.length, kName);
    last = std::string("its last event: ") + kNames[static_cast<size_t>(entry.event)] + " " +
           Name(static_cast<Collective>(entry.collective)) + " '" +
           (entry.length > kept ? "..." : "") + std::string(entry.name, kept) + "'" +
           (entry.process_set != 0 ? " of process set " + std::to_string(entry.process_set) : "") +
           ", " + Seconds(std::max<TimeNs>(NowNs() - entry.time_ns.load(), 0)) + " ago; ";
  }
  return pid + "; " + last + StackOfMainThread(from, patience);
}

}  // namespace hororing
