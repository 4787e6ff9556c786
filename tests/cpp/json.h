// A strict JSON reader (RFC 8259) for tests: Parse returns false for anything that a browser's
// JSON.parse would refuse, and for strings that are not UTF-8.
#pragma once

#include <cctype>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace json {

struct Value {
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  bool boolean = false;
  double number = 0;
  std::string text;  // of a string, or of a number as written
  std::vector<Value> items;
  std::map<std::string, Value> members;

  bool Has(const std::string& key) const { return members.count(key) > 0; }
  const Value& operator[](const std::string& key) const {
    static const Value null;
    const auto found = members.find(key);
    return found == members.end() ? null : found->second;
  }
};

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  bool Run(Value* value) {
    Blank();
    if (!Any(value, 0)) return false;
    Blank();
    return at_ == text_.size();
  }

 private:
  char Peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool Take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool Word(const char* word) {
    for (; *word != '\0'; ++word) {
      if (!Take(*word)) return false;
    }
    return true;
  }
  void Blank() {
    while (Peek() == ' ' || Peek() == '\n' || Peek() == '\t' || Peek() == '\r') ++at_;
  }

  bool Any(Value* value, int depth) {
    if (depth > 100) return false;
    switch (Peek()) {
      case '{': return Object(value, depth);
      case '[': return Array(value, depth);
      case '"': value->kind = Value::Kind::kString; return String(&value->text);
      case 't':
        value->kind = Value::Kind::kBool;
        value->boolean = true;
        return Word("true");
      case 'f': value->kind = Value::Kind::kBool; return Word("false");
      case 'n': return Word("null");
      default: return Number(value);
    }
  }

  bool Object(Value* value, int depth) {
    value->kind = Value::Kind::kObject;
    if (!Take('{')) return false;
    Blank();
    if (Take('}')) return true;
    do {
      Blank();
      std::string key;
      if (!String(&key)) return false;
      Blank();
      if (!Take(':')) return false;
      Blank();
      Value member;
      if (!Any(&member, depth + 1)) return false;
      if (!value->members.emplace(key, std::move(member)).second) return false;  // twice
      Blank();
    } while (Take(','));
    return Take('}');
  }

  bool Array(Value* value, int depth) {
    value->kind = Value::Kind::kArray;
    if (!Take('[')) return false;
    Blank();
    if (Take(']')) return true;
    do {
      Blank();
      value->items.emplace_back();
      if (!Any(&value->items.back(), depth + 1)) return false;
      Blank();
    } while (Take(','));
    return Take(']');
  }

  bool Digits() {
    const size_t begin = at_;
    while (std::isdigit(static_cast<unsigned char>(Peek())) != 0) ++at_;
    return at_ > begin;
  }

  bool Number(Value* value) {
    const size_t begin = at_;
    Take('-');
    if (!Take('0') && !Digits()) return false;
    if (Take('.') && !Digits()) return false;
    if (Take('e') || Take('E')) {
      if (!Take('+')) Take('-');
      if (!Digits()) return false;
    }
    value->kind = Value::Kind::kNumber;
    value->text = text_.substr(begin, at_ - begin);
    value->number = std::strtod(value->text.c_str(), nullptr);
    return true;
  }

  // Keeps \u escapes above 0x7f as they are written: tests compare them so.
  bool String(std::string* out) {
    if (!Take('"')) return false;
    while (at_ < text_.size() && Peek() != '"') {
      const unsigned char c = static_cast<unsigned char>(text_[at_]);
      if (c < 0x20) return false;
      if (c == '\\') {
        ++at_;
        if (!Escape(out)) return false;
      } else if (c < 0x80) {
        *out += text_[at_++];
      } else if (!Multibyte(out)) {
        return false;
      }
    }
    return Take('"');
  }

  bool Escape(std::string* out) {
    static const std::string from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
    const size_t simple = at_ < text_.size() ? from.find(text_[at_]) : std::string::npos;
    if (simple != std::string::npos) {
      *out += to[simple];
      ++at_;
      return true;
    }
    if (!Take('u') || at_ + 4 > text_.size()) return false;
    unsigned code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = text_[at_++];
      if (std::isxdigit(static_cast<unsigned char>(c)) == 0) return false;
      code = code * 16 + static_cast<unsigned>(std::strtol(std::string(1, c).c_str(), nullptr, 16));
    }
    if (code < 0x80) {
      *out += static_cast<char>(code);
    } else {
      *out += "\\u" + text_.substr(at_ - 4, 4);
    }
    return true;
  }

  bool Multibyte(std::string* out) {
    const unsigned lead = static_cast<unsigned char>(text_[at_]);
    const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || at_ + length > text_.size()) return false;
    unsigned code = lead & (0x7Fu >> length);
    for (size_t i = 1; i < length; ++i) {
      const unsigned next = static_cast<unsigned char>(text_[at_ + i]);
      if ((next & 0xC0u) != 0x80u) return false;
      code = code << 6 | (next & 0x3Fu);
    }
    static const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < least[length] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return false;
    out->append(text_, at_, length);
    at_ += length;
    return true;
  }

  const std::string& text_;
  size_t at_ = 0;
};

inline bool Parse(const std::string& text, Value* value) { return Parser(text).Run(value); }

}  // namespace json
