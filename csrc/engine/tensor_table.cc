#include "engine/tensor_table.h"

#include <utility>

namespace hororing {

Status During(const TensorEntry& entry, const Status& status) {
  return Status(status.code(),
                std::string(Name(entry.request.kind)) + " '" + entry.request.name + "' (" +
                    entry.stage + "): " + status.message(),
                status.rank());
}

Status TensorTable::Add(std::unique_ptr<TensorEntry> entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.ok()) return closed_;
  const Request& request = entry->request;
  const auto [place, added] = entries_.try_emplace(request.name);
  if (!added) {
    return Status(Code::kDuplicateName,
                  std::string(Name(request.kind)) + " '" + request.name +
                      "' (SUBMIT): a request of that name (" + Name(place->second->request.kind) +
                      ") is still in flight on this rank; wait for it, or use another name");
  }
  submitted_.push_back(entry.get());
  place->second = std::move(entry);
  return Status::Ok();
}

std::vector<TensorEntry*> TensorTable::TakeSubmitted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(submitted_, {});
}

TensorEntry* TensorTable::Find(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = entries_.find(name);
  return entry == entries_.end() ? nullptr : entry->second.get();
}

std::unique_ptr<TensorEntry> TensorTable::Remove(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = entries_.find(name);
  if (entry == entries_.end()) return nullptr;
  std::unique_ptr<TensorEntry> removed = std::move(entry->second);
  entries_.erase(entry);
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
