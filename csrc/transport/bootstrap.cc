#include "transport/bootstrap.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace hororing {

Status TransportBootstrap::Share(const std::string& mine, TimeNs deadline,
                                 std::vector<std::string>* texts) {
  constexpr size_t kWidth = 4096;
  std::vector<char> all(static_cast<size_t>(size()) * kWidth, '\0');
  const auto place = [&](int rank) { return all.data() + static_cast<size_t>(rank) * kWidth; };
  mine.copy(place(rank()), kWidth - 1);
  const int next = (rank() + 1) % size(), previous = (rank() + size() - 1) % size();
  for (int step = 0; step < size() - 1; ++step) {  // around a ring
    const int out = (rank() + size() - step) % size(), in = (previous + size() - step) % size();
    HORORING_RETURN_IF_ERROR(
        SendReceive(transport_, next, place(out), kWidth, previous, place(in), kWidth, deadline));
  }
  texts->clear();
  for (int rank = 0; rank < size(); ++rank) texts->push_back(place(rank));
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
