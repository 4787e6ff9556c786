#include "backend/host_pipeline.h"

#include <numeric>
#include <utility>

#include "backend/common.h"
#include "transport/long_wait.h"
#include "transport/polling.h"

namespace hororing {
// Time between two checks whether all ranks are alive.
constexpr TimeNs kCheckInterval = 2 * kMillisecond;
// The same for a rank whose last bytes may still be on the wire: a check moves them, too.
constexpr TimeNs kWireCheckInterval = 50 * kMicrosecond;
// How long a rank with nothing on the wire sleeps; its peers on the host ring its doorbell.
constexpr TimeNs kLongestSleep = 5 * kMillisecond;
// MPI rings no doorbell.
constexpr TimeNs kLongestWireSleep = 100 * kMicrosecond;

namespace {

// Whether the counter of the rank at `slot` has reached `value`; else notes it in this rank's own.
// Sequentially consistent, as Publish: this rank sees the value, or the other the note, and rings.
bool HasReached(const SlotCounter& theirs, uint64_t value, int slot, SlotCounter* own) {
  if (theirs.reached.load() >= value) return true;
  if (own->awaits.load(std::memory_order_relaxed) == slot) return false;
  own->awaits.store(slot);
  return theirs.reached.load() >= value;
}

}  // namespace

HostGroup::HostGroup(const Topology& topology, Members all) : members(std::move(all)) {
  std::vector<int> numbers(topology.hosts.size(), -1);  // of the job's hosts among the set's
  std::vector<int> local_ranks(static_cast<size_t>(topology.size), 0);
  std::vector<int> seen(topology.hosts.size(), 0);
  for (size_t rank = 0; rank < local_ranks.size(); ++rank) {
    local_ranks[rank] = seen[static_cast<size_t>(topology.host_of[rank])]++;
  }
  for (size_t at = 0; at < members.ranks.size(); ++at) {
    const size_t rank = static_cast<size_t>(members.ranks[at]);
    int& number = numbers[static_cast<size_t>(topology.host_of[rank])];
    if (number < 0) {
      number = hosts();
      group_ranks_on.emplace_back();
    }
    std::vector<int>& here = group_ranks_on[static_cast<size_t>(number)];
    host_of.push_back(number);
    local_of.push_back(static_cast<int>(here.size()));
    here.push_back(static_cast<int>(at));
    if (members.ranks[at] == topology.rank) group_rank = static_cast<int>(at);
  }
  host = host_of[static_cast<size_t>(group_rank)];
  local = local_of[static_cast<size_t>(group_rank)];
  for (const int at : group_ranks_on[static_cast<size_t>(host)]) {
    slots.push_back(local_ranks[static_cast<size_t>(members.ranks[static_cast<size_t>(at)])]);
  }
  // Steps of a golden section. Ranks on shared cores arrive in about the order of their numbers,
  // up or down; so a rank waits for about log n of them, one after another, and not for each.
  const int size = local_size();
  int step = std::max(1, size * 618 / 1000);
  while (std::gcd(step, size) != 1) ++step;
  for (int i = 1; i < size; ++i) others.push_back((local + i * step) % size);
}

SlotGeometry SlotGeometry::OneHost(size_t slot_bytes) {
  const size_t capacity = std::min(kMaxLocalBlock, slot_bytes / 2) / kCacheLine * kCacheLine;
  return {slot_bytes / capacity, capacity};
}

SlotGeometry SlotGeometry::SeveralHosts(size_t slot_bytes) {
  constexpr size_t kDepth = 8;
  return {kDepth, slot_bytes / kDepth / kCacheLine * kCacheLine};
}

HostPipeline::HostPipeline(SetSlots& set, const Batch& batch, bool on_wire, uint64_t blocks,
                           TimeNs deadline, TraceSink& trace)
    : set_(set),
      batch_(batch),
      trace_(trace),
      on_wire_(on_wire),
      deadline_(deadline),
      end_(first_ + blocks) {
  set_.next_block = end_;
}

Status HostPipeline::Run() {
  ShmTransport::SlotReaders& readers = local_.slot_readers();
  const Members& members = group_.members;
  if (readers.slots.empty() || readers.set != members.set ||
      readers.incarnation != members.incarnation) {
    HORORING_RETURN_IF_ERROR(WaitForReaders());
    readers = {group_.slots, {}, members.set, members.incarnation, 0};
    for (int peer = 0; peer < size_; ++peer) {
      readers.ranks.push_back(group_.JobRank(group_.host, peer));
    }
  }
  readers.end = end_;
  Status status;
  const auto advance = [&] { return Advance(&status); };
  while (status.ok() && !Finished()) {
    if (!advance()) HORORING_RETURN_IF_ERROR(RunUntil(advance, [this] { return Lagging(); }));
  }
  return status;
}

// Blocks until no rank reads this rank's slot for another set, which needs nothing more of it.
Status HostPipeline::WaitForReaders() {
  const ShmTransport::SlotReaders& readers = local_.slot_readers();
  SlotCounter& own = segment_.rank_state(local_.rank()).progress[readers.set].consumed;
  const auto lagging = [&] {
    std::vector<int> ranks;
    for (size_t i = 0; i < readers.slots.size(); ++i) {
      const int slot = readers.slots[i];
      const SlotCounter& reader = segment_.rank_state(slot).progress[readers.set].consumed;
      if (!HasReached(reader, readers.end, slot, &own)) ranks.push_back(readers.ranks[i]);
    }
    return ranks;
  };
  return RunUntil([&] { return lagging().empty(); }, lagging);
}

// ready() runs the stages that can proceed, and returns false if there are none.
template <typename Ready, typename Peers>
Status HostPipeline::RunUntil(Ready ready, Peers lagging) {
  if (&wire_ == &local_) return local_.WaitUntil(ready, lagging, deadline_);
  Backoff backoff(0, on_wire_ ? kLongestWireSleep : kLongestSleep);
  LongWait wait(backoff.begin_ns());
  if (next_check_ns_ == 0) next_check_ns_ = After(backoff.begin_ns(), kCheckInterval);
  for (;;) {
    const uint32_t epoch = local_.Epoch();
    if (ready()) return Status::Ok();
    const TimeNs now = NowNs();
    if (now >= next_check_ns_) {
      next_check_ns_ = After(now, on_wire_ ? kWireCheckInterval : kCheckInterval);
      HORORING_RETURN_IF_ERROR(wire_.CheckPeers());
      wait.Check(wire_, now, lagging);
    }
    if (!backoff.Pause(local_, epoch, false, wire_.Extended(deadline_, wait.progressed_ns()))) {
      return wait.GiveUp(wire_, lagging());
    }
  }
}

bool HostPipeline::ReachedOrAwaited(int peer, Counter counter, uint64_t value) const {
  return HasReached(Progress(peer).*counter, value, group_.slots[static_cast<size_t>(peer)],
                    &(Progress(rank_).*counter));
}

void HostPipeline::Publish(Counter counter, uint64_t value) {
  local_.to_slot().Fence();
  (Progress(rank_).*counter).reached.store(value);
  for (const int peer : group_.others) {
    if ((Progress(peer).*counter).awaits.load() != local_.rank()) continue;
    local_.RingWorker(group_.slots[static_cast<size_t>(peer)]);
  }
}

// The ranks that this one waits for.
std::vector<int> HostPipeline::Lagging() const {
  const int on_wire = LaggingOnWire();
  if (on_wire >= 0) return {on_wire};
  std::vector<int> ranks;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && Lags(peer)) ranks.push_back(group_.JobRank(group_.host, peer));
  }
  return ranks;
}

}  // namespace hororing
