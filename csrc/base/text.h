// Texts in UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hororing {

// Whether a byte continues a character that an earlier byte begins.
inline bool ContinuesCharacter(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}

// The longest beginning of `text` of at most `most` bytes that does not end inside a character.
inline std::string_view Shortened(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  const size_t least = most < 3 ? 0 : most - 3;  // a character has at most four bytes
  while (most > least && ContinuesCharacter(text[most])) --most;
  return text.substr(0, most);
}

// "a, b and 7 more": text(item) of the first `most` items.
template <typename Items, typename Text>
std::string Listed(const Items& items, const Text& text, size_t most = SIZE_MAX) {
  std::string listed;
  size_t count = 0;
  for (const auto& item : items) {
    if (count++ < most) listed += (count > 1 ? ", " : "") + text(item);
  }
  return count <= most ? listed : listed + " and " + std::to_string(count - most) + " more";
}

}  // namespace hororing
