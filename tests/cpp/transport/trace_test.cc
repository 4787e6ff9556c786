// Traces: the events in the sink, the messages on the wire, and the file for viewers.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "json.h"
#include "trace/trace.h"
#include "trace/writer.h"

namespace hororing {
namespace {

// A file that is removed at the end of the test.
class TemporaryFile {
 public:
  TemporaryFile() {
    char path[] = "/tmp/hororing_trace_XXXXXX";
    const int fd = mkstemp(path);
    if (fd >= 0) close(fd);
    path_ = path;
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }
  std::string Read() const {
    std::ifstream file(path_, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
  // The records of the file; empty unless it is one JSON array of objects.
  std::vector<json::Value> Records() const {
    json::Value array;
    if (!json::Parse(Read(), &array) || array.kind != json::Value::Kind::kArray) return {};
    return array.items;
  }

 private:
  std::string path_;
};

TraceEvent Span(const std::string& name, Track track, TimeNs begin, TimeNs end) {
  return TraceEvent{name, "weight", track, false, begin, end, 4096};
}

std::vector<json::Value> WithPhase(const std::vector<json::Value>& records,
                                   const std::string& phase) {
  std::vector<json::Value> found;
  for (const json::Value& record : records) {
    if (record["ph"].text == phase) found.push_back(record);
  }
  return found;
}

TEST(sink_keeps_nothing_while_disabled) {
  TraceSink sink;
  sink.Add(Span("PACK", Track::kLoop, 1, 2));
  sink.Span(Stage::kPack, Track::kLoop, "t", 1, 2);
  sink.CycleStart(3);
  CHECK(sink.empty());
  CHECK(!sink.enabled());
  CHECK(!sink.mark_cycles());
}

TEST(sink_hands_out_events_in_order_of_arrival) {
  TraceSink sink;
  sink.Enable(/*mark_cycles=*/false);
  sink.Span(Stage::kReduce, Track::kLoop, "t", 10, 20, 64);
  sink.CycleStart(15);  // not requested
  sink.Span(Stage::kHook, Track::kCaller, "u", 5, 6);
  CHECK(!sink.empty());
  const std::vector<TraceEvent> events = sink.Drain();
  CHECK_EQ(events.size(), size_t{2});
  CHECK_EQ(events[0].name, std::string("REDUCE"));
  CHECK_EQ(events[0].bytes, int64_t{64});
  CHECK_EQ(events[1].name, std::string("HOOK"));
  CHECK_EQ(events[1].bytes, int64_t{-1});
  CHECK(sink.empty());
}

TEST(sink_marks_cycles_on_demand_and_forgets_leftovers_when_enabled_again) {
  TraceSink sink;
  sink.Enable(/*mark_cycles=*/true);
  sink.CycleStart(15);
  CHECK_EQ(sink.Drain().size(), size_t{1});
  sink.CycleStart(16);
  sink.Disable();
  sink.Enable(/*mark_cycles=*/true);
  CHECK(sink.empty());
}

TEST(sink_counts_what_it_drops_beyond_its_limit) {
  TraceSink sink;
  sink.Enable(/*mark_cycles=*/false);
  for (size_t i = 0; i < TraceSink::kMaxPending + 3; ++i) {
    sink.Add(TraceEvent{"e", "", Track::kLoop, false, 0, 0, -1});
  }
  CHECK_EQ(sink.dropped(), int64_t{3});
  CHECK_EQ(sink.Drain().size(), TraceSink::kMaxPending);
}

TEST(sink_takes_events_from_many_threads) {
  TraceSink sink;
  sink.Enable(/*mark_cycles=*/false);
  std::vector<std::thread> threads;
  std::atomic<int> running{4};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) sink.Span(Stage::kSubmit, Track::kCaller, "t", i, i + 1);
      --running;
    });
  }
  size_t taken = 0;
  while (running > 0) taken += sink.Drain().size();
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(taken + sink.Drain().size(), size_t{4000});
}

TEST(metadata_names_every_rank_and_its_rows) {
  TemporaryFile file;
  TraceWriter writer;
  CHECK_OK(writer.Open(file.path(), {"alpha", "be\"ta"}));
  CHECK(writer.is_open());
  const std::vector<json::Value> records = file.Records();
  CHECK(!records.empty());
  if (records.empty()) return;
  CHECK_EQ(records[0]["name"].text, std::string("process_name"));
  // Between 2020 and 2100.
  const double epoch = records[0]["args"]["start_time_since_epoch_in_micros"].number;
  CHECK(epoch > 1.577e15 && epoch < 4.1e15);
  std::map<double, std::string> processes, threads;
  for (const json::Value& record : records) {
    CHECK_EQ(record["ph"].text, std::string("M"));
    CHECK(record["pid"].number >= 1);
    CHECK(record["tid"].number >= 1);
    const std::string& name = record["args"]["name"].text;
    if (record["name"].text == "process_name") processes[record["pid"].number] = name;
    if (record["name"].text == "thread_name") {
      CHECK(threads.emplace(record["tid"].number, name).second);  // unique over the file
    }
  }
  CHECK_EQ(processes[1], std::string("rank 0 (alpha)"));
  CHECK_EQ(processes[2], std::string("rank 1 (be\"ta)"));
  CHECK_EQ(threads[1], std::string("caller"));
  CHECK_EQ(threads[2], std::string("engine"));
  CHECK_EQ(threads[17], std::string("caller"));
  CHECK_EQ(threads[18], std::string("engine"));
  CHECK_OK(writer.Close());
  CHECK(!writer.is_open());
}

TEST(file_is_a_complete_array_after_every_append) {
  TemporaryFile file;
  TraceWriter writer;
  CHECK_OK(writer.Open(file.path(), {"a", "b", "c"}));
  size_t last = file.Records().size();
  CHECK(last > 0);
  const TimeNs now = NowNs();
  for (int i = 0; i < (hororing_test::kFew ? 20 : 200); ++i) {
    std::vector<TraceEvent> events;
    for (int j = 0; j <= i % 7; ++j) {
      events.push_back(Span("PACK", Track::kLoop, now + i * 100 + j, now + i * 100 + j + 1));
    }
    CHECK_OK(writer.Append(i % 3, 0, events));
    const size_t records = file.Records().size();
    CHECK_EQ(records, last + events.size());
    last = records;
  }
  CHECK_OK(writer.Append(0, 0, {}));
  CHECK_EQ(file.Records().size(), last);
  CHECK_OK(writer.Close());
  CHECK_EQ(file.Records().size(), last);
}

TEST(process_killed_in_the_middle_of_writing_leaves_a_readable_file) {
  for (int round = 0; round < 20; ++round) {
    TemporaryFile file;
    const pid_t child = fork();
    if (child == 0) {
      TraceWriter writer;
      if (!writer.Open(file.path(), {"a"}, round % 2 == 0 ? 0 : 1 << 20).ok()) _exit(1);
      for (TimeNs i = 0;; ++i) {
        std::vector<TraceEvent> events;
        for (size_t j = 0; j < 3000; ++j) {
          events.push_back(Span("REDUCE", Track::kLoop, i, i + 1));
          events.back().tensor = std::string(j % 200, 'x');
        }
        if (!writer.Append(0, 0, events).ok()) _exit(1);
      }
    }
    // Any moment is valid, so the actual duration does not matter.
    const timespec moment{0, (2 + round * 7 % 40) * 1000 * 1000};
    nanosleep(&moment, nullptr);
    kill(child, SIGKILL);
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    json::Value array;
    const std::string text = file.Read();
    // The end is missing if the process was killed while it moved.
    CHECK(text.empty() || json::Parse(text, &array) || json::Parse(text + "]", &array));
  }
}

TEST(no_record_crosses_a_page) {
  TemporaryFile file;
  TraceWriter writer;
  CHECK_OK(writer.Open(file.path(), {"a", "b"}));
  for (size_t i = 0; i < 50; ++i) {
    std::vector<TraceEvent> events;
    for (size_t j = 0; j < i; ++j) {
      events.push_back(Span("REDUCE", Track::kLoop, 1, 2));
      events.back().tensor = std::string((i * 131 + j * 17) % 3000, 'x');
    }
    CHECK_OK(writer.Append(0, 0, events));
  }
  // After a write that ends at a page boundary, the file is a JSON array except for its end: every
  // page has whole records, each after its comma.
  const std::string text = file.Read();
  size_t records = 0;
  for (size_t begin = 0; begin + 4096 < text.size(); begin += 4096) {
    std::string page = text.substr(begin, 4096);
    const size_t first = page.find_first_not_of(" \n");
    if (first == std::string::npos) continue;  // white space at the end
    CHECK(page[first] == (begin == 0 ? '[' : ','));
    page[first] = '[';
    json::Value array;
    CHECK(json::Parse(page + "]", &array));
    records += array.items.size();
  }
  CHECK(records > 1000);
}

void CheckLimit(int64_t most_bytes) {
  TemporaryFile file;
  TraceWriter writer;
  CHECK_OK(writer.Open(file.path(), {"a", "b"}, most_bytes));
  const size_t names = file.Records().size();
  TimeNs next = 0;
  for (size_t round = 0; round < (hororing_test::kFew ? 40 : 300); ++round) {
    std::vector<TraceEvent> events;
    for (size_t i = 0; i < round * 31 % 90; ++i, ++next) {
      events.push_back(Span("REDUCE", Track::kLoop, next, next + 1));
      events.back().bytes = next;
      events.back().tensor = std::string((round * 131 + i * 17) % 700, 'x');
      if (i == 50) events.back().tensor = std::string(9000, '\1');
    }
    CHECK_OK(writer.Append(static_cast<int>(round % 2), 0, events));
    const std::vector<json::Value> records = file.Records();
    CHECK(records.size() >= names);
    CHECK(static_cast<int64_t>(file.Read().size()) <= most_bytes);
    // The file has the last events, without a gap.
    std::vector<int64_t> seen;
    for (const json::Value& record : WithPhase(records, "X")) {
      seen.push_back(static_cast<int64_t>(record["args"]["bytes"].number));
    }
    std::sort(seen.begin(), seen.end());
    for (size_t i = 0; i < seen.size(); ++i) {
      CHECK_EQ(seen[i], next - static_cast<int64_t>(seen.size() - i));
    }
    CHECK(writer.wrapped() == (static_cast<TimeNs>(seen.size()) < next));
    if (writer.wrapped()) CHECK(seen.size() > static_cast<size_t>(most_bytes) / 4000);
  }
  CHECK(writer.wrapped());
  const std::string before = file.Read();
  CHECK_OK(writer.Close());
  CHECK(file.Read() == before);
  CHECK_OK(writer.Open(file.path(), {"a", "b"}, most_bytes));
  CHECK(!writer.wrapped());
}

TEST(with_a_limit_the_file_holds_the_last_part_and_is_whole_after_every_append) {
  for (const int64_t most_bytes : {20000, 200000}) CheckLimit(most_bytes);
}

TEST(a_link_of_another_user_is_not_followed) {
  if (geteuid() != 0) return;  // only root can make such a link
  TemporaryFile target, link;
  std::remove(link.path().c_str());
  CHECK_EQ(symlink(target.path().c_str(), link.path().c_str()), 0);
  TraceWriter writer;
  CHECK_OK(writer.Open(link.path(), {"a"}));  // its own link
  CHECK_EQ(lchown(link.path().c_str(), 12345, 12345), 0);
  const Status status = writer.Open(link.path(), {"a"});
  CHECK(status.code() == Code::kInvalidArgument);
  CHECK(status.message().find("link of another user") != std::string::npos);
}

TEST(a_file_of_another_user_is_refused_and_left_as_it_is) {
  if (geteuid() != 0) return;  // only root can make such a file
  TemporaryFile file;
  std::ofstream(file.path()) << "theirs";
  CHECK_EQ(chown(file.path().c_str(), 12345, 12345), 0);
  TraceWriter writer;
  const Status status = writer.Open(file.path(), {"a"});
  CHECK(status.code() == Code::kInvalidArgument);
  CHECK(status.message().find("belongs to user 12345") != std::string::npos);
  CHECK_EQ(file.Read(), std::string("theirs"));
}

TEST(a_pipe_is_refused_without_a_wait_with_and_without_a_reader) {
  TemporaryFile pipe;
  std::remove(pipe.path().c_str());
  CHECK_EQ(mkfifo(pipe.path().c_str(), 0600), 0);
  TraceWriter writer;
  const auto check = [&] {
    const Status status = writer.Open(pipe.path(), {"a"});
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(status.message().find("not a regular file") != std::string::npos);
  };
  check();
  const int reader = open(pipe.path().c_str(), O_RDONLY | O_NONBLOCK);
  check();
  close(reader);
}

TEST(records_longer_than_a_page_and_the_last_bytes_are_written_well) {
  TemporaryFile file;
  TraceWriter writer;
  CHECK_OK(writer.Open(file.path(), {"a"}));
  const size_t first = file.Records().size();
  const size_t count = hororing_test::kFew ? 5 : 40;
  for (size_t i = 1; i <= count; ++i) {
    std::vector<TraceEvent> events(1, Span("REDUCE", Track::kLoop, 1, 2));
    events[0].tensor = std::string(i * 997, 'y');
    CHECK_OK(writer.Append(0, 0, events));
    CHECK_EQ(file.Records().size(), first + i);
  }
  CHECK_OK(writer.Close());
  CHECK_EQ(file.Records().size(), first + count);
  const std::string text = file.Read();
  CHECK_EQ(text.substr(text.size() - 4), std::string("}\n]\n"));
}

TEST(times_are_microseconds_since_open_on_rank_zeros_clock) {
  TemporaryFile file;
  TraceWriter writer;
  const TimeNs before = NowNs();
  CHECK_OK(writer.Open(file.path(), {"a", "b"}));
  const TimeNs after = NowNs();
  // Rank 1's clock is 5 s behind rank 0's.
  const TimeNs offset = 5 * kSecond;
  const TimeNs begin = after - offset + 1234567;
  CHECK_OK(writer.Append(1, offset, {Span("REDUCE", Track::kLoop, begin, begin + 1001)}));
  const std::vector<json::Value> spans = WithPhase(file.Records(), "X");
  CHECK_EQ(spans.size(), size_t{1});
  if (spans.size() != 1) return;
  CHECK(spans[0]["ts"].number >= 1234.567);
  CHECK(spans[0]["ts"].number <= 1234.567 + static_cast<double>(after - before) / 1000 + 0.001);
  CHECK_EQ(spans[0]["dur"].text, std::string("1.001"));
  const std::string& ts = spans[0]["ts"].text;
  CHECK_EQ(ts.size() - ts.find('.'), size_t{4});
}

TEST(negotiations_tell_whose_they_are_and_who_had_joined) {
  TemporaryFile file;
  TraceWriter writer;
  CHECK_OK(writer.Open(file.path(), {"a"}));
  std::vector<TraceEvent> events(2, Span("NEGOTIATE_ALLREDUCE", Track::kNegotiate, 1, 2));
  events[1].process_set = 3;
  events[1].joined = true;
  CHECK_OK(writer.Append(0, 0, events));
  const std::vector<json::Value> begins = WithPhase(file.Records(), "b");
  CHECK_EQ(begins.size(), size_t{2});
  if (begins.size() != 2) return;
  CHECK_EQ(begins[0]["args"]["process_set"].text, std::string());
  CHECK_EQ(begins[1]["args"]["process_set"].number, 3.0);
  CHECK(file.Read().find("\"bytes\":4096,\"process_set\":3,\"joined\":true}") != std::string::npos);
}

TEST(times_before_open_are_negative_numbers) {
  TemporaryFile file;
  TraceWriter writer;
  CHECK_OK(writer.Open(file.path(), {"a"}));
  CHECK_OK(writer.Append(0, 0, {Span("PLAN", Track::kLoop, 0, 5)}));  // since boot
  const std::vector<json::Value> spans = WithPhase(file.Records(), "X");
  CHECK_EQ(spans.size(), size_t{1});
  if (spans.size() != 1) return;
  CHECK(spans[0]["ts"].number < 0);
  CHECK_EQ(spans[0]["dur"].text, std::string("0.005"));
}

TEST(negotiations_are_async_pairs_and_cycles_are_global_instants) {
  TemporaryFile file;
  TraceWriter writer;
  CHECK_OK(writer.Open(file.path(), {"a", "b"}));
  const TimeNs now = NowNs();
  CHECK_OK(writer.Append(1, 0,
                         {Span("NEGOTIATE_ALLREDUCE", Track::kNegotiate, now, now + 30),
                          Span("NEGOTIATE_BROADCAST", Track::kNegotiate, now + 5, now + 40),
                          {"CYCLE_START", "", Track::kLoop, true, now, now, -1}}));
  const std::vector<json::Value> records = file.Records();
  const std::vector<json::Value> begins = WithPhase(records, "b");
  const std::vector<json::Value> ends = WithPhase(records, "e");
  CHECK_EQ(begins.size(), size_t{2});
  CHECK_EQ(ends.size(), size_t{2});
  if (begins.size() != 2 || ends.size() != 2) return;
  for (size_t i = 0; i < 2; ++i) {
    CHECK_EQ(begins[i]["id"].text, ends[i]["id"].text);
    CHECK_EQ(begins[i]["name"].text, ends[i]["name"].text);
    CHECK_EQ(begins[i]["cat"].text, std::string("negotiate"));
    CHECK_EQ(begins[i]["pid"].number, 2.0);
    CHECK(begins[i]["ts"].number < ends[i]["ts"].number);
  }
  CHECK(begins[0]["id"].text != begins[1]["id"].text);
  CHECK_EQ(begins[0]["args"]["tensor"].text, std::string("weight"));
  CHECK_EQ(begins[0]["args"]["bytes"].number, 4096.0);
  const std::vector<json::Value> instants = WithPhase(records, "i");
  CHECK_EQ(instants.size(), size_t{1});
  if (instants.size() != 1) return;
  CHECK_EQ(instants[0]["name"].text, std::string("CYCLE_START"));
  CHECK_EQ(instants[0]["s"].text, std::string("g"));
  CHECK(!instants[0].Has("args"));
}

TEST(any_bytes_in_a_name_give_valid_json) {
  TemporaryFile file;
  TraceWriter writer;
  CHECK_OK(writer.Open(file.path(), {"a"}));
  std::vector<std::string> names = {"quote\" back\\slash /",
                                    "tab\t nl\n nul" + std::string(1, '\0'),
                                    "\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80",  // ae, euro, smile
                                    "cut \xe2\x82",
                                    "lone \x80 overlong \xc0\xaf \xe0\x80\xaf",
                                    "surrogate \xed\xa0\x80 big \xf5\x80\x80\x80 \xf4\x90\x80\x80"};
  std::vector<TraceEvent> events;
  for (const std::string& name : names) {
    events.push_back({name, name, Track::kLoop, false, 1, 2, -1});
  }
  std::mt19937 random(hororing_test::Seed());
  for (int i = 0; i < 2000; ++i) {
    std::string noise(random() % 12, ' ');
    for (char& c : noise) c = static_cast<char>(random());
    events.push_back({noise, noise, Track::kLoop, false, 1, 2, -1});
  }
  CHECK_OK(writer.Append(0, 0, events));
  const std::vector<json::Value> spans = WithPhase(file.Records(), "X");
  CHECK_EQ(spans.size(), events.size());
  if (spans.size() != events.size()) return;
  for (size_t i = 0; i < 3 && i < spans.size(); ++i) {  // valid text is unchanged
    CHECK_EQ(spans[i]["name"].text, names[i]);
    CHECK_EQ(spans[i]["args"]["tensor"].text, names[i]);
  }
  CHECK_EQ(spans[3]["name"].text, std::string("cut \\ufffd\\ufffd"));
}

TEST(spans_of_one_tid_nest_even_when_callers_are_several_threads) {
  TemporaryFile file;
  TraceWriter writer;
  CHECK_OK(writer.Open(file.path(), {"a"}));
  std::mt19937 random(hororing_test::Seed());
  for (int append = 0; append < 20; ++append) {
    std::vector<TraceEvent> events;
    for (int thread = 0; thread < 5; ++thread) {  // each with its own sequence of spans
      TimeNs at = append * 10000;
      while (at < (append + 1) * 10000 - 900) {
        const TimeNs begin = at + static_cast<TimeNs>(random() % 400);
        at = begin + static_cast<TimeNs>(random() % 500);
        events.push_back(Span("SUBMIT", Track::kCaller, begin, at));
      }
    }
    CHECK_OK(writer.Append(0, 0, events));
  }
  std::map<double, std::vector<std::pair<double, double>>> rows;
  const std::vector<json::Value> records = file.Records();
  for (const json::Value& record : WithPhase(records, "X")) {
    rows[record["tid"].number].push_back(
        {record["ts"].number, record["ts"].number + record["dur"].number});
  }
  CHECK(rows.size() >= 2);
  CHECK(rows.size() <= 6);
  size_t crossings = 0;
  for (const auto& row : rows) {
    for (const auto& a : row.second) {
      for (const auto& b : row.second) {
        if (a.first < b.first - 1e-4 && b.first < a.second - 1e-4 && a.second < b.second - 1e-4) {
          ++crossings;
        }
      }
    }
  }
  CHECK_EQ(crossings, size_t{0});
  for (const json::Value& record : WithPhase(records, "M")) rows.erase(record["tid"].number);
  CHECK(rows.empty());  // every row has a name
}

TEST(errors_say_which_file_and_why) {
  TraceWriter writer;
  const Status missing = writer.Open("/nonexistent/dir/t.json", {"a"});
  CHECK(missing.code() == Code::kInvalidArgument);
  CHECK(missing.message().find("/nonexistent/dir/t.json") != std::string::npos);
  CHECK(!writer.is_open());
  CHECK(!writer.Open("/dev/full", {"a"}).ok());
  CHECK(!writer.is_open());
  CHECK(!writer.Append(0, 0, {Span("PACK", Track::kLoop, 1, 2)}).ok());
  CHECK_OK(writer.Close());
  TemporaryFile file;
  CHECK_OK(writer.Open(file.path(), {"a"}));
  CHECK(writer.Append(1, 0, {Span("PACK", Track::kLoop, 1, 2)}).code() == Code::kInternal);
}

TEST(opening_another_file_closes_the_first) {
  TemporaryFile first, second;
  TraceWriter writer;
  CHECK_OK(writer.Open(first.path(), {"a"}));
  CHECK_OK(writer.Append(0, 0, {Span("PACK", Track::kLoop, 1, 2)}));
  CHECK_OK(writer.Open(second.path(), {"a"}));
  CHECK_OK(writer.Append(0, 0, {Span("REDUCE", Track::kLoop, 3, 4)}));
  CHECK_EQ(WithPhase(first.Records(), "X").size(), size_t{1});
  const std::vector<json::Value> spans = WithPhase(second.Records(), "X");
  CHECK_EQ(spans.size(), size_t{1});
  if (spans.size() != 1) return;
  CHECK_EQ(spans[0]["name"].text, std::string("REDUCE"));
}

}  // namespace
}  // namespace hororing
