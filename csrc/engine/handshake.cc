#include "engine/handshake.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

#include "base/sha256.h"
#include "negotiation/validate.h"
#include "transport/bootstrap.h"

namespace hororing {
namespace {

std::map<std::string, std::string> ParseLines(const std::string& text) {
  std::map<std::string, std::string> values;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) values[line.substr(0, equals)] = line.substr(equals + 1);
  }
  return values;
}

}  // namespace

Status CompareFingerprints(Transport& transport, const std::string& fingerprint, TimeNs deadline) {
  TransportBootstrap bootstrap(&transport);
  std::vector<std::string> texts;
  // Usually the digests are equal, and the texts may be long.
  HORORING_RETURN_IF_ERROR(bootstrap.Share(Sha256(fingerprint), deadline, &texts));
  if (std::equal(texts.begin() + 1, texts.end(), texts.begin())) return Status::Ok();
  HORORING_RETURN_IF_ERROR(bootstrap.Share(fingerprint, deadline, &texts));
  std::vector<std::map<std::string, std::string>> values;
  std::set<std::string> knobs;
  for (const std::string& text : texts) {
    values.push_back(ParseLines(text));
    for (const auto& [knob, value] : values.back()) knobs.insert(knob);
  }
  std::vector<int> ranks(texts.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::string differences;
  for (const std::string& knob : knobs) {
    const auto value_of = [&](size_t rank) {
      const auto value = values[rank].find(knob);
      return value == values[rank].end() ? std::string("unknown there") : value->second;
    };
    size_t same = 1;
    while (same < values.size() && value_of(same) == value_of(0)) ++same;
    if (same == values.size()) continue;
    differences +=
        (differences.empty() ? "" : " | ") + knob + ": " + GroupedByRank(ranks, value_of);
  }
  if (differences.empty()) return Status::Ok();
  return Status(Code::kMismatch,
                "init: the ranks are configured differently: " + differences +
                    ". Set the same value on every rank (mpirun -x NAME forwards a variable to "
                    "other hosts) and install the same version everywhere.");
}

Status MeasureClocks(Transport& transport, const Topology& topology, TimeNs deadline,
                     std::vector<TimeNs>* offsets) {
  constexpr int kRounds = 8;
  offsets->assign(static_cast<size_t>(topology.size), 0);
  for (const std::vector<int>& ranks : topology.ranks_on()) {
    const int peer = ranks[0];
    if (peer == 0 || (topology.rank != 0 && topology.rank != peer)) continue;
    TimeNs best_round_trip = kForever;
    for (int round = 0; round < kRounds; ++round) {
      TimeNs theirs = 0;
      if (topology.rank == peer) {
        char ping = 0;
        HORORING_RETURN_IF_ERROR(
            transport.Wait(transport.Receive(0, &ping, sizeof ping), deadline));
        theirs = NowNs();
        HORORING_RETURN_IF_ERROR(
            transport.Wait(transport.Send(0, &theirs, sizeof theirs), deadline));
        continue;
      }
      const char ping = 0;
      const TimeNs asked = NowNs();
      HORORING_RETURN_IF_ERROR(transport.Wait(transport.Send(peer, &ping, sizeof ping), deadline));
      HORORING_RETURN_IF_ERROR(
          transport.Wait(transport.Receive(peer, &theirs, sizeof theirs), deadline));
      const TimeNs answered = NowNs();
      if (answered - asked < best_round_trip) {
        best_round_trip = answered - asked;
        for (const int each : ranks) {
          (*offsets)[static_cast<size_t>(each)] = asked + (answered - asked) / 2 - theirs;
        }
      }
    }
  }
  return Status::Ok();
}

}  // namespace hororing
