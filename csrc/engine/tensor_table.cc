#include "engine/tensor_table.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace hororing {
namespace {

// Whether the entry's request is an allreduce of this tensor, wherever it lies.
bool IsAs(const TensorEntry& entry, const OneTensor& tensor) {
  const Request& request = entry.request;
  if (request.kind != Collective::kAllreduce || request.tensors.size() != 1) return false;
  const Request::Tensor& known = request.tensors[0];
  return !known.on_device && request.op == tensor.op && request.prescale == tensor.prescale &&
         request.postscale == tensor.postscale && known.dtype == tensor.dtype &&
         std::equal(known.shape.begin(), known.shape.end(), tensor.shape,
                    tensor.shape + tensor.dimensions) &&
         ((tensor.input != nullptr && tensor.output != nullptr) || entry.views[0].elements() == 0);
}

}  // namespace

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
  Named& named = named_[Key(entry->request)];
  if (const TensorEntry* other = InFlight(named)) {
    return During(*entry,
                  Status(Code::kDuplicateName,
                         std::string("a request of that name (") + Name(other->request.kind) +
                             ") is still in flight on this rank; wait for it, or use "
                             "another name"));
  }
  entry->stage = "NEGOTIATE";
  joining_ = entry->request.kind == Collective::kJoin;
  if (submitted_.empty()) first_submitted_ns_ = entry->submitted_ns;
  submitted_.push_back(entry.get());
  if (named.entry != nullptr) Going(*named.entry);
  named.entry = std::move(entry);
  return Status::Ok();
}

TensorEntry* TensorTable::FindAgain(const OneTensor& tensor) {
  if (next_ >= order_.size()) next_ = 0;
  if (!order_.empty()) {
    const Request& request = order_[next_]->request;
    if (request.process_set == tensor.process_set && request.name == tensor.name) {
      return order_[next_++];
    }
  }
  SetKey(tensor.process_set, tensor.name, &key_);
  const auto found = named_.find(key_);
  TensorEntry* const entry = found == named_.end() ? nullptr : found->second.entry.get();
  if (entry == nullptr) return nullptr;
  if (!InOrder(*entry)) {
    entry->place = order_.size();
    order_.push_back(entry);
  }
  next_ = entry->place + 1;
  return entry;
}

bool TensorTable::InOrder(const TensorEntry& entry) const {
  return entry.place < order_.size() && order_[entry.place] == &entry;
}

// Rare, of those that are made again.
void TensorTable::Going(const TensorEntry& entry) {
  if (InOrder(entry)) order_.clear();
  if (order_.empty()) next_ = 0;
}

size_t TensorTable::AddAgain(const OneTensor* tensors, size_t count, int64_t* handles, TimeNs now,
                             bool* ring) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.ok() || joining_) return 0;
  if (submitted_.empty()) first_submitted_ns_ = now != 0 ? now : NowNs();
  size_t added = 0;
  for (; added < count; ++added) {
    const OneTensor& tensor = tensors[added];
    TensorEntry* const found = FindAgain(tensor);
    if (found == nullptr || !found->resting || !IsAs(*found, tensor)) break;
    TensorEntry& entry = *found;
    entry.resting = false;
    entry.views[0].input = tensor.input;
    entry.views[0].output = tensor.output;
    entry.handle = handles[added] = entry.next.Use();
    entry.submitted_ns = now;
    entry.reported_ns = 0;
    entry.stage = "NEGOTIATE";
    submitted_.push_back(&entry);
  }
  if (*ring && added > 0) *ring = !std::exchange(rung_, true);
  return added;
}

TensorTable::Submitted TensorTable::submitted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {submitted_.size(), first_submitted_ns_};
}

void TensorTable::TakeSubmitted(std::vector<TensorEntry*>* submitted) {
  submitted->clear();
  std::lock_guard<std::mutex> lock(mutex_);
  submitted->swap(submitted_);
  rung_ = false;
}

TensorEntry* TensorTable::Find(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = named_.find(key);
  return found == named_.end() ? nullptr : InFlight(found->second);
}

std::unique_ptr<TensorEntry> TensorTable::Remove(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = named_.find(key);
  if (found == named_.end() || InFlight(found->second) == nullptr) return nullptr;
  std::unique_ptr<TensorEntry> removed = std::move(found->second.entry);
  Going(*removed);
  if (found->second.id == 0) named_.erase(found);
  if (removed->request.kind == Collective::kJoin) joining_ = false;
  return removed;
}

void TensorTable::Rest(const std::vector<TensorEntry*>& entries, HandleTable* handles) {
  std::lock_guard<std::mutex> lock(mutex_);
  next_handles_.resize(entries.size());
  handles->Create(next_handles_.data(), entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    entries[i]->resting = true;
    entries[i]->next = SpareHandle(handles, next_handles_[i]);
  }
}

uint64_t TensorTable::IdOf(const Request& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t id = named_.at(Key(request)).id;
  return id != 0 && known_.Find(id)->request == request ? id : 0;
}

void TensorTable::Define(uint64_t id, const Request& request, const std::vector<int64_t>& rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  Named& named = named_[Key(request)];
  if (named.id != 0) known_.Erase(named.id);
  if (named.entry != nullptr && named.entry->resting) {  // this rank has joined
    Going(*named.entry);
    named.entry.reset();
  }
  named.id = id;
  known_.Add(id, {request, rows});
}

void TensorTable::Forget(uint64_t id) {
  const KnownRequest* const known = known_.Find(id);
  if (known == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = named_.find(Key(known->request));
  known_.Erase(id);
  found->second.id = 0;
  if (TensorEntry* const entry = InFlight(found->second)) {
    entry->cache_id = 0;
  } else {
    if (found->second.entry != nullptr) Going(*found->second.entry);
    named_.erase(found);
  }
}

std::vector<std::unique_ptr<TensorEntry>> TensorTable::RemoveSet(int32_t process_set) {
  std::lock_guard<std::mutex> lock(mutex_);
  order_.clear();
  std::vector<std::unique_ptr<TensorEntry>> removed;
  for (auto each = named_.begin(); each != named_.end();) {
    Named& named = each->second;
    const Request& request = named.entry ? named.entry->request : known_.Find(named.id)->request;
    if (request.process_set != process_set) {
      ++each;
      continue;
    }
    if (named.id != 0) known_.Erase(named.id);
    submitted_.erase(std::remove(submitted_.begin(), submitted_.end(), named.entry.get()),
                     submitted_.end());
    if (InFlight(named) != nullptr) removed.push_back(std::move(named.entry));
    each = named_.erase(each);
  }
  return removed;
}

std::string TensorTable::Titles(std::initializer_list<std::string_view> stages) {
  constexpr size_t kShown = 3;
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  size_t count = 0;
  for (const std::string_view stage : stages) {
    for (const auto& [name, named] : named_) {
      const TensorEntry* const entry = InFlight(named);
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
  order_.clear();
  std::vector<std::unique_ptr<TensorEntry>> left;
  for (auto& [name, named] : named_) {
    if (InFlight(named) != nullptr) left.push_back(std::move(named.entry));
  }
  named_.clear();
  return left;
}

}  // namespace hororing
