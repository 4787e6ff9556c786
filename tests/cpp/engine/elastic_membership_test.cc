// A process of an elastic job and its store: beats, frames, the end of either, and its effects on
// the engine.
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine_world.h"
#include "membership/membership.h"

namespace {

using namespace hororing_test;

// A frame of hororing/_job/rendezvous/protocol.py.
std::string Frame(uint32_t kind, int32_t rank, int64_t generation, int64_t stamp, int32_t what,
                  const std::string& text) {
  std::string frame(160, '\0');
  const auto put = [&](size_t place, const void* from, size_t bytes) {
    std::memcpy(frame.data() + place, from, bytes);
  };
  put(0, &kind, 4);
  put(4, &rank, 4);
  put(8, &generation, 8);
  put(16, &stamp, 8);
  put(24, &what, 4);
  put(28, text.data(), text.size());
  return frame;
}

// A member, and the store's end of its connection.
class Told {
 public:
  explicit Told(TimeNs interval_ns = kMillisecond) {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets_) == 0);
    membership_.emplace(sockets_[0], interval_ns, [this](int64_t generation, const Status& why) {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_.push_back({generation, why});
      changed_.notify_all();
    });
  }
  ~Told() {
    Leave();
    close(sockets_[0]);
    if (sockets_[1] >= 0) close(sockets_[1]);
  }

  void Leave() { membership_.reset(); }
  void Say(const std::string& bytes) {
    CHECK(write(sockets_[1], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  }
  void Close() {
    close(sockets_[1]);
    sockets_[1] = -1;
  }
  // Blocks until the next beat; false at the end of the connection.
  bool Beats() {
    char beat = 0;
    return read(sockets_[1], &beat, 1) == 1;
  }
  struct End {
    int64_t generation;
    Status why;
  };
  std::vector<End> Ends(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::nanoseconds(kTestTimeout),
                            [&] { return ended_.size() >= count; }));
    return ended_;
  }
  Membership& membership() { return *membership_; }

 private:
  int sockets_[2] = {-1, -1};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<End> ended_;
  std::optional<Membership> membership_;
};

TEST(a_member_beats_without_being_asked) {
  Told told;
  for (int beat = 0; beat < 5; ++beat) CHECK(told.Beats());
}

TEST(a_member_leaves_at_once_whatever_it_waits_for) {
  Told told(3600 * kSecond);
  CHECK(told.Beats());
  const TimeNs begin = NowNs();
  told.Leave();
  CHECK(NowNs() - begin < 60 * kSecond);
  CHECK(!told.Beats());
}

TEST(a_generation_that_is_over_is_told_once_and_remembered) {
  Told told;
  CHECK(told.membership().Check(1).ok());
  const std::string frame = Frame(1, 2, 7, 0, 0, "rank 2 is lost");
  told.Say(frame.substr(0, 11));
  CHECK(told.Beats());
  told.Say(frame.substr(11));
  const std::vector<Told::End> ends = told.Ends(1);
  CHECK(ends[0].generation == 7);
  CHECK(ends[0].why.code() == Code::kPeerLost);
  CHECK(ends[0].why.rank() == 2);
  CHECK(ends[0].why.message() == "rank 2 is lost");
  CHECK(!told.membership().Check(6).ok());
  CHECK(told.membership().Check(7).rank() == 2);
  CHECK(told.membership().Check(8).ok());
  told.Say(frame + Frame(1, 0, 6, 0, 0, "late") + Frame(1, 1, 8, 0, 0, "next"));
  CHECK(told.Ends(2)[1].generation == 8);
}

TEST(a_member_hears_what_has_changed_since_its_generation_began) {
  Told told;
  told.Say(Frame(2, -1, 3, 1000, 2, "") + Frame(1, 0, 1, 0, 0, "by which time the first is there"));
  told.Ends(1);
  CHECK(told.membership().UpdatesSince(3).stamp == 1000);
  CHECK(told.membership().UpdatesSince(3).what == 2);
  CHECK(told.membership().UpdatesSince(4).stamp == 1000);
  CHECK(told.membership().UpdatesSince(4).what == 0);
}

TEST(without_a_store_every_generation_is_over) {
  Told told;
  CHECK(told.Beats());
  told.Close();
  const std::vector<Told::End> ends = told.Ends(1);
  CHECK(ends[0].generation == std::numeric_limits<int64_t>::max());
  CHECK(ends[0].why.code() == Code::kTransport);
}

TEST(a_revoked_engine_fails_with_the_rank_that_was_lost_and_ends_at_once) {
  InStep all(3);
  Play(3, {}, [&](Player& player) {
    CHECK(player.started.ok());
    std::vector<float> data(1000, 1.0F);
    int64_t handle = 0;
    if (player.rank != 1) CHECK(player.Submit("x", data, ReduceOp::kSum, &handle).ok());
    all.Wait();              // an engine that fails earlier would be an error for the others
    if (player.rank == 1) {  // as if it were stopped: it never submits
      player.engine->Revoke(Status(Code::kPeerLost, "declared dead"));
      return;
    }
    player.engine->Revoke(Status(Code::kPeerLost, "rank 1 is lost", 1));
    player.engine->Revoke(Status(Code::kPeerLost, "rank 0 is lost", 0));  // the first one counts
    const Status status = player.Wait(handle);
    CHECK(status.code() == Code::kPeerLost);
    CHECK(status.rank() == 1);
  });
}

}  // namespace
