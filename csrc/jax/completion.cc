#include "jax/completion.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

#include "base/signals.h"
#include "capi/hororing.h"

namespace hororing::jax {
namespace {

constexpr std::chrono::seconds kIdle{1};  // how long a thread waits for more before it ends
constexpr double kCheckInterval = 0.5;    // seconds between checks while nothing completes

struct InFlight {
  int64_t handle;
  const XlaApi* api;
  XlaFuture* future;
  TakeResults take;
};

struct Table {
  std::mutex mutex;
  std::condition_variable changed;
  std::list<InFlight> flying;  // guarded by mutex, like all below
  bool watched = false;        // a thread waits for the next completion
  int idle = 0;                // threads that wait for that role
  int threads = 0;
  bool ending = false;
};

// Never destroyed: threads may outlive this library's static objects at the end of the process.
Table& table() {
  static Table& only = *new Table;
  return only;
}

void Complete(InFlight request) {
  const int code = hr_wait(request.handle, 0);
  XlaError* error = code == HR_OK ? request.take(request.handle) : CoreError(request.api, code);
  hr_release(request.handle);
  XlaFutureCall call{{sizeof(call), nullptr}, request.future, error};
  (error == nullptr ? request.api->future_set_available : request.api->future_set_error)(&call);
}

// REQUIRES: the mutex.
std::optional<InFlight> TakeComplete() {
  auto& flying = table().flying;
  for (auto each = flying.begin(); each != flying.end(); ++each) {
    if (hr_poll(each->handle) == 0) continue;
    std::optional<InFlight> taken(std::move(*each));
    flying.erase(each);
    return taken;
  }
  return std::nullopt;
}

// Blocks until a request is complete, and takes it; nullopt if none is left.
std::optional<InFlight> WatchForOne(std::unique_lock<std::mutex>* lock) {
  // The counter is read before the check, so that no completion is missed between the two.
  for (int64_t seen = hr_next_completion(-1, 0); !table().flying.empty();) {
    if (auto taken = TakeComplete()) return taken;
    lock->unlock();
    seen = hr_next_completion(seen, kCheckInterval);
    lock->lock();
  }
  return std::nullopt;
}

void Work();

// REQUIRES: the mutex. Lets another thread watch, if anything is in flight.
void LetAnotherWatch() {
  Table& all = table();
  if (all.watched || all.flying.empty()) return;
  if (all.idle > 0) return all.changed.notify_one();
  ++all.threads;
  const SignalsBlocked while_it_is_made;
  std::thread(Work).detach();
}

void Work() {
  pthread_setname_np(pthread_self(), "hororing-jax");
  Table& all = table();
  std::unique_lock<std::mutex> lock(all.mutex);
  for (;;) {
    ++all.idle;
    const bool found = all.changed.wait_for(
        lock, kIdle, [&] { return all.flying.empty() ? all.ending : !all.watched; });
    --all.idle;
    if (!found || all.flying.empty()) break;
    all.watched = true;
    std::optional<InFlight> taken = WatchForOne(&lock);
    all.watched = false;
    LetAnotherWatch();
    if (!taken) continue;
    lock.unlock();
    Complete(std::move(*taken));
    lock.lock();
  }
  --all.threads;
  all.changed.notify_all();
}

// The exceptions of hororing/errors.py, by hr_code. Python reads code and rank from the text's end.
// clang-format off
constexpr const char* kExceptions[] = {
    "", "ValueError", "MismatchError", "DuplicateNameError", "NotInitializedError",
    "ShutDownError", "PeerLostError", "StalledError", "TransportError"};
// clang-format on

}  // namespace

XlaError* CompleteLater(XlaCall* call, int64_t handle, TakeResults take) {
  XlaFutureCall create{{sizeof(XlaHead) + sizeof(XlaFuture*), nullptr}, nullptr, nullptr};
  if (XlaError* error = call->api->future_create(&create)) {
    hr_wait(handle, -1);  // its memory is XLA's
    hr_release(handle);
    return error;
  }
  call->future = create.future;
  InFlight request{handle, call->api, create.future, std::move(take)};
  Table& all = table();
  std::unique_lock<std::mutex> lock(all.mutex);
  // If it is not complete, its completion counts from now on; see hr_next_completion. The counter
  // cannot be missed: whoever watches checks all requests, and needs the lock for that.
  if (hr_poll(handle) == 0) {
    all.flying.push_back(std::move(request));
    LetAnotherWatch();
  } else {
    lock.unlock();
    Complete(std::move(request));
  }
  return nullptr;
}

bool NothingInFlight() {
  const std::lock_guard<std::mutex> lock(table().mutex);
  return table().flying.empty();
}

XlaError* MakeError(const XlaApi* api, int code, const std::string& text, int rank) {
  const bool known = code > 0 && code < HR_INTERNAL;
  const std::string whole = std::string(known ? kExceptions[code] : "HororingInternalError") +
                            ": " + text + " [hororing " + std::to_string(code) + " " +
                            std::to_string(rank) + "]";
  const bool wrong = code <= HR_NOT_INITIALIZED;  // an error of the script, not of the job
  XlaErrorCreate call{
      {sizeof(call), nullptr}, whole.c_str(), wrong ? kFailedPrecondition : kAborted};
  return api->error_create(&call);
}

XlaError* CoreError(const XlaApi* api, int code) {
  return MakeError(api, code, hr_last_error(), hr_last_error_rank());
}

void EndThreads() {
  Table& all = table();
  std::unique_lock<std::mutex> lock(all.mutex);
  all.ending = true;
  all.changed.notify_all();
  all.changed.wait_for(lock, kIdle, [&] { return all.threads == 0; });
  all.ending = false;
}

}  // namespace hororing::jax
