// IdTable: values by ids that count upwards and are never reused.
//
// The values are in pages of consecutive ids, because ids that were agreed upon in one step are
// looked up in the same order in the next one. A page is freed with its last value.
//
// Thread-safety: that of a standard container; Find alone may run in several threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

namespace hororing {

template <typename T>
class IdTable {
 public:
  // Null if there is none. Valid until Erase.
  T* Find(uint64_t id) const {
    const uint64_t at = id / kPage - first_;  // wraps around for ids before the first page
    if (at >= pages_.size() || pages_[at] == nullptr) return nullptr;
    std::optional<T>& value = pages_[at]->values[id % kPage];
    return value ? &*value : nullptr;
  }
  // REQUIRES: Find(id) == nullptr.
  T& Add(uint64_t id, T value) {
    const uint64_t number = id / kPage;
    if (pages_.empty()) first_ = number;
    for (; number < first_; --first_) pages_.emplace_front();
    while (number - first_ >= pages_.size()) pages_.emplace_back();
    std::unique_ptr<Page>& page = pages_[number - first_];
    if (page == nullptr) page = std::make_unique<Page>();
    ++page->count;
    return page->values[id % kPage].emplace(std::move(value));
  }
  // REQUIRES: Find(id) != nullptr.
  void Erase(uint64_t id) {
    std::unique_ptr<Page>& page = pages_[id / kPage - first_];
    page->values[id % kPage].reset();
    if (--page->count > 0) return;
    page.reset();
    for (; !pages_.empty() && pages_.front() == nullptr; ++first_) pages_.pop_front();
  }

 private:
  static constexpr size_t kPage = 64;
  struct Page {
    size_t count = 0;
    std::array<std::optional<T>, kPage> values;
  };

  std::deque<std::unique_ptr<Page>> pages_;  // of the ids from first_ * kPage on; null: no values
  uint64_t first_ = 0;
};

}  // namespace hororing
