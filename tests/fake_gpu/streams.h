// Streams of the fake: each is a thread that executes its work in order, and late.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "state.h"

namespace fake_gpu {

class Stream {
 public:
  Stream() : thread_([this] { Work(); }) {}
  ~Stream() {
    Drain();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      end_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void Put(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  void Drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty(); });
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return end_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> work = queue_.front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(settings.delay_us.load()));
      work();
      lock.lock();
      queue_.pop_front();
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  // running work stays until it is done
  bool end_ = false;
  std::thread thread_;
};

// Live objects by their handles.
template <typename Object>
class Registry {
 public:
  void* Add(std::shared_ptr<Object> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    void* handle = object.get();
    live_[handle] = std::move(object);
    return handle;
  }
  std::shared_ptr<Object> Find(void* handle, const char* what) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(handle);
    if (found != live_.end()) return found->second;
    Violation(std::string(what) + " that does not exist or has ended");
    return nullptr;
  }
  std::shared_ptr<Object> Remove(void* handle, const char* what) {
    std::shared_ptr<Object> object = Find(handle, what);
    std::lock_guard<std::mutex> lock(mutex_);
    live_.erase(handle);
    return object;
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Object>> live_;
};

// Never destroyed: streams work until the process ends.
Registry<Stream>& Streams();

}  // namespace fake_gpu
