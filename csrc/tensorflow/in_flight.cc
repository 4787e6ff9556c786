#include "tensorflow/in_flight.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "capi/hororing.h"

namespace hororing::tensorflow {
namespace {

struct Table {
  std::mutex mutex;
  std::map<int64_t, InFlight> by_handle;  // guarded by mutex
  std::map<std::string, int64_t> by_key;  // guarded by mutex; the latest of each
  std::set<int64_t> abandoned;            // guarded by mutex; in by_handle, too
};

// Never destroyed: the engine may outlive this library's static objects at the end of the process.
Table& table = *new Table;

// REQUIRES: the table's mutex. The caller destroys the result without the lock.
InFlight Forget(std::map<int64_t, InFlight>::iterator found) {
  const int64_t handle = found->first;
  InFlight request = std::move(found->second);
  table.by_handle.erase(found);
  table.abandoned.erase(handle);
  const auto known = table.by_key.find(request.key);
  if (known != table.by_key.end() && known->second == handle) table.by_key.erase(known);
  return request;
}

void Abandon(int64_t handle) {
  const std::lock_guard<std::mutex> lock(table.mutex);
  if (table.by_handle.count(handle) != 0) table.abandoned.insert(handle);
}

// Forgets those abandoned requests that are complete.
void Sweep() {
  std::vector<InFlight> forgotten;
  const std::lock_guard<std::mutex> lock(table.mutex);
  const std::set<int64_t> abandoned = table.abandoned;
  for (const int64_t handle : abandoned) {
    if (hr_poll(handle) == 0) continue;
    hr_release(handle);
    forgotten.push_back(Forget(table.by_handle.find(handle)));
  }
}

void FreeHandle(void* data, size_t, void*) {
  Abandon(*static_cast<const int64_t*>(data));
  Sweep();
  std::free(data);
}

}  // namespace

void Keep(int64_t handle, InFlight request) {
  {
    const std::lock_guard<std::mutex> lock(table.mutex);
    table.by_key[request.key] = handle;
    table.by_handle.emplace(handle, std::move(request));
  }
  Sweep();
}

int Finish(int64_t handle, const std::function<void(const InFlight&)>& collect) {
  const int code = hr_wait(handle, -1);
  InFlight request;
  {
    const std::lock_guard<std::mutex> lock(table.mutex);
    const auto found = table.by_handle.find(handle);
    if (found == table.by_handle.end()) return code == HR_OK ? HR_INTERNAL : code;
    request = Forget(found);
  }
  if (code == HR_OK) collect(request);
  hr_release(handle);
  return code;
}

void FinishAbandoned(const std::string& key) {
  int64_t handle = 0;
  {
    const std::lock_guard<std::mutex> lock(table.mutex);
    const auto known = table.by_key.find(key);
    if (known == table.by_key.end() || table.abandoned.count(known->second) == 0) return;
    handle = known->second;
  }
  Finish(handle, [](const InFlight&) {});
}

Tensor NewHandle() {
  // Aligned for any vector unit: TensorFlow copies other memory, and frees it at once.
  constexpr size_t kAlign = 64;
  void* const data = std::aligned_alloc(kAlign, kAlign);
  if (data == nullptr) return nullptr;
  *static_cast<int64_t*>(data) = 0;
  return Tensor(
      api.NewTensor(TfType::kInt64, nullptr, 0, data, sizeof(int64_t), FreeHandle, nullptr));
}

}  // namespace hororing::tensorflow
