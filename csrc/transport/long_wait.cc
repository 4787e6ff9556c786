#include "transport/long_wait.h"

#include <cstdio>

namespace hororing {
namespace {

std::string NoProgress(const std::vector<int>& ranks, TimeNs age) {
  std::string listed;
  for (const int rank : ranks) listed += (listed.empty() ? "" : ", ") + std::to_string(rank);
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3g", static_cast<double>(age) / 1e9);
  return "no progress from rank(s) " + listed + " for " + seconds +
         " s; they may be stopped, their machine overloaded or the network cut "
         "(HORORING_TIMEOUT_S sets the limit)";
}

}  // namespace

// Asks all peers for signs of life, at intervals that double to keep the cost low, so that the
// silent ones are known when needed. Warnings have the same intervals.
void LongWait::HandleDelay(Transport& transport, TimeNs now, const std::vector<int>& lagging) {
  const TimeNs age = now - since_ns_;
  const std::vector<int> culprits = LatePeers(transport, age, lagging);
  const Transport::WaitLimits& wait_limits = transport.wait_limits();
  if (age >= std::max(wait_limits.warning_ns, 2 * warned_ns_)) {
    wait_limits.warn(NoProgress(culprits, age));
    warned_ns_ = age;
  }
  const bool warned = age >= wait_limits.warning_ns;
  next_ns_ = since_ns_ + (warned ? 2 * age : std::min(2 * age, wait_limits.warning_ns));
}

// A peer that this rank waits for may itself wait for another one, as in a ring. So silent peers
// are to blame; if there are none, the peers that this rank waits for.
std::vector<int> LongWait::LatePeers(Transport& transport, TimeNs age,
                                     const std::vector<int>& lagging) const {
  std::vector<int> silent;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer == transport.rank()) continue;
    if (transport.Silence(peer) >= std::max(age / 4, 2 * kFirstCheck)) silent.push_back(peer);
  }
  return silent.empty() ? lagging : silent;
}

Status LongWait::GiveUp(Transport& transport, const std::vector<int>& lagging) {
  const TimeNs age = NowNs() - progressed_ns_;
  const std::vector<int> culprits = LatePeers(transport, age, lagging);
  return Status(Code::kTransport, NoProgress(culprits, age), culprits.empty() ? -1 : culprits[0]);
}

}  // namespace hororing
