#include "engine/tensor_table.h"

#include <algorithm>
#include <utility>

namespace hororing {

Status During(const TensorEntry& entry, const Status& status) {
  return Status(status.code(),
                entry.request.Title() + " (" + entry.stage + "): " + status.message(),
                status.rank());
}

Status TensorTable::Add(std::unique_ptr<TensorEntry> entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  entry->stage = "SUBMIT";
  if (!closed_.ok()) return During(*entry, closed_);
  // What takes part for this rank is a stand-in, and must not meet a request of the same name.
  if (joining_) {
    return During(*entry, Status(Code::kInvalidArgument,
                                 "this rank has called join; no other call is possible, in any "
                                 "thread, until join has returned"));
  }
  const auto [place, added] = entries_.try_emplace(Key(entry->request));
  if (!added) {
    return During(
        *entry, Status(Code::kDuplicateName,
                       std::string("a request of that name (") + Name(place->second->request.kind) +
                           ") is still in flight on this rank; wait for it, or use "
                           "another name"));
  }
  entry->stage = "NEGOTIATE";
  joining_ = entry->request.kind == Collective::kJoin;
  submitted_.push_back(entry.get());
  place->second = std::move(entry);
  return Status::Ok();
}

std::vector<TensorEntry*> TensorTable::TakeSubmitted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(submitted_, {});
}

TensorEntry* TensorTable::Find(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = entries_.find(key);
  return entry == entries_.end() ? nullptr : entry->second.get();
}

std::unique_ptr<TensorEntry> TensorTable::Remove(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) return nullptr;
  std::unique_ptr<TensorEntry> removed = std::move(entry->second);
  entries_.erase(entry);
  if (removed->request.kind == Collective::kJoin) joining_ = false;
  return removed;
}

std::vector<std::unique_ptr<TensorEntry>> TensorTable::RemoveSet(int32_t process_set) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::unique_ptr<TensorEntry>> removed;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    if (entry->second->request.process_set == process_set) {
      submitted_.erase(std::remove(submitted_.begin(), submitted_.end(), entry->second.get()),
                       submitted_.end());
      removed.push_back(std::move(entry->second));
      entry = entries_.erase(entry);
    } else {
      ++entry;
    }
  }
  return removed;
}

std::vector<std::unique_ptr<TensorEntry>> TensorTable::Close(const Status& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = why;
  submitted_.clear();
  std::vector<std::unique_ptr<TensorEntry>> left;
  for (auto& [name, entry] : entries_) left.push_back(std::move(entry));
  entries_.clear();
  return left;
}

bool TensorTable::empty() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return entries_.empty();
}

}  // namespace hororing
