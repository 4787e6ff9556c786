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
  HORORING_RETURN_IF_ERROR(Gather(beginning, deadline));
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
  return Gather(whole, deadline);
}

// Doubles the number of places that each rank has, from its own on, until all have all.
Status TransportBootstrap::Gather(const std::function<Place(int)>& place, TimeNs deadline) {
  Status status;
  for (int have = 1; have < size() && status.ok(); have *= 2) {
    const int next = (rank() + have) % size(), previous = (rank() + size() - have) % size();
    std::vector<Transport::Request> requests;
    for (int i = 0; i < std::min(have, size() - have); ++i) {
      const Place out = place((rank() + i) % size()), in = place((next + i) % size());
      requests.push_back(transport_.Receive(next, in.data, in.bytes));
      requests.push_back(transport_.Send(previous, out.data, out.bytes));
    }
    for (const Transport::Request request : requests) {
      const Status done = transport_.Wait(request, deadline);
      if (status.ok()) status = done;
    }
  }
  return status;
}

Status OutOfBandBootstrap::Share(const std::string& mine, TimeNs deadline,
                                 std::vector<std::string>* texts) {
  std::unique_lock<std::mutex> lock(mutex_);
  HORORING_RETURN_IF_ERROR(outcome_);
  mine_ = mine;
  pending_ = true;
  changed_.notify_all();
  const TimeNs left = std::max<TimeNs>(0, std::min(deadline - NowNs(), 1000 * 3600 * kSecond));
  if (!changed_.wait_for(lock, std::chrono::nanoseconds(left), [this] { return !pending_; })) {
    pending_ = false;
    outcome_ = Status(Code::kTransport,
                      "init: not all ranks of the job have called it in time (HORORING_TIMEOUT_S "
                      "sets the limit)");
  }
  *texts = std::move(texts_);
  return outcome_;
}

void OutOfBandBootstrap::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

bool OutOfBandBootstrap::AwaitExchange(TimeNs timeout_ns, std::string* mine) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                    [this] { return pending_ || closed_; });
  if (pending_) *mine = mine_;
  return pending_;
}

void OutOfBandBootstrap::Exchanged(Status status, std::vector<std::string> texts) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (outcome_.ok()) outcome_ = std::move(status);
  texts_ = std::move(texts);
  pending_ = false;
  changed_.notify_all();
}

}  // namespace hororing
