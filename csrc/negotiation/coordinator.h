// Coordinator: takes the reports of all ranks and makes agreements. On rank 0.
//
// A sans-IO state machine: no threads, transport or clock. Calls and their order decide.
//
// Invariants
//   1. A request is decided once all members of its process set have reported it or have joined:
//      exactly one kRun or kFail.
//   2. A mismatch fails only the name that it concerns.
//   3. A cache id is never reused. The request of an evicted id is remembered until no report can
//      mention it any more (every member of its set has applied the eviction, or has joined).
//   4. After a kLeave or kAbort nothing more is decided.
//   5. All process sets share one order of decisions, and every rank carries out those that concern
//      it in that order. So overlapping sets cannot wait for one another in a cycle (ADR 13).
//
// Cost: O(1) per reported tensor and rank. Nothing is proportional to tensors that no rank reports,
// except for requests that a join completes. A report by id needs no name and no memory: about ten
// nanoseconds.
// See docs/architecture.md, stage NEGOTIATE.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "negotiation/messages.h"
#include "negotiation/process_sets.h"
#include "negotiation/stall_inspector.h"

namespace hororing {

class Coordinator {
 public:
  struct Options {
    int size = 1;
    // Tensors whose requests are cached; gathered rows count, too. 0: no cache. A request that
    // exceeds it alone is not cached.
    int cache_capacity = 0;
    StallInspector::Options stall;
  };
  explicit Coordinator(const Options& options);

  void Receive(int rank, const Report& report, TimeNs now) { Receive(&rank, 1, report, now); }
  // The same report from several ranks; cheaper than one by one.
  void Receive(const std::vector<int>& ranks, const Report& report, TimeNs now) {
    Receive(ranks.data(), ranks.size(), report, now);
  }
  // Queues a switch of the timeline, in order with all other decisions.
  void SwitchTimeline(bool on, bool mark_cycles);

  // Returns the decisions since the last call, if any, in the order in which they became ready.
  std::optional<Agreement> TakeAgreement();
  // Of one rank's tensors in these decisions.
  int64_t ready_bytes() const { return ready_bytes_; }
  // The part of the latest agreement that concerns any of `ranks`, with the rows that these receive
  // in an alltoall. If there is none, it need not be sent to them.
  std::optional<Agreement> PartFor(const std::vector<int>& ranks, const Agreement& agreement) const;
  bool IsForAll(const Agreement& agreement) const;  // Whether all ranks get the same agreement.
  // When TakeAgreement or InspectStalls has something to do without a new report; kForever: never.
  TimeNs NextDeadline() const;

  // Checks for stalls, if due. One beyond the shutdown time is a kAbort in the next agreement.
  StallInspector::Finding InspectStalls(TimeNs now);
  // All requests that wait for some rank, the oldest first.
  std::vector<Waiting> AllWaiting(bool joins = false);

 private:
  struct Record;
  // A request that some members have reported, but not all. `id` in this class is a cache id.
  struct Pending {
    const ProcessSet* set = nullptr;  // its members report; null: the name has never been pending
    ProcessSet new_set;               // `set` if only the members of a new set report
    uint64_t id = 0;                  // all reports so far had this id; 0: one was in full
    Record* record = nullptr;         // with `id`
    bool waits = false;               // false: the other members are unset; memory is reused
    MemberSet reported;
    TimeNs since_ns = 0;
    std::vector<double> weights;    // per member, 0 at first; empty: the average is not weighted
    std::vector<Request> requests;  // per member; filled once a report is in full
    const Request& any() const {    // one of those reported
      if (record != nullptr) return record->request;
      size_t member = 0;
      while (!reported.Has(member)) ++member;
      return requests[member];
    }
  };
  // The state of one key.
  struct TensorState {
    Pending pending;
    uint64_t id = 0;  // the live record; 0: there is none
    int records = 0;  // live and retired
    std::string key;
  };
  // A request that was agreed upon.
  struct Record {
    uint64_t id = 0;
    TensorState* tensor = nullptr;
    bool retired = false;
    bool used = false;  // agreed upon again since Evict last checked it
    std::list<uint64_t>::iterator age;
    size_t weighs = 0;          // its part of the capacity
    Request request;            // of one member; the others may differ in `rows` and `splits`
    std::vector<int64_t> rows;  // as in Decision::Details
    std::shared_ptr<const Splits> splits;
  };

  void Receive(const int* ranks, size_t count, const Report& report, TimeNs now);
  void ReportCached(const int* ranks, size_t count, uint64_t id, double weight, TimeNs now);
  void ReportFresh(int rank, const Request& request, TimeNs now);
  TensorState& StateOf(const Request& request);
  Pending& PendingFor(const Request& request, TensorState& tensor, TimeNs now);
  void ClearPending(TensorState& tensor);
  void Evict();
  void Retire(Record& record);
  void Erase(const Record& record);
  void Expand(Pending& pending);
  void Decide(TensorState& tensor);
  Status Agree(TensorState& tensor, Decision* decision);
  void Push(Decision decision);
  Status ChangeSets(const Request& request, std::vector<int64_t>* rows);
  void RemoveSet(int32_t id);
  std::vector<TensorState*> PendingTensors() const;
  Request RequestOf(const Record& record, int member) const;
  uint64_t Remember(TensorState& tensor, const Request& request, const Decision::Details& details);
  void ForgetRetired();

  // Join (uneven data).
  void Join(int rank);
  bool IsComplete(const Pending& pending) const {
    return pending.reported.all() || (joined_count_ > 0 && MissingRanksJoined(pending));
  }
  bool MissingRanksJoined(const Pending& pending) const;
  std::vector<int> JoinedAmong(const Pending& pending) const;
  // Whether a request can be carried out if these members contribute nothing.
  static Status CheckJoined(const std::vector<int>& joined, const Request& request);

  const Options options_;
  StallInspector stall_inspector_;
  ProcessSets sets_;
  std::unordered_map<std::string, std::unique_ptr<TensorState>> tensors_;  // by Key
  size_t waiting_ = 0;             // the number of them that are pending
  std::set<int32_t> removed_;      // sets that decisions in ready_ remove
  std::set<int32_t> removed_now_;  // sets that the latest agreement removes
  std::vector<char> joined_;       // per rank
  int joined_count_ = 0;
  int last_joined_ = -1;
  std::vector<Blocked> blocked_;          // per rank
  const ProcessSet* answered_ = nullptr;  // the current report has cleared its `blocked_`

  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, Record> records_;  // by cache id
  std::list<uint64_t> by_age_;                    // live ids, the newest first
  size_t cached_ = 0;                             // what the live ones take of the capacity
  std::vector<uint64_t> evicted_;                 // to announce in the next agreement
  std::map<uint64_t, uint64_t> retired_;          // id -> sequence of the announcing agreement
  size_t reports_since_forgetting_ = 0;

  std::vector<uint64_t> applied_;  // per rank: the last agreement it has applied
  uint64_t sequence_ = 0;
  std::vector<Decision> ready_;  // for the next agreement
  int64_t ready_bytes_ = 0;
  TimeNs stall_check_ns_ = kForever;
  bool stopped_ = false;  // a kLeave or kAbort is in ready_ or has been sent
};

}  // namespace hororing
