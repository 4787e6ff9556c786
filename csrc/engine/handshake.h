// Handshake: what the ranks check and measure before the first request.
#pragma once

#include <string>
#include <vector>

#include "transport/factory.h"
#include "transport/transport.h"

namespace hororing {

// Compares "knob=value" lines over all ranks. A difference is kMismatch on every rank, with a text
// that names the knob and the ranks. Blocks until all ranks have called it.
Status CompareFingerprints(Transport& transport, const std::string& fingerprint, TimeNs deadline);

// Measures the offset from rank r's clock to rank 0's; only on rank 0 (zeros elsewhere). Ranks of a
// host share a clock. Rank 0 asks the first rank of each other host a few times; half of the
// fastest round trip bounds the error (Cristian, "Probabilistic clock synchronization", 1989).
Status MeasureClocks(Transport& transport, const Topology& topology, TimeNs deadline,
                     std::vector<TimeNs>* offsets);

}  // namespace hororing
