#include "transport/bootstrap.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace hororing {

Status TransportBootstrap::Share(const std::string& mine, TimeNs deadline,
                                 std::vector<std::string>* texts) {
  constexpr size_t kWidth = 1024;
  std::vector<char> all(static_cast<size_t>(size()) * kWidth, '\0');
  const auto place = [&](int rank) { return all.data() + static_cast<size_t>(rank) * kWidth; };
  const auto send = [&](int peer, const char* data, size_t bytes) {
    return transport_.Wait(transport_.Send(peer, data, bytes), deadline);
  };
  const auto receive = [&](int peer, char* data, size_t bytes) {
    return transport_.Wait(transport_.Receive(peer, data, bytes), deadline);
  };
  mine.copy(place(rank()), kWidth - 1);
  if (rank() != 0) {
    HORORING_RETURN_IF_ERROR(send(0, place(rank()), kWidth));
    HORORING_RETURN_IF_ERROR(receive(0, all.data(), all.size()));
  } else {
    for (int peer = 1; peer < size(); ++peer) {
      HORORING_RETURN_IF_ERROR(receive(peer, place(peer), kWidth));
    }
    for (int peer = 1; peer < size(); ++peer) {
      HORORING_RETURN_IF_ERROR(send(peer, all.data(), all.size()));
    }
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
