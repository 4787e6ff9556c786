// Rung 1: the tuning of the coordinator's queue, with a simulated clock and network.
#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "negotiation/coordinator.h"

using namespace hororing;

namespace {

using Names = std::vector<std::string>;

// Two ranks that submit the same tensors at the same time, and cache and forget ids like engines.
class World {
 public:
  World(const Coordinator::Options& options, std::function<double(int64_t)> seconds)
      : coordinator(options), seconds_(std::move(seconds)) {}

  // Runs a step: submits all `tensors`, then reduces them.
  void Play(const std::vector<Request>& tensors) {
    batches.clear();
    Report report;
    for (const Request& each : tensors) {
      bytes_[each.name] = each.bytes();
      const auto id = ids_.find(each.name);
      coordinator.queue().Submitted(each, id == ids_.end() ? 0 : id->second, now_);
      if (id == ids_.end()) {
        report.fresh.push_back(each);
      } else {
        report.cached.push_back(id->second);
      }
    }
    for (int rank : {0, 1}) coordinator.Receive(rank, report, now_);
    while (const auto agreement = coordinator.Decide()) Run(*agreement);
    now_ += kMillisecond;
  }

  Coordinator coordinator;
  std::vector<Names> batches;        // of the latest step, in the order of agreement
  TimeNs cycle_time = 0, tried = 0;  // the latest one; the one of the latest batch

 private:
  void Run(const Agreement& agreement) {
    Names batch;
    int64_t bytes = 0;
    for (const Decision& decision : agreement.decisions) {
      if (decision.kind == Decision::Kind::kTune) {
        cycle_time = decision.details().cycle_time_ns;
        continue;
      }
      tried = cycle_time;
      const std::string& fresh = decision.details().name;
      if (!fresh.empty()) {
        ids_[fresh] = decision.cache_id;
        names_[decision.cache_id] = fresh;
      }
      for (uint64_t id = decision.cache_id; id < decision.cache_id + decision.count; ++id) {
        const std::string& name = names_.at(id);
        bytes += bytes_.at(name);
        batch.push_back(name);
      }
    }
    for (const uint64_t id : agreement.evicted) {
      ids_.erase(names_.at(id));
      names_.erase(id);
    }
    if (batch.empty()) return;
    now_ += static_cast<TimeNs>(seconds_(bytes) * 1e9);
    coordinator.queue().Ran(bytes, now_);
    batches.push_back(std::move(batch));
  }

  std::function<double(int64_t)> seconds_;  // of a batch, by its bytes
  TimeNs now_ = kSecond;
  std::map<std::string, int64_t> bytes_;
  std::map<std::string, uint64_t> ids_;
  std::map<uint64_t, std::string> names_;
};

Coordinator::Options Tuned(const Tuner::Options& tune) {
  Coordinator::Options options;
  options.size = 2;
  options.cache_capacity = 1000;
  options.tune = tune;
  options.tune->initial = {64 << 20, kMillisecond};
  return options;
}

std::vector<Request> Layers(size_t count, int64_t bytes) {
  std::vector<Request> layers(count);
  for (size_t i = 0; i < count; ++i) {
    layers[i].name = "layer" + std::to_string(i);
    layers[i].tensors = {{DataType::kUint8, {bytes}}};
  }
  return layers;
}

}  // namespace

TEST(a_step_ends_when_one_of_its_tensors_comes_again) {
  StepWatch watch;
  watch.Ran(5, 50);                            // a batch from before
  CHECK(!watch.Submitted(0, 90).has_value());  // not cached
  CHECK(!watch.Submitted(1, 100).has_value());
  CHECK(!watch.Submitted(2, 110).has_value());
  watch.Ran(10, 150);
  watch.Ran(20, 200);
  const std::optional<Step> step = watch.Submitted(2, 300);
  CHECK(step.has_value());
  CHECK_EQ(step->begin_ns, TimeNs{90});
  CHECK_EQ(step->end_ns, TimeNs{200});
  CHECK_EQ(step->bytes, int64_t{30});
  CHECK(!watch.Submitted(1, 310).has_value());
  CHECK_EQ(watch.Submitted(1, 400)->begin_ns, TimeNs{300});
}

TEST(nothing_is_tuned_by_what_is_not_of_all_ranks_or_no_allreduce) {
  Tuner::Options tune;
  tune.steps_per_sample = tune.warmup_samples = 1;
  const auto tuned = [&](Collective kind, int32_t process_set) {
    Coordinator coordinator(Tuned(tune));
    ReadyQueue& queue = coordinator.queue();
    Request request;
    request.kind = kind;
    request.process_set = process_set;
    for (TimeNs step = 1; step < 5; ++step) {
      queue.Submitted(request, 1, step * kSecond);
      queue.Ran(1000, step * kSecond + 1);
    }
    return queue.tuner()->TakeLog().size() > 1;
  };
  CHECK(tuned(Collective::kAllreduce, kWorldSet));
  CHECK(!tuned(Collective::kAllgather, kWorldSet));
  CHECK(!tuned(Collective::kAllreduce, 1));
}

// Ranks forget an evicted id when they apply the eviction, which must follow all requests by it.
TEST(an_id_that_the_rest_of_a_cut_queue_goes_by_is_not_evicted_before_it) {
  Tuner::Options tune;
  tune.tune_cycle_time = false;
  tune.steps_per_sample = 1;
  Coordinator::Options options = Tuned(tune);
  options.cache_capacity = 5;  // the last two evict ids that are in the queue
  World world(options, [](int64_t) { return 1e-3; });
  size_t most = 0;
  for (int i = 0; i < 100; ++i) {
    std::vector<Request> step = Layers(7, 16 << 20);
    for (size_t last : {5, 6}) step[last].name += ".of_step" + std::to_string(i);
    world.Play(step);
    most = std::max(most, world.batches.size());
  }
  CHECK(most > 1);  // some thresholds cut the queue
}

TEST(tuning_settles_on_the_fastest_threshold_and_writes_down_how) {
  Tuner::Options tune;
  tune.steps_per_sample = 2;
  // Batches that do not fit into the cache take much longer.
  World world(Tuned(tune), [](int64_t bytes) {
    return 1e-4 + (bytes > 8 << 20 ? 1e-8 : 1e-9) * static_cast<double>(bytes);
  });
  const std::vector<Request> step = Layers(64, 1 << 20);
  Tuner& tuner = *world.coordinator.queue().tuner();
  std::vector<std::string> log;
  for (int i = 0; i < 400 && !tuner.done(); ++i) {
    world.Play(step);
    for (std::string& line : tuner.TakeLog()) log.push_back(line);
  }
  CHECK(tuner.done());
  CHECK_EQ(tuner.setting().fusion_bytes, int64_t{8} << 20);
  CHECK(log.front().find("fusion_bytes") != std::string::npos);
  CHECK(log.back().find(",best,8388608,") != std::string::npos);
  // 3 warm-up samples, then 9 candidates once, 5 twice, 3 four times, 2 eight times.
  CHECK_EQ(log.size(), size_t{1 + 3 + 9 + 10 + 12 + 16 + 1});
  world.Play(step);
  for (const Names& batch : world.batches) CHECK(batch.size() <= 8);
}

// The process was not scheduled for a while, or a packet was sent again.
TEST(one_slow_step_does_not_decide_between_two) {
  Tuner::Options options;
  options.initial = {512 << 10, 0};  // the smallest candidate is an eighth of it
  options.warmup_samples = 0;
  options.steps_per_sample = 1;
  for (int slow = 0; slow < 6; ++slow) {
    Tuner tuner(options);
    int steps = 0;
    while (!tuner.done() && steps < 100) {
      const bool small = tuner.setting().fusion_bytes == 64 << 10;  // twice as fast
      Step step;
      step.bytes = 1000;
      step.end_ns = (small ? 1000 : 2000) + (steps++ == slow ? 10000 : 0);
      tuner.Learn(step);
    }
    CHECK_EQ(steps, 6);
    CHECK_EQ(tuner.setting().fusion_bytes, int64_t{64} << 10);
  }
}

TEST(all_ranks_hear_of_what_is_tried_before_the_step_that_tries_it) {
  Tuner::Options tune;
  tune.tune_fusion = false;
  tune.warmup_samples = tune.steps_per_sample = 1;
  World world(Tuned(tune), [](int64_t bytes) { return 4e-3 + 1e-8 * static_cast<double>(bytes); });
  const std::vector<Request> step = Layers(3, 1 << 20);
  const Tuner& tuner = *world.coordinator.queue().tuner();
  int changes = 0;
  for (int i = 0; i < 100 && !tuner.done(); ++i) {
    const TimeNs before = world.cycle_time;
    world.Play(step);
    changes += world.cycle_time == before ? 0 : 1;
    CHECK_EQ(world.cycle_time, world.tried);  // its batches were reduced with it
  }
  CHECK(tuner.done());
  CHECK(changes > 5);
  for (int i = 0; i < 3; ++i) world.Play(step);
  CHECK_EQ(world.cycle_time, tuner.setting().cycle_time_ns);
}

TEST(what_is_not_to_be_tuned_stays) {
  Tuner::Options options;
  options.initial = {1 << 20, kMillisecond};
  options.tune_fusion = options.tune_cycle_time = false;
  CHECK(Tuner(options).done());
  options.tune_cycle_time = true;
  options.warmup_samples = 0;
  options.steps_per_sample = 1;
  Tuner tuner(options);
  std::set<TimeNs> cycle_times;
  for (TimeNs i = 0; !tuner.done() && i < 100; ++i) {
    CHECK_EQ(tuner.setting().fusion_bytes, int64_t{1} << 20);
    cycle_times.insert(tuner.setting().cycle_time_ns);
    Step step;
    step.bytes = 1000;
    step.end_ns = 1000 + tuner.setting().cycle_time_ns;
    tuner.Learn(step);
  }
  CHECK(tuner.done());
  CHECK(cycle_times == (std::set<TimeNs>{0, kMillisecond, 5 * kMillisecond}));
  CHECK_EQ(tuner.setting().cycle_time_ns, TimeNs{0});
}
