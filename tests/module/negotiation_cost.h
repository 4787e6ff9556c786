// NegotiationCost: measures what the negotiation of a training step costs the coordinator.
//
// The coordinator and the codec are the engine's; strings replace the network. All ranks report the
// same bursts of allreduces. A burst is agreed when all ranks have reported it, and every rank
// learns the cache ids from the agreements, as in the engine. Ranks are numbered host by host.
#pragma once

#include <cstdint>
#include <vector>

namespace hororing {

// The cost of one step for rank 0. Rank 0's own reports and agreements are not messages.
struct NegotiationCost {
  int64_t reports = 0;  // messages that arrive
  int64_t report_bytes = 0;
  int64_t agreements = 0;       // each is sent to all ranks that report
  int64_t agreement_bytes = 0;  // as sent to one of them
  int64_t agreements_sent = 0;  // messages
  int64_t decisions = 0;
  int64_t work_ns = 0;  // CPU time of decoding, counting, deciding and encoding
  int64_t host_ns = 0;  // CPU time of the first rank of another host, to combine its reports
};

// `bursts`: for each burst, the bytes of its tensors. Step 0 reports tensors in full, later steps
// report cache ids. `combined`: ranks per host, whose reports are combined
// (negotiation/host_reports.h); 1: every rank reports to rank 0. REQUIRES: ranks >= 1, steps >= 0,
// combined >= 1.
std::vector<NegotiationCost> PlayNegotiation(int ranks,
                                             const std::vector<std::vector<int64_t>>& bursts,
                                             int steps, int combined);

}  // namespace hororing
