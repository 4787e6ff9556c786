#include "mailboxes.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "arithmetic.h"
#include "state.h"

namespace fake_gpu {
namespace {

// Moves one message if possible. Returns whether it did.
bool Move(Comm& comm, Half& half) {
  const size_t me = static_cast<size_t>(comm.rank), peer = static_cast<size_t>(half.peer);
  Box& box = half.sends ? comm.shared->boxes[me][peer] : comm.shared->boxes[peer][me];
  const uint32_t full = box.bytes.load(std::memory_order_acquire);
  if (half.done == half.total() || half.sends != (full == 0)) return false;
  constexpr size_t kHead = sizeof(Header);
  if (half.sends) {
    const bool head = half.done == 0;
    const size_t bytes = head ? kHead : std::min(half.total() - half.done, kBoxBytes);
    std::memcpy(box.data,
                head ? reinterpret_cast<char*>(&half.header) : half.data + half.done - kHead,
                bytes);
    half.done += bytes;
    box.bytes.store(static_cast<uint32_t>(bytes), std::memory_order_release);
    return true;
  }
  if (half.done == 0) {
    std::memcpy(&half.found, box.data, kHead);
    if (std::memcmp(&half.found, &half.header, kHead) != 0) {
      Violation(std::string("ranks disagree: ") + half.found.what + " of " +
                std::to_string(half.found.bytes) + " bytes came, " + half.header.what + " of " +
                std::to_string(half.header.bytes) + " was expected");
      comm.state = kInvalidUsage;
      return false;
    }
  } else {
    std::memcpy(half.data + half.done - kHead, box.data, full);
  }
  half.done += half.done == 0 ? kHead : full;
  box.bytes.store(0, std::memory_order_release);
  return true;
}

}  // namespace

void MoveAll(Comm& comm, std::vector<Half> halves) {
  const bool here = settings.hang_ranks == 0 || settings.hang_ranks == comm.ranks;
  const bool hangs = here && settings.hang_after >= 0 && counts.collectives > settings.hang_after;
  for (;;) {
    bool moved = false, done = !hangs;
    // Messages between two ranks are moved in order.
    std::map<std::pair<bool, int>, bool> busy;
    for (Half& half : halves) {
      if (half.done == half.total()) continue;
      bool& pair = busy[{half.sends, half.peer}];
      if (!pair && !hangs) moved |= Move(comm, half);
      pair = true;
      done = false;
    }
    if (done || comm.aborted) return;
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Header HeaderOf(const char* what, size_t bytes, int type, int op, int root) {
  Header header = {};
  std::strncpy(header.what, what, sizeof header.what - 1);
  header.bytes = static_cast<int64_t>(bytes);
  header.type = type;
  header.op = std::min<int>(op, kPreMulSum);  // each rank numbers its own operations
  header.root = root;
  return header;
}

std::vector<std::vector<char>> Exchange(Comm& comm, const Header& header, const void* send) {
  std::vector<std::vector<char>> all(static_cast<size_t>(comm.ranks));
  std::vector<Half> halves;
  const char* mine = static_cast<const char*>(send);
  std::vector<char> out(mine, mine + header.bytes);
  for (int peer = 0; peer < comm.ranks; ++peer) {
    std::vector<char>& theirs = all[static_cast<size_t>(peer)];
    theirs.resize(static_cast<size_t>(header.bytes));
    if (peer == comm.rank) theirs = out;
    if (peer == comm.rank) continue;
    halves.push_back({true, peer, out.data(), header});
    halves.push_back({false, peer, theirs.data(), header});
  }
  MoveAll(comm, std::move(halves));
  return all;
}

void TogetherWith(Comm& comm, const std::vector<Half>& halves) {
  std::vector<Half> moved;
  std::vector<const Half*> to_self, from_self;
  for (const Half& half : halves) {
    if (half.peer != comm.rank)
      moved.push_back(half);
    else
      (half.sends ? to_self : from_self).push_back(&half);
  }
  if (to_self.size() != from_self.size()) Violation("sends to itself without receives");
  for (size_t i = 0; i < std::min(to_self.size(), from_self.size()); ++i) {
    std::memcpy(from_self[i]->data, to_self[i]->data,
                static_cast<size_t>(to_self[i]->header.bytes));
  }
  MoveAll(comm, std::move(moved));
}

}  // namespace fake_gpu
