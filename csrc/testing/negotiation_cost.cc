#include "testing/negotiation_cost.h"

#include <ctime>

#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "negotiation/codec.h"
#include "negotiation/coordinator.h"

namespace hororing {
namespace {

// Of this thread, so that other processes of a busy machine do not count.
int64_t CpuNs() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * kSecond + now.tv_nsec;
}

Request Gradient(size_t number, int64_t bytes) {
  Request request;
  request.name = "gradient." + std::to_string(number);
  request.op = ReduceOp::kAverage;
  request.tensors = {{DataType::kFloat32, {bytes / 4}}};
  return request;
}

}  // namespace

std::vector<NegotiationCost> PlayNegotiation(int ranks,
                                             const std::vector<std::vector<int64_t>>& bursts,
                                             int steps) {
  Coordinator::Options options;
  options.size = ranks;
  options.queue.fusion_bytes = int64_t{64} << 20;
  options.queue.hold_ns = kMillisecond;
  options.cache_capacity = static_cast<int>(std::accumulate(
      bursts.begin(), bursts.end(), size_t{1},
      [](size_t sum, const std::vector<int64_t>& burst) { return sum + burst.size(); }));
  Coordinator coordinator(options);
  std::unordered_map<std::string, uint64_t> ids;
  uint64_t applied = 0;
  std::vector<NegotiationCost> costs;
  for (int step = 0; step < steps; ++step) {
    NegotiationCost cost;
    size_t number = 0;
    for (const std::vector<int64_t>& burst : bursts) {
      Report report;
      report.applied = applied;
      for (int64_t bytes : burst) {
        Request request = Gradient(number++, bytes);
        const auto known = ids.find(request.name);
        if (known != ids.end()) {
          report.cached.push_back(known->second);
        } else {
          report.fresh.push_back(std::move(request));
        }
      }
      const std::string message = Encode(report);
      const int64_t begin = CpuNs();
      coordinator.Receive(0, report, 0);
      for (int rank = 1; rank < ranks; ++rank) {
        Report travelled;
        if (!Decode(message, &travelled)) throw std::logic_error("codec");
        coordinator.Receive(rank, travelled, 0);
      }
      const std::optional<Agreement> agreement = coordinator.Decide(0);
      if (!agreement) throw std::logic_error("a complete burst was not decided");
      const std::string answer = Encode(*agreement);
      cost.work_ns += CpuNs() - begin;
      cost.reports += ranks - 1;
      cost.report_bytes += (ranks - 1) * static_cast<int64_t>(message.size());
      cost.agreements += 1;
      cost.agreement_bytes += static_cast<int64_t>(answer.size());
      cost.decisions += static_cast<int64_t>(agreement->decisions.size());
      applied = agreement->sequence;
      for (const Decision& decision : agreement->decisions) {
        if (!decision.name.empty()) ids[decision.name] = decision.cache_id;
      }
    }
    costs.push_back(cost);
  }
  return costs;
}

}  // namespace hororing
