// IdTable: values by ids that count upwards and are never reused.
//
// The values are in pages of consecutive ids, because ids that were agreed upon in one step are
// looked up in the same order in the next. A page is freed with its last value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

namespace hororing {

template <typename T>
class IdTable {
 public:
  // Null if there is none. Valid until Erase.
  T* Find(uint64_t id) const {
    Page* page = PageOf(id / kPage);
    if (page == nullptr) return nullptr;
    std::optional<T>& value = page->values[id % kPage];
    return value ? &*value : nullptr;
  }
  // REQUIRES: Find(id) == nullptr.
  T& Add(uint64_t id, T value) {
    std::unique_ptr<Page>& page = pages_[id / kPage];
    if (page == nullptr) page = std::make_unique<Page>();
    ++page->count;
    return page->values[id % kPage].emplace(std::move(value));
  }
  // REQUIRES: Find(id) != nullptr.
  void Erase(uint64_t id) {
    Page* page = PageOf(id / kPage);
    page->values[id % kPage].reset();
    if (--page->count > 0) return;
    latest_ = nullptr;
    pages_.erase(id / kPage);
  }

 private:
  static constexpr size_t kPage = 64;
  struct Page {
    size_t count = 0;
    std::array<std::optional<T>, kPage> values;
  };
  // Null if none of its ids has a value.
  Page* PageOf(uint64_t number) const {
    if (latest_ != nullptr && number == latest_number_) return latest_;
    const auto found = pages_.find(number);
    if (found == pages_.end()) return nullptr;
    latest_number_ = number;
    return latest_ = found->second.get();
  }

  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;  // by id / kPage
  mutable Page* latest_ = nullptr;                             // looked up last
  mutable uint64_t latest_number_ = 0;
};

}  // namespace hororing
