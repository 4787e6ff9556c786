#include "tensorflow/in_flight.h"

#include <map>
#include <mutex>
#include <utility>

#include "capi/hororing.h"

namespace hororing::tensorflow {
namespace {

struct Table {
  std::mutex mutex;
  std::map<int64_t, InFlight> by_handle;  // guarded by mutex
  std::map<std::string, int64_t> by_key;  // guarded by mutex
};

// Never destroyed: the engine may outlive this library's static objects at the end of the process.
Table& table() {
  static Table& only = *new Table;
  return only;
}

}  // namespace

void Keep(int64_t handle, InFlight request) {
  InFlight forgotten;  // freed outside of the lock
  const std::lock_guard<std::mutex> lock(table().mutex);
  const auto [known, is_new] = table().by_key.try_emplace(request.key, handle);
  if (!is_new) {
    const auto old = table().by_handle.find(known->second);
    if (old != table().by_handle.end() && hr_poll(known->second) != 0) {
      hr_release(known->second);
      forgotten = std::move(old->second);
      table().by_handle.erase(old);
    }
    known->second = handle;
  }
  table().by_handle.emplace(handle, std::move(request));
}

int Finish(int64_t handle, const std::function<void(const InFlight&)>& collect) {
  const int code = hr_wait(handle, -1);
  InFlight request;
  {
    const std::lock_guard<std::mutex> lock(table().mutex);
    const auto found = table().by_handle.find(handle);
    if (found == table().by_handle.end()) return code == HR_OK ? HR_INTERNAL : code;
    request = std::move(found->second);
    table().by_handle.erase(found);
    const auto known = table().by_key.find(request.key);
    if (known != table().by_key.end() && known->second == handle) table().by_key.erase(known);
  }
  if (code == HR_OK) collect(request);
  hr_release(handle);
  return code;
}

}  // namespace hororing::tensorflow
