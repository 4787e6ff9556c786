#include "negotiation/messages.h"

#include <utility>

namespace hororing {
bool Request::operator==(const Request& other) const {
  return kind == other.kind && op == other.op && root == other.root && prescale == other.prescale &&
         postscale == other.postscale && process_set == other.process_set && name == other.name &&
         tensors == other.tensors && splits == other.splits && ranks == other.ranks &&
         weight.has_value() == other.weight.has_value();
}

Decision::Decision(Kind ending, Status why, int32_t set, std::string name)
    : kind(ending), process_set(set) {
  set_details().name = std::move(name);
  set_details().status = std::move(why);
}

const Decision::Details& Decision::details() const {
  static const Details none;
  return details_ != nullptr ? *details_ : none;
}

Decision::Details& Decision::set_details() {
  if (details_.use_count() != 1) details_ = std::make_shared<Details>(details());
  return *details_;
}

bool Decision::Extend(const Decision& next) {
  if (!of_cached() || !next.of_cached() || next.process_set != process_set) return false;
  if (next.cache_id != cache_id + count || count + next.count > kLongestRun ||
      next.details().weights != details().weights) {
    return false;
  }
  count += next.count;
  return true;
}

std::string Request::Title() const {
  if (kind >= Collective::kJoin) return Name(kind);  // users do not see the names of these
  std::string title = std::string(Name(kind)) + " '" + name + "'";
  if (process_set != kWorldSet) title += " of process set " + std::to_string(process_set);
  return title;
}

// No name contains a zero byte: names are C strings.
void SetKey(int32_t process_set, const char* name, std::string* key) {
  *key = name;
  if (process_set == kWorldSet) return;
  key->push_back('\0');
  *key += std::to_string(process_set);
}

std::string Key(int32_t process_set, const std::string& name) {
  std::string key;
  SetKey(process_set, name.c_str(), &key);
  return key;
}

}  // namespace hororing
