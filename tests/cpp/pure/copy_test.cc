// Copies between any positions of source and target in their pages.
#include "kernels/copy.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"

namespace hororing_test {
namespace {

using namespace hororing;

constexpr size_t kPage = 4096, kGuard = 128;

// Copies from the beginning of a page to the offset `into_page` of another. Returns whether these
// bytes, and no others, have arrived.
bool Arrives(size_t bytes, size_t into_page) {
  std::vector<uint8_t> memory(2 * kPage + 2 * (bytes + kPage) + 2 * kGuard, 0xEE);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.data());
  uint8_t* const from = memory.data() + (kPage - begin % kPage) % kPage;
  uint8_t* const to = from + (bytes + 2 * kPage - 1) / kPage * kPage + into_page;
  for (size_t i = 0; i < bytes; ++i) from[i] = static_cast<uint8_t>(i * 131 + i / 251);
  CopyBytes(to, from, bytes);
  bool same = true;
  for (size_t i = 0; i < bytes; ++i)
    same = same && to[i] == static_cast<uint8_t>(i * 131 + i / 251);
  for (size_t i = 0; i < kGuard; ++i) same = same && to[bytes + i] == 0xEE;
  return same && (into_page == 0 || to[-1] == 0xEE);
}

TEST(all_bytes_arrive_and_none_besides) {
  for (const size_t into_page : {0, 1, 4, 16, 31, 32, 63, 64, 65, 2048, 4080, 4095}) {
    for (const size_t bytes : {0, 1, 63, 64, 4095, 4096, 4097, 4160, 10007, 1 << 17}) {
      CHECK(Arrives(bytes, into_page));
    }
  }
}

TEST(nothing_may_be_copied_from_nowhere) { CopyBytes(nullptr, nullptr, 0); }

}  // namespace
}  // namespace hororing_test
