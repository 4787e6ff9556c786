#include "negotiation/codec.h"

#include <algorithm>
#include <cstring>

namespace hororing {
namespace {

// Consecutive cache ids, as in most steps, are encoded as the first id and their number. The number
// is limited, so that a malformed message cannot make us allocate much more memory than its own
// length.
constexpr size_t kLongestRun = 1 << 16;
// These bytes replace a decision's kind: a run of cached requests; no more decisions.
constexpr uint8_t kRunOfCached = 0x7e, kNoMore = 0x7f;

class Writer {
 public:
  explicit Writer(MessageKind kind) { bytes_.push_back(static_cast<char>(kind)); }

  void Unsigned(uint64_t value) {
    while (value >= 0x80) {
      bytes_.push_back(static_cast<char>(value | 0x80));
      value >>= 7;
    }
    bytes_.push_back(static_cast<char>(value));
  }
  void Signed(int64_t value) {
    Unsigned((static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63));
  }
  void Double(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    for (int i = 0; i < 8; ++i) bytes_.push_back(static_cast<char>(bits >> (8 * i)));
  }
  void Text(const std::string& value) {
    Unsigned(value.size());
    bytes_.append(value);
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads until the first malformed item; from then on everything is zero and ok() is false.
class Reader {
 public:
  explicit Reader(const std::string& bytes)
      : next_(bytes.data()), end_(bytes.data() + bytes.size()) {}

  bool Expect(MessageKind kind) { return Byte() == static_cast<uint8_t>(kind) && ok_; }
  uint64_t Unsigned() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t byte = Byte();
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) return value;
    }
    ok_ = false;
    return 0;
  }
  int64_t Signed() {
    const uint64_t value = Unsigned();
    return static_cast<int64_t>((value >> 1) ^ (~(value & 1) + 1));
  }
  double Double() {
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits |= static_cast<uint64_t>(Byte()) << (8 * i);
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  std::string Text() {
    const size_t size = Count();
    std::string value(next_, size);
    next_ += size;
    return value;
  }
  // The length of a run; 0 if there is none or it is malformed.
  size_t Run() {
    const uint64_t count = Unsigned();
    if (count > kLongestRun) ok_ = false;
    return ok_ ? static_cast<size_t>(count) : 0;
  }
  // A count of items that take at least one byte each, so the remaining bytes bound it.
  size_t Count() {
    const uint64_t count = Unsigned();
    if (count > static_cast<uint64_t>(end_ - next_)) {
      ok_ = false;
      return 0;
    }
    return static_cast<size_t>(count);
  }
  template <typename Enum>
  Enum Choice(Enum last) {
    return Choice(Byte(), last);
  }
  template <typename Enum>
  Enum Choice(uint8_t value, Enum last) {
    if (value > static_cast<uint8_t>(last)) ok_ = false;
    return ok_ ? static_cast<Enum>(value) : static_cast<Enum>(0);
  }
  uint8_t Byte() {
    if (next_ == end_) {
      ok_ = false;
      return 0;
    }
    return static_cast<uint8_t>(*next_++);
  }
  bool ok() const { return ok_; }
  bool complete() const { return ok_ && next_ == end_; }

 private:
  const char* next_;
  const char* end_;
  bool ok_ = true;
};

template <typename Integer>
void Put(Writer& out, const std::vector<Integer>& integers) {
  out.Unsigned(integers.size());
  for (Integer integer : integers) out.Signed(static_cast<int64_t>(integer));
}

template <typename Integer>
void Get(Reader& in, std::vector<Integer>* integers) {
  integers->resize(in.Count());
  for (Integer& integer : *integers) integer = static_cast<Integer>(in.Signed());
}

// The end of the run that begins at `begin`; `follows(i)`: whether i continues i - 1.
template <typename Follows>
size_t EndOfRun(size_t begin, size_t size, const Follows& follows) {
  size_t end = begin + 1;
  while (end < size && end - begin < kLongestRun && follows(end)) ++end;
  return end;
}

void PutIds(Writer& out, const std::vector<uint64_t>& ids) {
  for (size_t i = 0; i < ids.size();) {
    const size_t end =
        EndOfRun(i, ids.size(), [&](size_t next) { return ids[next] == ids[next - 1] + 1; });
    out.Unsigned(end - i);
    out.Unsigned(ids[i]);
    i = end;
  }
  out.Unsigned(0);
}

void GetIds(Reader& in, std::vector<uint64_t>* ids) {
  ids->clear();
  while (const size_t count = in.Run()) {
    const uint64_t first = in.Unsigned();
    for (uint64_t i = 0; i < count && in.ok(); ++i) ids->push_back(first + i);
  }
}

// Weights, as runs of equal values.
void Put(Writer& out, const std::vector<double>& weights) {
  for (size_t i = 0; i < weights.size();) {
    const size_t end =
        EndOfRun(i, weights.size(), [&](size_t next) { return weights[next] == weights[i]; });
    out.Unsigned(end - i);
    out.Double(weights[i]);
    i = end;
  }
  out.Unsigned(0);
}

void Get(Reader& in, std::vector<double>* weights) {
  weights->clear();
  while (const size_t count = in.Run()) weights->insert(weights->end(), count, in.Double());
}

void Put(Writer& out, const Request& request) {
  out.Text(request.name);
  out.Signed(request.process_set);
  out.Unsigned(static_cast<uint8_t>(request.kind));
  out.Unsigned(static_cast<uint8_t>(request.op));
  out.Signed(request.root);
  out.Double(request.prescale);
  out.Double(request.postscale);
  out.Unsigned(request.weight.has_value());
  if (request.weight) out.Double(*request.weight);
  out.Unsigned(request.tensors.size());
  for (const Request::Tensor& tensor : request.tensors) {
    out.Unsigned(static_cast<uint8_t>(tensor.dtype));
    out.Unsigned(tensor.on_device);
    Put(out, tensor.shape);
  }
  Put(out, request.splits);
  Put(out, request.ranks);
}

Request GetRequest(Reader& in) {
  Request request;
  request.name = in.Text();
  request.process_set = static_cast<int32_t>(in.Signed());
  request.kind = in.Choice(Collective::kRemoveProcessSet);
  request.op = in.Choice(static_cast<ReduceOp>(kReduceOpCount - 1));
  request.root = static_cast<int32_t>(in.Signed());
  request.prescale = in.Double();
  request.postscale = in.Double();
  if (in.Unsigned() != 0) request.weight = in.Double();
  request.tensors.resize(in.Count());
  for (Request::Tensor& tensor : request.tensors) {
    tensor.dtype = in.Choice(DataType::kBfloat16);
    tensor.on_device = in.Unsigned() != 0;
    Get(in, &tensor.shape);
  }
  Get(in, &request.splits);
  Get(in, &request.ranks);
  return request;
}

void Put(Writer& out, const Status& status) {
  out.Unsigned(static_cast<uint64_t>(status.code()));
  out.Signed(status.rank());
  out.Text(status.message());
}

Status GetStatus(Reader& in) {
  const Code code = in.Choice(Code::kInternal);
  const int rank = static_cast<int>(in.Signed());
  return Status(code, in.Text(), rank);
}

void Put(Writer& out, const Decision& decision) {
  const Decision::Details& details = decision.details();
  out.Unsigned(static_cast<uint8_t>(decision.kind));
  switch (decision.kind) {
    case Decision::Kind::kRun:
      out.Unsigned(decision.cache_id);
      out.Signed(decision.process_set);
      out.Text(details.name);
      if (details.name.empty()) break;
      Put(out, details.rows);
      Put(out, details.weights);
      out.Unsigned(details.stand_in.has_value());
      if (details.stand_in) Put(out, *details.stand_in);
      break;
    case Decision::Kind::kFail:
      out.Text(details.name);
      out.Signed(decision.process_set);
      Put(out, details.status);
      break;
    case Decision::Kind::kLeave:
    case Decision::Kind::kAbort: Put(out, details.status); break;
    case Decision::Kind::kTimeline:
      out.Unsigned(details.timeline_on);
      out.Unsigned(details.timeline_cycles);
      break;
  }
}

Decision GetDecision(Reader& in, uint8_t kind) {
  Decision decision;
  decision.kind = in.Choice(kind, Decision::Kind::kTimeline);
  if (decision.kind == Decision::Kind::kRun) {
    decision.cache_id = in.Unsigned();
    decision.process_set = static_cast<int32_t>(in.Signed());
    std::string name = in.Text();
    if (name.empty()) return decision;
    Decision::Details& details = decision.set_details();
    details.name = std::move(name);
    Get(in, &details.rows);
    Get(in, &details.weights);
    if (in.Unsigned() != 0) details.stand_in = GetRequest(in);
    return decision;
  }
  Decision::Details& details = decision.set_details();
  switch (decision.kind) {
    case Decision::Kind::kRun: break;
    case Decision::Kind::kFail:
      details.name = in.Text();
      decision.process_set = static_cast<int32_t>(in.Signed());
      details.status = GetStatus(in);
      break;
    case Decision::Kind::kLeave:
    case Decision::Kind::kAbort: details.status = GetStatus(in); break;
    case Decision::Kind::kTimeline:
      details.timeline_on = in.Unsigned() != 0;
      details.timeline_cycles = in.Unsigned() != 0;
      break;
  }
  return decision;
}

void Put(Writer& out, const std::vector<Decision>& decisions) {
  for (const Decision& decision : decisions) {
    if (!decision.of_cached()) {
      Put(out, decision);
      continue;
    }
    const uint64_t end = decision.cache_id + decision.count;
    for (uint64_t id = decision.cache_id; id < end;) {
      const uint64_t count = std::min<uint64_t>(end - id, kLongestRun);
      out.Unsigned(kRunOfCached);
      out.Unsigned(count);
      out.Unsigned(id);
      out.Signed(decision.process_set);
      Put(out, decision.details().weights);
      id += count;
    }
  }
  out.Unsigned(kNoMore);
}

void Get(Reader& in, std::vector<Decision>* decisions) {
  decisions->clear();
  for (uint8_t kind = in.Byte(); in.ok() && kind != kNoMore; kind = in.Byte()) {
    if (kind != kRunOfCached) {
      decisions->push_back(GetDecision(in, kind));
      continue;
    }
    decisions->emplace_back();
    decisions->back().count = in.Run();
    decisions->back().cache_id = in.Unsigned();
    decisions->back().process_set = static_cast<int32_t>(in.Signed());
    std::vector<double> weights;
    Get(in, &weights);
    if (!weights.empty()) decisions->back().set_details().weights = std::move(weights);
  }
}

}  // namespace

std::string Encode(const Report& report) {
  Writer out(MessageKind::kReport);
  out.Unsigned(report.applied);
  PutIds(out, report.cached);
  Put(out, report.weights);
  out.Unsigned(report.fresh.size());
  for (const Request& request : report.fresh) Put(out, request);
  out.Unsigned((report.leaving ? 1 : 0) | (report.blocked ? 2 : 0));
  out.Text(report.reason);
  return out.Take();
}

std::string Encode(const Agreement& agreement) {
  Writer out(MessageKind::kAgreement);
  out.Unsigned(agreement.sequence);
  Put(out, agreement.decisions);
  PutIds(out, agreement.evicted);
  return out.Take();
}

std::string EncodeCombined(const std::map<std::string, std::vector<int>>& reports) {
  Writer out(MessageKind::kCombined);
  out.Unsigned(reports.size());
  for (const auto& [report, ranks] : reports) {
    Put(out, ranks);
    out.Text(report);
  }
  return out.Take();
}

std::string EncodeTrace(const std::vector<TraceEvent>& events, bool last) {
  Writer out(MessageKind::kTrace);
  out.Unsigned(last);
  out.Unsigned(events.size());
  for (const TraceEvent& event : events) {
    out.Text(event.name);
    out.Text(event.tensor);
    out.Unsigned(static_cast<uint8_t>(event.track));
    out.Unsigned((event.instant ? 1 : 0) | (event.joined ? 2 : 0));
    for (const int64_t number : {event.begin_ns, event.end_ns, event.bytes}) out.Signed(number);
    out.Signed(event.process_set);
  }
  return out.Take();
}

bool KindOf(const std::string& message, MessageKind* kind) {
  if (message.empty()) return false;
  const uint8_t byte = static_cast<uint8_t>(message[0]);
  if (byte < static_cast<uint8_t>(MessageKind::kReport) ||
      byte > static_cast<uint8_t>(MessageKind::kStatus)) {
    return false;
  }
  *kind = static_cast<MessageKind>(byte);
  return true;
}

bool Decode(const std::string& message, Report* report) {
  Reader in(message);
  if (!in.Expect(MessageKind::kReport)) return false;
  report->applied = in.Unsigned();
  GetIds(in, &report->cached);
  Get(in, &report->weights);
  report->fresh.resize(in.Count());
  for (Request& request : report->fresh) request = GetRequest(in);
  const uint64_t flags = in.Unsigned();
  report->leaving = (flags & 1) != 0;
  report->blocked = (flags & 2) != 0;
  report->reason = in.Text();
  return in.complete();
}

bool Decode(const std::string& message, Agreement* agreement) {
  Reader in(message);
  if (!in.Expect(MessageKind::kAgreement)) return false;
  agreement->sequence = in.Unsigned();
  Get(in, &agreement->decisions);
  GetIds(in, &agreement->evicted);
  return in.complete();
}

bool DecodeCombined(const std::string& message,
                    std::vector<std::pair<std::vector<int>, Report>>* reports) {
  Reader in(message);
  if (!in.Expect(MessageKind::kCombined)) return false;
  reports->resize(in.Count());
  bool understood = true;
  for (auto& [ranks, report] : *reports) {
    Get(in, &ranks);
    understood = understood && Decode(in.Text(), &report);
  }
  return in.complete() && understood;
}

bool DecodeTrace(const std::string& message, std::vector<TraceEvent>* events, bool* last) {
  Reader in(message);
  if (!in.Expect(MessageKind::kTrace)) return false;
  *last = in.Unsigned() != 0;
  events->resize(in.Count());
  for (TraceEvent& event : *events) {
    event.name = in.Text();
    event.tensor = in.Text();
    event.track = in.Choice(Track::kNegotiate);
    const uint64_t flags = in.Unsigned();
    event.instant = (flags & 1) != 0;
    event.joined = (flags & 2) != 0;
    for (int64_t* number : {&event.begin_ns, &event.end_ns, &event.bytes}) *number = in.Signed();
    event.process_set = static_cast<int32_t>(in.Signed());
  }
  return in.complete();
}

}  // namespace hororing
