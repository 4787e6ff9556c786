// The C interface: queries about the job and the engine: ranks, hosts, timeline, log, statistics.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "base/log.h"
#include "base/recorder.h"
#include "base/text.h"
#include "capi/process.h"
#include "engine/finite_watch.h"
#include "kernels/reduce.h"
#include "transport/factory.h"

using namespace hororing;

HR_EXPORT int hr_topology_now(hr_topology* topology) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return Remember(NotInitialized());
  const Topology& from = engine->topology();
  *topology = hr_topology{from.rank,       from.size,       from.local_rank, from.local_size,
                          from.cross_rank, from.cross_size, from.homogeneous};
  return HR_OK;
}
HR_OR(Caught())

HR_EXPORT int hr_group_rank_now(int32_t process_set, int32_t* rank, int32_t* size) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return Remember(NotInitialized());
  const std::shared_ptr<const ProcessSet> set = engine->sets().Share(process_set);
  const int found = set == nullptr ? -1 : set->IndexOf(engine->topology().rank);
  if (found < 0) {
    return Remember(Status(Code::kInvalidArgument,
                           "this rank is in no process set " + std::to_string(process_set)));
  }
  *rank = found;
  *size = set->size();
  return HR_OK;
}
HR_OR(Caught())

HR_EXPORT const char* hr_host_name(int32_t rank) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr || rank < 0 || rank >= engine->topology().size) return nullptr;
  const Topology& topology = engine->topology();
  thread_local std::string host;
  host = topology.hosts[static_cast<size_t>(topology.host_of[static_cast<size_t>(rank)])];
  return host.c_str();
}
HR_OR((Caught(), nullptr))

HR_EXPORT const char* hr_kernels(void) { return KernelsInUse(); }

HR_EXPORT int hr_describe_mpi(const char* mpi_library, char* text, int32_t text_bytes) try {
  MpiInfo info;
  const Status status = DescribeMpi(Text(mpi_library), &info);
  if (!status.ok()) return Remember(status);
  const std::string described = info.library + "\n" + info.thread_level + "\n" + info.path;
  CopyText(described, text, text_bytes);
  return HR_OK;
}
HR_OR(Caught())

HR_EXPORT int hr_timeline_start(const char* path, int32_t mark_cycles) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return Remember(NotInitialized());
  return Remember(engine->StartTimeline(Text(path), mark_cycles != 0));
}
HR_OR(Caught())

HR_EXPORT int hr_timeline_stop(void) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return Remember(NotInitialized());
  return Remember(engine->StopTimeline(10 * kSecond));
}
HR_OR(Caught())

HR_EXPORT int hr_timeline_enabled(void) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  return engine != nullptr && engine->trace().enabled();
}
HR_OR((Caught(), 0))

HR_EXPORT int64_t hr_now_ns(void) { return NowNs(); }

HR_EXPORT int64_t hr_digest(const void* words, int64_t count, int32_t word_bytes,
                            const int64_t* factors, int64_t chunk, int64_t chain) try {
  const auto digest = [&](const auto* from) {
    uint64_t total = 0;
    for (int64_t begin = 0; begin < count; begin += chunk, from += chunk) {
      uint64_t sum = 0;
      for (int64_t i = 0; i < std::min(chunk, count - begin); ++i) {
        sum += static_cast<uint64_t>(from[i]) * static_cast<uint64_t>(factors[i]);
      }
      total = total * static_cast<uint64_t>(chain) + sum;
    }
    return static_cast<int64_t>(total);
  };
  if (word_bytes == 1) return digest(static_cast<const int8_t*>(words));
  if (word_bytes == 2) return digest(static_cast<const int16_t*>(words));
  return digest(static_cast<const int32_t*>(words));
}
HR_OR(static_cast<int64_t>(Caught()))

HR_EXPORT int hr_take_nonfinite(int32_t on, char* text, int32_t text_bytes) try {
  finite_watch.on = on != 0;
  const std::lock_guard<std::mutex> lock(finite_watch.mutex);
  if (finite_watch.notes.empty()) return 0;
  CopyText(finite_watch.notes.front(), text, text_bytes);
  finite_watch.notes.pop_front();
  return 1;
}
HR_OR((Caught(), 0))

HR_EXPORT void hr_trace_span(int32_t stage, const char* tensor, int64_t begin_ns, int64_t end_ns,
                             int64_t bytes) try {
  const std::shared_ptr<Engine> engine = CurrentEngine();
  const bool of_callers =
      stage >= static_cast<int32_t>(Stage::kHook) && stage <= static_cast<int32_t>(Stage::kSubmit);
  if (engine == nullptr || !(of_callers || stage == static_cast<int32_t>(Stage::kGuard))) return;
  engine->trace().Span(static_cast<Stage>(stage), Track::kCaller, Text(tensor), begin_ns, end_ns,
                       bytes);
}
HR_OR(static_cast<void>(Caught()))

HR_EXPORT int hr_log_next(double timeout_s, hr_log_record* record) try {
  LogRecord taken;
  const LogTake took = TakeLog(Scaled(timeout_s, kSecond), &taken);
  if (took != LogTake::kRecord) return took == LogTake::kClosed ? -1 : 0;
  record->level = static_cast<int32_t>(taken.level);
  record->time = taken.time_s;
  constexpr size_t kRoom = sizeof record->text - 1;
  if (taken.text.size() > kRoom) taken.text = std::string(Shortened(taken.text, kRoom - 3)) + "...";
  std::memcpy(record->text, taken.text.c_str(), taken.text.size() + 1);
  return 1;
}
HR_OR((Caught(), 0))

HR_EXPORT void hr_log_close(void) { CloseLog(); }
HR_EXPORT void hr_log_open(void) { OpenLog(); }

HR_EXPORT int hr_recorder_open(int32_t file, int32_t stack_signal) try {
  return Remember(OpenRecorder(file, stack_signal));
}
HR_OR(Caught())

HR_EXPORT void hr_stats_now(hr_stats* stats) try {
  *stats = hr_stats{};
  const std::shared_ptr<Engine> engine = CurrentEngine();
  if (engine == nullptr) return;
  const Stats& from = engine->stats();
  stats->submitted = from.submitted;
  stats->completed = from.completed;
  stats->batches = from.batches;
  stats->tensors = from.tensors;
  stats->bytes = from.bytes;
  stats->cache_hits = from.cache_hits;
  stats->cache_misses = from.cache_misses;
  stats->control_messages_sent = from.control_messages_sent;
  stats->control_messages_received = from.control_messages_received;
  stats->loop_wakeups = from.loop_wakeups;
  stats->scratch_bytes = from.scratch_bytes;
  stats->trace_events_dropped = engine->trace().dropped();
  stats->fusion_bytes = from.fusion_bytes;
  stats->cycle_time_ns = from.cycle_time_ns;
  const auto allreduces = [&](AlgorithmUsed used) {
    return from.allreduces[static_cast<size_t>(used)].load();
  };
  stats->allreduces_shm_direct = allreduces(AlgorithmUsed::kShmDirect);
  stats->allreduces_three_phase = allreduces(AlgorithmUsed::kThreePhase);
  stats->allreduces_ring = allreduces(AlgorithmUsed::kRing);
  stats->allreduces_rank_order = allreduces(AlgorithmUsed::kRankOrder);
  stats->allreduces_at_once = allreduces(AlgorithmUsed::kOneShot);
}
HR_OR(static_cast<void>(Caught()))
