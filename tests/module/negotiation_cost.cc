#include "negotiation_cost.h"

#include <algorithm>
#include <ctime>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "negotiation/codec.h"
#include "negotiation/coordinator.h"
#include "negotiation/host_reports.h"

namespace hororing {
namespace {

// CPU time of this thread, so that other processes on a busy machine do not count.
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

Report Decoded(const std::string& message) {
  Report report;
  if (!Decode(message, &report)) throw std::logic_error("codec");
  return report;
}

// Returns the combined message of the first rank of a host. Its own report is not sent to it.
std::string Combine(HostReports* combiner, const std::vector<int>& host,
                    const std::string& message) {
  for (const int rank : host) combiner->Receive(rank, Decoded(message), true, 0);
  std::optional<std::string> made = combiner->Take(0);
  if (!made) throw std::logic_error("identical reports were held");
  return std::move(*made);
}

void Arrive(Coordinator* coordinator, int rank, const std::string& message, NegotiationCost* cost) {
  ++cost->reports;
  cost->report_bytes += static_cast<int64_t>(message.size());
  std::vector<std::pair<std::vector<int>, Report>> reports;
  if (!DecodeCombined(message, &reports)) return coordinator->Receive(rank, Decoded(message), 0);
  for (const auto& [ranks, report] : reports) coordinator->Receive(ranks, report, 0);
}

}  // namespace

std::vector<NegotiationCost> PlayNegotiation(int ranks,
                                             const std::vector<std::vector<int64_t>>& bursts,
                                             int steps, int combined) {
  Coordinator::Options options;
  options.size = ranks;
  options.cache_capacity = static_cast<int>(std::accumulate(
      bursts.begin(), bursts.end(), size_t{1},
      [](size_t sum, const std::vector<int64_t>& burst) { return sum + burst.size(); }));
  Coordinator coordinator(options);
  std::vector<std::vector<int>> hosts;  // except the coordinator's
  std::vector<HostReports> combiners;
  for (int rank = combined; rank < ranks; ++rank) {
    if (rank % combined == 0) hosts.emplace_back();
    hosts.back().push_back(rank);
  }
  for (const std::vector<int>& host : hosts) combiners.emplace_back(host, kSecond);
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
      const int64_t combine_begin = CpuNs();
      std::vector<std::string> messages;
      for (size_t host = 0; host < hosts.size(); ++host) {
        messages.push_back(combined == 1 ? message
                                         : Combine(&combiners[host], hosts[host], message));
      }
      if (!hosts.empty()) {
        cost.host_ns += (CpuNs() - combine_begin) / static_cast<int64_t>(hosts.size());
      }
      const int64_t begin = CpuNs();
      coordinator.Receive(0, report, 0);
      for (int rank = 1; rank < std::min(ranks, combined); ++rank) {  // of the same host
        Arrive(&coordinator, rank, message, &cost);
      }
      for (size_t host = 0; host < hosts.size(); ++host) {
        Arrive(&coordinator, hosts[host][0], messages[host], &cost);
      }
      const std::optional<Agreement> agreement = coordinator.TakeAgreement();
      if (!agreement) throw std::logic_error("a complete burst was not decided");
      const std::string answer = Encode(*agreement);
      cost.work_ns += CpuNs() - begin;
      cost.agreements += 1;
      cost.agreements_sent += std::min(ranks, combined) - 1 + static_cast<int64_t>(hosts.size());
      cost.agreement_bytes += static_cast<int64_t>(answer.size());
      applied = agreement->sequence;
      for (const Decision& decision : agreement->decisions) {
        cost.decisions += static_cast<int64_t>(decision.count);
        if (!decision.details().name.empty()) ids[decision.details().name] = decision.cache_id;
      }
    }
    costs.push_back(cost);
  }
  return costs;
}

}  // namespace hororing
