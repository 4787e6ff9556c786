#include "negotiation/codec.h"

#include <cstring>

namespace hororing {
namespace {

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
  void Run(uint64_t count) { Unsigned(count); }
  void Flag(bool value) { Unsigned(value); }
  bool Has(bool there) {
    Flag(there);
    return there;
  }
  template <typename Enum>
  void Choice(Enum value, Enum /*last*/) {
    Unsigned(static_cast<uint64_t>(value));
  }
  template <typename Items>
  void Resize(const Items& items) {
    Unsigned(items.size());
  }
  // Consecutive ids, as in most steps, are a run: their number and the first.
  void Ids(const std::vector<uint64_t>& ids) {
    for (size_t begin = 0, end; begin < ids.size(); begin = end) {
      end = begin + 1;
      while (end < ids.size() && end - begin < kLongestRun && ids[end] == ids[end - 1] + 1) ++end;
      Unsigned(end - begin);
      Unsigned(ids[begin]);
    }
    Unsigned(0);
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Like a Writer, reads what that writes; from the first malformed item on zeros, and ok() is false.
class Reader {
 public:
  explicit Reader(const std::string& bytes)
      : next_(bytes.data()), end_(bytes.data() + bytes.size()) {}

  bool Expect(MessageKind kind) { return Byte() == static_cast<uint8_t>(kind) && ok_; }
  uint64_t Number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t byte = Byte();
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) return value;
    }
    return Fail();
  }
  void Unsigned(uint64_t& value) { value = Number(); }
  template <typename Integer>
  void Signed(Integer& value) {
    const uint64_t number = Number();
    value = static_cast<Integer>((number >> 1) ^ (~(number & 1) + 1));
  }
  void Double(double& value) {
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits |= static_cast<uint64_t>(Byte()) << (8 * i);
    std::memcpy(&value, &bits, sizeof value);
  }
  void Text(std::string& value) {
    const size_t size = Count();
    value.assign(next_, size);
    next_ += size;
  }
  // The length of a run; 0 if there is none or it is malformed.
  void Run(uint64_t& count) {
    count = Number();
    if (count > kLongestRun) count = Fail();
  }
  void Flag(bool& value) { value = Number() != 0; }
  bool Has(bool /*there*/) { return Number() != 0; }
  template <typename Enum>
  void Choice(Enum& value, Enum last) {
    const uint64_t number = Number();
    value = static_cast<Enum>(number <= static_cast<uint64_t>(last) ? number : Fail());
  }
  // Items take at least one byte each, so the remaining bytes bound their number.
  template <typename Items>
  void Resize(Items& items) {
    items.clear();
    items.resize(Count());
  }
  void Ids(std::vector<uint64_t>& ids) {
    ids.clear();
    uint64_t count = 0, first = 0;
    for (Run(count); count > 0; Run(count)) {
      Unsigned(first);
      if (ids.size() + count > kMostIds) Fail();
      for (uint64_t i = 0; i < count && ok_; ++i) ids.push_back(first + i);
    }
  }
  bool complete() const { return ok_ && next_ == end_; }

 private:
  uint64_t Fail() {
    ok_ = false;
    next_ = end_;
    return 0;
  }
  uint8_t Byte() {
    if (next_ == end_) return static_cast<uint8_t>(Fail());
    return static_cast<uint8_t>(*next_++);
  }
  size_t Count() {
    const uint64_t count = Number();
    return static_cast<size_t>(count > static_cast<uint64_t>(end_ - next_) ? Fail() : count);
  }

  const char* next_;
  const char* end_;
  bool ok_ = true;
};

// What Fields writes to, or fills in.
template <typename Item>
const Item& Made(const std::optional<Item>& item) {
  return *item;
}
template <typename Item>
Item& Made(std::optional<Item>& item) {
  return item.emplace();
}
const Decision::Details& Made(const Decision& decision) { return decision.details(); }
Decision::Details& Made(Decision& decision) { return decision.set_details(); }

// Each Fields names the fields of a type once, for a Writer and a Reader.

template <typename Wire, typename Integers>
void SignedNumbers(Wire& wire, Integers& integers) {
  wire.Resize(integers);
  for (auto& integer : integers) wire.Signed(integer);
}

template <typename Wire, typename Numbers>
void Doubles(Wire& wire, Numbers& numbers) {
  wire.Resize(numbers);
  for (auto& number : numbers) wire.Double(number);
}

void Fields(Writer& out, const Status& status) {
  out.Choice(status.code(), Code::kInternal);
  out.Signed(status.rank());
  out.Text(status.message());
}
void Fields(Reader& in, Status& status) {
  Code code = Code::kOk;
  int rank = -1;
  std::string message;
  in.Choice(code, Code::kInternal);
  in.Signed(rank);
  in.Text(message);
  status = Status(code, std::move(message), rank);
}

template <typename Wire, typename OneRequest>
void RequestFields(Wire& wire, OneRequest& request) {
  wire.Text(request.name);
  wire.Signed(request.process_set);
  wire.Choice(request.kind, Collective::kRemoveProcessSet);
  wire.Choice(request.op, static_cast<ReduceOp>(kReduceOpCount - 1));
  wire.Signed(request.root);
  wire.Double(request.prescale);
  wire.Double(request.postscale);
  if (wire.Has(request.weight.has_value())) wire.Double(Made(request.weight));
  wire.Resize(request.tensors);
  for (auto& tensor : request.tensors) {
    wire.Choice(tensor.dtype, static_cast<DataType>(kCopiedTypeCount - 1));
    wire.Flag(tensor.on_device);
    SignedNumbers(wire, tensor.shape);
  }
  SignedNumbers(wire, request.splits);
  SignedNumbers(wire, request.ranks);
}

// Only decisions on cached requests have no details, and they are runs already.
template <typename Wire, typename OneDecision>
void DecisionFields(Wire& wire, OneDecision& decision) {
  wire.Choice(decision.kind, Decision::Kind::kTimeline);
  wire.Signed(decision.process_set);
  wire.Unsigned(decision.cache_id);
  wire.Run(decision.count);
  if (!wire.Has(decision.has_details())) return;
  auto& details = Made(decision);
  wire.Text(details.name);
  Fields(wire, details.status);
  SignedNumbers(wire, details.rows);
  Doubles(wire, details.weights);
  if (wire.Has(details.neutral.has_value())) RequestFields(wire, Made(details.neutral));
  wire.Flag(details.timeline_on);
  wire.Flag(details.timeline_cycles);
}

template <typename Wire, typename OneReport>
void ReportFields(Wire& wire, OneReport& report) {
  wire.Unsigned(report.applied);
  wire.Ids(report.cached);
  Doubles(wire, report.weights);
  wire.Resize(report.fresh);
  for (auto& request : report.fresh) RequestFields(wire, request);
  wire.Flag(report.leaving);
  wire.Flag(report.blocked);
  wire.Text(report.reason);
}

template <typename Wire, typename OneAgreement>
void AgreementFields(Wire& wire, OneAgreement& agreement) {
  wire.Unsigned(agreement.sequence);
  wire.Resize(agreement.decisions);
  for (auto& decision : agreement.decisions) DecisionFields(wire, decision);
  wire.Ids(agreement.evicted);
}

template <typename Wire, typename Events, typename Last>
void TraceFields(Wire& wire, Events& events, Last& last) {
  wire.Flag(last);
  wire.Resize(events);
  for (auto& event : events) {
    wire.Text(event.name);
    wire.Text(event.tensor);
    wire.Choice(event.track, Track::kNegotiate);
    wire.Flag(event.instant);
    wire.Flag(event.joined);
    wire.Signed(event.begin_ns);
    wire.Signed(event.end_ns);
    wire.Signed(event.bytes);
    wire.Signed(event.process_set);
  }
}

}  // namespace

std::string Encode(const Request& request) {
  Writer out(MessageKind::kReport);
  RequestFields(out, request);
  return out.Take();
}

std::string Encode(const Report& report) {
  Writer out(MessageKind::kReport);
  ReportFields(out, report);
  return out.Take();
}

std::string Encode(const Agreement& agreement) {
  Writer out(MessageKind::kAgreement);
  AgreementFields(out, agreement);
  return out.Take();
}

std::string EncodeCombined(const std::map<std::string, std::vector<int>>& reports) {
  Writer out(MessageKind::kCombined);
  out.Resize(reports);
  for (const auto& [report, ranks] : reports) {
    SignedNumbers(out, ranks);
    out.Text(report);
  }
  return out.Take();
}

std::string EncodeTrace(const std::vector<TraceEvent>& events, bool last) {
  Writer out(MessageKind::kTrace);
  TraceFields(out, events, last);
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
  ReportFields(in, *report);
  return in.complete();
}

bool Decode(const std::string& message, Agreement* agreement) {
  Reader in(message);
  if (!in.Expect(MessageKind::kAgreement)) return false;
  AgreementFields(in, *agreement);
  return in.complete();
}

bool DecodeCombined(const std::string& message,
                    std::vector<std::pair<std::vector<int>, Report>>* reports) {
  Reader in(message);
  if (!in.Expect(MessageKind::kCombined)) return false;
  in.Resize(*reports);
  bool understood = true;
  std::string text;
  for (auto& [ranks, report] : *reports) {
    SignedNumbers(in, ranks);
    in.Text(text);
    understood = understood && Decode(text, &report);
  }
  return in.complete() && understood;
}

bool DecodeTrace(const std::string& message, std::vector<TraceEvent>* events, bool* last) {
  Reader in(message);
  if (!in.Expect(MessageKind::kTrace)) return false;
  TraceFields(in, *events, *last);
  return in.complete();
}

}  // namespace hororing
