// NegotiationCost: what negotiating a step of training costs the coordinator, by playing it.
//
// The coordinator and the codec are the engine's; the wire is a string that is encoded and
// decoded. All ranks report the same bursts of allreduces; a burst is agreed upon when all ranks
// have reported it, and every rank learns the cache ids from the agreements, as the engine does.
// Ranks lie host by host.
#pragma once

#include <cstdint>
#include <vector>

namespace hororing {

// Of one step, for rank 0. Rank 0's own reports and agreements do not travel.
struct NegotiationCost {
  int64_t reports = 0;  // messages that arrive
  int64_t report_bytes = 0;
  int64_t agreements = 0;       // that are made; each is sent to all that report
  int64_t agreement_bytes = 0;  // as sent to one of them
  int64_t agreements_sent = 0;  // messages
  int64_t decisions = 0;
  int64_t work_ns = 0;  // CPU time of decoding, counting, deciding and encoding
  int64_t host_ns = 0;  // CPU time of the first rank of one other host, which combines
};

// `bursts`: the bytes of the tensors that are reported together. Step 0 reports tensors in full,
// later ones by their cache ids. Where `combined` > 1 ranks of a host share memory, what they
// report is combined (negotiation/host_reports.h); 1: every rank reports to rank 0. REQUIRES: ranks
// >= 1, steps >= 0, combined >= 1.
std::vector<NegotiationCost> PlayNegotiation(int ranks,
                                             const std::vector<std::vector<int64_t>>& bursts,
                                             int steps, int combined);

}  // namespace hororing
