#include "transport/bootstrap.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace hororing {

// First all ranks share the length and the beginning of their texts. Usually that is all; longer
// texts follow in full, to the same size on every rank, which all know by then.
Status TransportBootstrap::Share(const std::string& mine, TimeNs deadline,
                                 std::vector<std::string>* texts) {
  std::vector<Beginning> beginnings(static_cast<size_t>(size()));
  Beginning& own = beginnings[static_cast<size_t>(rank())];
  own.bytes = mine.size();
  mine.copy(own.text, sizeof own.text);
  const auto beginning = [&](int of) { return beginnings[static_cast<size_t>(of)].place(); };
  HORORING_RETURN_IF_ERROR(AroundRing(beginning, deadline));
  texts->clear();
  bool more = false;
  for (const Beginning& each : beginnings) {
    texts->emplace_back(each.text, std::min<size_t>(each.bytes, sizeof each.text));
    more = more || each.bytes > sizeof each.text;
  }
  if (!more) return Status::Ok();
  for (size_t i = 0; i < texts->size(); ++i) (*texts)[i].resize(beginnings[i].bytes);
  (*texts)[static_cast<size_t>(rank())] = mine;
  const auto whole = [&](int of) {
    std::string& text = (*texts)[static_cast<size_t>(of)];
    return Place{text.data(), text.size()};
  };
  return AroundRing(whole, deadline);
}

// Sends this rank's place and those that arrive around a ring, until all ranks have all of them.
Status TransportBootstrap::AroundRing(const std::function<Place(int)>& place, TimeNs deadline) {
  const int next = (rank() + 1) % size(), previous = (rank() + size() - 1) % size();
  for (int step = 0; step < size() - 1; ++step) {
    const Place out = place((rank() + size() - step) % size());
    const Place in = place((previous + size() - step) % size());
    HORORING_RETURN_IF_ERROR(
        SendReceive(transport_, next, out.data, out.bytes, previous, in.data, in.bytes, deadline));
  }
  return Status::Ok();
}

Status AskingBootstrap::Share(const std::string& mine, TimeNs deadline,
                              std::vector<std::string>* texts) {
  std::unique_lock<std::mutex> lock(mutex_);
  HORORING_RETURN_IF_ERROR(answer_);
  mine_ = mine;
  asked_ = true;
  const TimeNs left = std::max<TimeNs>(0, std::min(deadline - NowNs(), 1000 * 3600 * kSecond));
  if (!answered_.wait_for(lock, std::chrono::nanoseconds(left), [this] { return !asked_; })) {
    asked_ = false;
    answer_ = Status(Code::kTransport,
                     "init: not all ranks of the job have called it in time (HORORING_TIMEOUT_S "
                     "sets the limit)");
  }
  *texts = std::move(texts_);
  return answer_;
}

bool AskingBootstrap::Asked(std::string* mine) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (asked_) *mine = mine_;
  return asked_;
}

void AskingBootstrap::Answer(Status status, std::vector<std::string> texts) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (answer_.ok()) answer_ = std::move(status);
    texts_ = std::move(texts);
    asked_ = false;
  }
  answered_.notify_all();
}

}  // namespace hororing
