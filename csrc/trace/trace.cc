#include "trace/trace.h"

#include <cstring>
#include <utility>

namespace hororing {
namespace {

// Wire form: a version byte, then per event fixed-width little-endian fields and two strings
// with their lengths. All ranks run on one byte order (the protocol fingerprint sees to that).
constexpr char kWireVersion = 2;

template <typename T>
void Put(std::string* out, T value) {
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  out->append(raw, sizeof(T));
}

void PutText(std::string* out, const std::string& text) {
  Put(out, static_cast<uint32_t>(text.size()));
  out->append(text);
}

// Reads what Put wrote; once something is missing, everything after it fails too.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  template <typename T>
  bool Get(T* value) {
    if (bytes_.size() - at_ < sizeof(T)) return false;
    std::memcpy(value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }

  bool GetText(std::string* text) {
    uint32_t length = 0;
    if (!Get(&length) || bytes_.size() - at_ < length) return false;
    text->assign(bytes_, at_, length);
    at_ += length;
    return true;
  }

  bool done() const { return at_ == bytes_.size(); }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
};

}  // namespace

const char* Name(Stage stage) {
  switch (stage) {
    case Stage::kHook: return "HOOK";
    case Stage::kView: return "VIEW";
    case Stage::kSubmit: return "SUBMIT";
    case Stage::kNegotiate: return "NEGOTIATE";
    case Stage::kPlan: return "PLAN";
    case Stage::kPack: return "PACK";
    case Stage::kReduce: return "REDUCE";
    case Stage::kUnpack: return "UNPACK";
    case Stage::kComplete: return "COMPLETE";
  }
  return "?";
}

void TraceSink::Enable(bool mark_cycles) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!enabled_.load(std::memory_order_relaxed)) {
    events_.clear();
    dropped_ = 0;
  }
  mark_cycles_.store(mark_cycles, std::memory_order_relaxed);
  enabled_.store(true, std::memory_order_relaxed);
}

void TraceSink::Disable() {
  std::lock_guard<std::mutex> lock(mutex_);
  enabled_.store(false, std::memory_order_relaxed);
}

void TraceSink::Add(TraceEvent event) {
  if (!enabled()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  // Asked again under the lock: no event can slip in after Disable and the last Drain.
  if (!enabled()) return;
  if (events_.size() >= kMaxPending) {
    ++dropped_;
    return;
  }
  events_.push_back(std::move(event));
}

void TraceSink::Span(Stage stage, Track track, const std::string& tensor, TimeNs begin_ns,
                     TimeNs end_ns, int64_t bytes) {
  if (!enabled()) return;
  Add(TraceEvent{Name(stage), tensor, track, false, begin_ns, end_ns, bytes});
}

void TraceSink::CycleStart(TimeNs now) {
  if (!enabled() || !mark_cycles()) return;
  Add(TraceEvent{"CYCLE_START", "", Track::kLoop, true, now, now, -1});
}

bool TraceSink::empty() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return events_.empty();
}

std::vector<TraceEvent> TraceSink::Drain() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(events_, {});
}

int64_t TraceSink::dropped() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return dropped_;
}

std::string EncodeEvents(const std::vector<TraceEvent>& events) {
  std::string out(1, kWireVersion);
  for (const TraceEvent& event : events) {
    PutText(&out, event.name);
    PutText(&out, event.tensor);
    Put(&out, static_cast<uint8_t>(event.track));
    Put(&out, static_cast<uint8_t>(event.instant));
    Put(&out, event.begin_ns);
    Put(&out, event.end_ns);
    Put(&out, event.bytes);
    Put(&out, event.process_set);
    Put(&out, static_cast<uint8_t>(event.joined));
  }
  return out;
}

bool DecodeEvents(const std::string& bytes, std::vector<TraceEvent>* events) {
  events->clear();
  Reader reader(bytes);
  char version = 0;
  if (!reader.Get(&version) || version != kWireVersion) return false;
  while (!reader.done()) {
    TraceEvent event;
    uint8_t track = 0, instant = 0, joined = 0;
    if (!reader.GetText(&event.name) || !reader.GetText(&event.tensor) || !reader.Get(&track) ||
        !reader.Get(&instant) || !reader.Get(&event.begin_ns) || !reader.Get(&event.end_ns) ||
        !reader.Get(&event.bytes) || !reader.Get(&event.process_set) || !reader.Get(&joined) ||
        track > static_cast<uint8_t>(Track::kNegotiate) || instant > 1 || joined > 1) {
      events->clear();
      return false;
    }
    event.track = static_cast<Track>(track);
    event.instant = instant != 0;
    event.joined = joined != 0;
    events->push_back(std::move(event));
  }
  return true;
}

}  // namespace hororing
