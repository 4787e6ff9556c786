#include "engine/tensor_table.h"

#include <algorithm>
#include <utility>

namespace hororing {
namespace {

// Ids of one table are below this.
constexpr int kIdBits = 40;
std::atomic<uint64_t> tables{0};

}  // namespace

Status WithStage(const TensorEntry& entry, const Status& status) {
  std::string stage = std::string(" (") + entry.stage + ")";
  if (stage == " (SUBMIT)" || stage == " (NEGOTIATE)") stage.clear();  // only those of a batch
  return Status(status.code(), entry.request.Title() + stage + ": " + status.message(),
                status.rank());
}

TensorTable::TensorTable(HandleTable* handles)
    : handles_(handles), first_id_(++tables << kIdBits) {}

// The entry that this cache id can start; null: none.
TensorEntry* TensorTable::Inactive(uint64_t id) {
  const RequestRecord* const record = FindRecord(id);
  const bool there = record != nullptr && record->entry != nullptr && !record->entry->active;
  return there ? record->entry.get() : nullptr;
}

void TensorTable::Activate(TensorEntry* entry) {
  entry->active = true;
  entry->submitted_ns = submitted_.empty() ? NowNs() : submitted_[0]->submitted_ns;
  entry->reported_ns = 0;
  entry->stage = "NEGOTIATE";
  submitted_.push_back(entry);
}

Status TensorTable::Submit(std::unique_ptr<TensorEntry>* entry, int64_t* handle, uint64_t* id) {
  std::lock_guard<std::mutex> lock(mutex_);
  TensorEntry& given = **entry;
  given.stage = "SUBMIT";
  if (!closed_.ok()) return WithStage(given, closed_);
  // A neutral entry takes part for this rank. A request of the same name would collide with it.
  if (joining_) {
    return WithStage(given, Status(Code::kInvalidArgument,
                                   "this rank has called join; no other call is possible, in any "
                                   "thread, until join has returned"));
  }
  SetKey(given.request.process_set, given.request.name.c_str(), &key_);
  RequestRecord& record = records_[key_];
  if (const TensorEntry* other = Active(record)) {
    return WithStage(given,
                     Status(Code::kDuplicateName,
                            std::string("a request of that name (") + Name(other->request.kind) +
                                ") is still in flight on this rank; wait for it, or use "
                                "another name"));
  }
  joining_ = given.request.kind == Collective::kJoin;
  if (record.entry != nullptr && record.entry->request == given.request) {
    record.entry->views.swap(given.views);
    record.entry->ready.swap(given.ready);
    record.entry->request.weight = given.request.weight;
    *id = first_id_ + record.id;
  } else {
    record.entry = std::move(*entry);
    *id = 0;
  }
  handles_->Create(handle, 1);
  record.entry->handle = *handle;
  Activate(record.entry.get());
  return Status::Ok();
}

size_t TensorTable::Start(const Restart* restarts, const uintptr_t* addresses, size_t count,
                          int64_t* handles) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.ok() || joining_) return 0;
  size_t started = 0;
  for (; started < count; ++started) {
    const Restart& restart = restarts[started];
    // Id 0, of a request that was not started, wraps around to no entry.
    TensorEntry* const entry = Inactive(restart.id - first_id_);
    if (entry == nullptr || entry->request.weight.has_value() != restart.weight.has_value()) break;
    TensorView& view = entry->views[0];
    if (addresses[started] == 0 && view.elements() > 0) break;
    view.input = view.output = reinterpret_cast<void*>(addresses[started]);
    entry->request.weight = restart.weight;
    Activate(entry);
  }
  handles_->Create(handles, started);
  for (size_t i = 0; i < started; ++i) {
    submitted_[submitted_.size() - started + i]->handle = handles[i];
  }
  return started;
}

TensorTable::Submitted TensorTable::submitted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {submitted_.size(), submitted_.empty() ? 0 : submitted_[0]->submitted_ns};
}

void TensorTable::TakeSubmitted(std::vector<TensorEntry*>* submitted) {
  submitted->clear();
  std::lock_guard<std::mutex> lock(mutex_);
  submitted->swap(submitted_);
}

TensorEntry* TensorTable::Find(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = records_.find(key);
  return found == records_.end() ? nullptr : Active(found->second);
}

std::unique_ptr<TensorEntry> TensorTable::Remove(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = records_.find(key);
  if (found == records_.end() || Active(found->second) == nullptr) return nullptr;
  std::unique_ptr<TensorEntry> removed = std::move(found->second.entry);
  if (found->second.id == 0) records_.erase(found);
  if (removed->request.kind == Collective::kJoin) joining_ = false;
  return removed;
}

void TensorTable::Deactivate(const std::vector<TensorEntry*>& entries) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (TensorEntry* entry : entries) entry->active = false;
}

uint64_t TensorTable::IdOf(const Request& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  const RequestRecord& record = records_.at(Key(request));
  return record.id != 0 && record.agreed == request ? record.id : 0;
}

void TensorTable::Define(uint64_t id, const Request& request, const std::vector<int64_t>& rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  RequestRecord& record = records_[Key(request)];
  if (record.id != 0) known_.erase(record.id);
  if (Active(record) == nullptr) record.entry.reset();  // this rank has joined
  record.id = id;
  record.agreed = request;
  record.rows = rows;
  record.reported = nullptr;
  known_[id] = &record;
}

void TensorTable::Forget(uint64_t id) {
  RequestRecord* const record = FindRecord(id);
  if (record == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex_);
  known_.erase(id);
  record->id = 0;
  if (TensorEntry* const entry = Active(*record)) {
    entry->cache_id = 0;
  } else {
    records_.erase(Key(record->agreed));
  }
}

std::vector<std::unique_ptr<TensorEntry>> TensorTable::RemoveSet(int32_t process_set) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::unique_ptr<TensorEntry>> removed;
  for (auto each = records_.begin(); each != records_.end();) {
    RequestRecord& record = each->second;
    const Request& request = record.entry ? record.entry->request : record.agreed;
    if (request.process_set != process_set) {
      ++each;
      continue;
    }
    if (record.id != 0) known_.erase(record.id);
    submitted_.erase(std::remove(submitted_.begin(), submitted_.end(), record.entry.get()),
                     submitted_.end());
    if (Active(record) != nullptr) removed.push_back(std::move(record.entry));
    each = records_.erase(each);
  }
  return removed;
}

std::string TensorTable::Titles(std::initializer_list<std::string_view> stages) {
  constexpr size_t kShown = 3;
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  size_t count = 0;
  for (const std::string_view stage : stages) {
    for (const auto& [name, record] : records_) {
      const TensorEntry* const entry = Active(record);
      if (entry == nullptr || entry->stage != stage || ++count > kShown) continue;
      text += (text.empty() ? "" : ", ") + entry->request.Title();
    }
    if (count > 0) break;
  }
  return count <= kShown ? text : text + " and " + std::to_string(count - kShown) + " more";
}

std::vector<std::unique_ptr<TensorEntry>> TensorTable::Close(const Status& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = why;
  submitted_.clear();
  std::vector<std::unique_ptr<TensorEntry>> left;
  for (auto& [name, record] : records_) {
    if (Active(record) != nullptr) left.push_back(std::move(record.entry));
  }
  return left;
}

}  // namespace hororing
