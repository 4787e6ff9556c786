#include "trace/writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace hororing {
namespace {

constexpr char kTail[] = "\n]\n";
constexpr int64_t kTailBytes = sizeof(kTail) - 1;
constexpr size_t kPage = 4096;    // or a multiple of it
constexpr size_t kMaxName = 600;  // also as escapes of six bytes, it leaves room in a page
constexpr int64_t kMinReserve = 64 << 10, kMaxReserve = 1 << 20;
constexpr int kTidsPerRank = 16;
constexpr size_t kRowMemory = 64;  // spans of a row that a later one is compared with

// Length of the well-formed UTF-8 sequence at text[at] (RFC 3629), 0 if there is none.
size_t Utf8Length(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const unsigned lead = byte(at);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  const size_t length = lead < 0xE0 ? 2 : (lead < 0xF0 ? 3 : 4);
  // Of the second byte: no overlong form, no surrogate, no number beyond U+10FFFF.
  const unsigned low = lead == 0xE0 ? 0xA0 : (lead == 0xF0 ? 0x90 : 0x80);
  const unsigned high = lead == 0xED ? 0x9F : (lead == 0xF4 ? 0x8F : 0xBF);
  if (byte(at + 1) < low || byte(at + 1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (byte(at + i) < 0x80 || byte(at + i) > 0xBF) return 0;
  }
  return length;
}

// `text` as a JSON string (RFC 8259); invalid UTF-8 becomes U+FFFD.
std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const size_t length = Utf8Length(text, i);
    const char c = text[i];
    if (length == 0) {
      out += "\\ufffd";
      ++i;
      continue;
    }
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (length == 1 && (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out.append(text, i, length);
    }
    i += length;
  }
  return out + '"';
}

// Microseconds with three decimals: exact, so that rounding cannot make spans cross.
std::string Micros(TimeNs ns) {
  const uint64_t size = ns < 0 ? 0 - static_cast<uint64_t>(ns) : static_cast<uint64_t>(ns);
  char text[32];
  std::snprintf(text, sizeof(text), "%s%" PRIu64 ".%03" PRIu64, ns < 0 ? "-" : "", size / 1000,
                size % 1000);
  return text;
}

int Tid(int rank, Track track) { return kTidsPerRank * rank + static_cast<int>(track) + 1; }

std::string Head(const std::string& name, const char* phase, int rank, int tid) {
  return ",\n{\"name\":" + Quoted(name) + ",\"ph\":\"" + phase +
         "\",\"pid\":" + std::to_string(rank + 1) + ",\"tid\":" + std::to_string(tid);
}

// `args` is the inside of a JSON object.
std::string Metadata(const char* name, int rank, int tid, const std::string& args) {
  return Head(name, "M", rank, tid) + ",\"args\":{" + args + "}}";
}

std::string ThreadName(int rank, int tid, const std::string& name, int order) {
  return Metadata("thread_name", rank, tid, "\"name\":" + Quoted(name)) +
         Metadata("thread_sort_index", rank, tid, "\"sort_index\":" + std::to_string(order));
}

std::string Arguments(const TraceEvent& event) {
  std::string args;
  std::string name = event.tensor;
  if (name.size() > kMaxName) name.replace(kMaxName / 2, name.size() - kMaxName, "...");
  if (!name.empty()) args += ",\"tensor\":" + Quoted(name);
  if (event.bytes >= 0) args += ",\"bytes\":" + std::to_string(event.bytes);
  if (event.process_set != 0) args += ",\"process_set\":" + std::to_string(event.process_set);
  if (event.joined) args += ",\"joined\":true";
  return args.empty() ? args : ",\"args\":{" + args.substr(1) + "}";
}

// An empty file at `path`; or -1, and why it is not one that this process may use.
int OpenFile(const std::string& path, std::string* why) {
  struct stat found = {};
  const auto trusted = [&found] { return found.st_uid == geteuid() || found.st_uid == 0; };
  const bool follow = lstat(path.c_str(), &found) == 0 && trusted();
  const int flags = O_WRONLY | O_CREAT | O_NONBLOCK | O_CLOEXEC;  // a pipe may have no reader
  int fd = open(path.c_str(), flags | O_EXCL, 0666);
  if (fd >= 0) return fd;
  fd = open(path.c_str(), flags | (follow ? 0 : O_NOFOLLOW), 0666);
  if (fd < 0 && S_ISLNK(found.st_mode) && !follow) {
    *why = "it is a link of another user";
  } else if (fd < 0 && errno != ENXIO) {
    *why = std::strerror(errno);
  } else if (fd < 0 || fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) {
    *why = "it is not a regular file";
  } else if (!trusted()) {
    *why = "it belongs to user " + std::to_string(found.st_uid);
  } else if (ftruncate(fd, 0) != 0) {
    *why = std::strerror(errno);
  } else {
    return fd;
  }
  if (fd >= 0) close(fd);
  return -1;
}

}  // namespace

TraceWriter::~TraceWriter() {
  if (fd_ >= 0) close(fd_);  // the file is complete already; errors cannot be reported here
}

Status TraceWriter::Open(const std::string& path, const std::vector<std::string>& hosts,
                         int64_t max_bytes) {
  HORORING_RETURN_IF_ERROR(Close());
  std::string why;
  fd_ = OpenFile(path, &why);
  if (fd_ < 0) {
    return Status(Code::kInvalidArgument, "cannot write the timeline '" + path + "': " + why +
                                              "; give a path in a writable directory");
  }
  path_ = path;
  tail_ = end_ = 0;
  next_async_id_ = 1;
  caller_rows_.assign(hosts.size(), std::vector<Row>(1));
  timespec wall{};
  clock_gettime(CLOCK_REALTIME, &wall);
  origin_ns_ = NowNs();
  const int64_t epoch_us = static_cast<int64_t>(wall.tv_sec) * 1000000 + wall.tv_nsec / 1000;

  std::string text;
  for (size_t r = 0; r < hosts.size(); ++r) {
    const int rank = static_cast<int>(r);
    const int first_tid = Tid(rank, Track::kCaller);
    std::string args = "\"name\":" + Quoted("rank " + std::to_string(rank) + " (" + hosts[r] + ")");
    if (rank == 0) args += ",\"start_time_since_epoch_in_micros\":" + std::to_string(epoch_us);
    text += Metadata("process_name", rank, first_tid, args);
    text +=
        Metadata("process_sort_index", rank, first_tid, "\"sort_index\":" + std::to_string(rank));
    text += ThreadName(rank, first_tid, "caller", 0);
    text += ThreadName(rank, Tid(rank, Track::kLoop), "engine", 1);
    text += ThreadName(rank, Tid(rank, Track::kNegotiate), "negotiation", 2);
    caller_rows_[r][0].named = true;
  }
  // The array opens where the first record's comma would stand.
  text = text.empty() ? "[" : "[" + text.substr(1);
  wrapped_ = false;
  ring_begin_ = ring_end_ = 0;
  if (max_bytes > 0) {
    text.resize((text.size() + kPage - 1) / kPage * kPage, ' ');
    ring_begin_ = static_cast<int64_t>(text.size());
    const int64_t page = static_cast<int64_t>(kPage);
    ring_end_ = std::max(ring_begin_ + 2 * page, (max_bytes - kTailBytes) / page * page);
  }
  const Status status = WriteAt(text + kTail, 0);
  tail_ = end_ = static_cast<int64_t>(text.size());
  if (!status.ok()) {
    close(fd_);
    fd_ = -1;
    return Status(Code::kInvalidArgument, status.message());
  }
  return status;
}

// Adds nothing and returns false if the span would cross one of the row.
bool TraceWriter::Row::Add(TimeNs begin_ns, TimeNs end_ns) {
  // Spans arrive by their end (see Append): an earlier one is inside, before, or across the begin.
  size_t inside = outermost.size();
  while (inside > 0 && outermost[inside - 1].begin_ns >= begin_ns) --inside;
  if (inside > 0 && outermost[inside - 1].end_ns > begin_ns) return false;
  if (inside < outermost.size() && outermost.back().end_ns > end_ns) return false;
  outermost.resize(inside);
  if (outermost.size() >= kRowMemory) outermost.erase(outermost.begin());
  outermost.push_back({begin_ns, end_ns});
  return true;
}

int TraceWriter::CallerTid(int rank, TimeNs begin_ns, TimeNs end_ns, std::string* text) {
  // Rows beyond the first use the tids after the last track's.
  constexpr size_t kMaxRows = kTidsPerRank - 2;
  std::vector<Row>& rows = caller_rows_[static_cast<size_t>(rank)];
  size_t row = 0;
  while (row < rows.size() && !rows[row].Add(begin_ns, end_ns)) ++row;
  if (row == rows.size()) {
    if (rows.size() == kMaxRows) return Tid(rank, Track::kCaller);
    rows.resize(row + 1);
    rows[row].Add(begin_ns, end_ns);
  }
  const int tid =
      row == 0 ? Tid(rank, Track::kCaller) : Tid(rank, Track::kNegotiate) + static_cast<int>(row);
  if (!rows[row].named) {
    rows[row].named = true;
    *text += ThreadName(rank, tid, "caller " + std::to_string(row + 1), 2 + static_cast<int>(row));
  }
  return tid;
}

Status TraceWriter::Append(int rank, TimeNs clock_offset_ns,
                           const std::vector<TraceEvent>& events) {
  if (fd_ < 0) return Status(Code::kInternal, "the timeline is not open");
  if (rank < 0 || static_cast<size_t>(rank) >= caller_rows_.size()) {
    return Status(Code::kInternal, "no rank " + std::to_string(rank) + " in the timeline '" +
                                       path_ + "' of " + std::to_string(caller_rows_.size()) +
                                       " ranks");
  }
  if (events.empty()) return Status::Ok();
  std::vector<const TraceEvent*> ordered;
  ordered.reserve(events.size());
  for (const TraceEvent& event : events) ordered.push_back(&event);
  std::stable_sort(ordered.begin(), ordered.end(),
                   [](const TraceEvent* a, const TraceEvent* b) { return a->end_ns < b->end_ns; });

  std::string text;
  for (const TraceEvent* event : ordered) {
    const TimeNs begin = event->begin_ns + clock_offset_ns - origin_ns_;
    const TimeNs end = std::max(begin, event->end_ns + clock_offset_ns - origin_ns_);
    if (event->instant) {
      text += Head(event->name, "i", rank, Tid(rank, event->track)) + ",\"ts\":" + Micros(begin) +
              ",\"s\":\"g\"" + Arguments(*event) + "}";
    } else if (event->track == Track::kNegotiate) {
      // An asynchronous pair: negotiations of different tensors overlap without nesting.
      const std::string id =
          ",\"cat\":\"negotiate\",\"id\":\"" + std::to_string(next_async_id_++) + "\",\"ts\":";
      const int tid = Tid(rank, event->track);
      text += Head(event->name, "b", rank, tid) + id + Micros(begin) + Arguments(*event) + "}";
      text += Head(event->name, "e", rank, tid) + id + Micros(end) + "}";
    } else {
      const int tid = event->track == Track::kCaller ? CallerTid(rank, begin, end, &text)
                                                     : Tid(rank, event->track);
      text += Head(event->name, "X", rank, tid) + ",\"ts\":" + Micros(begin) +
              ",\"dur\":" + Micros(end - begin) + Arguments(*event) + "}";
    }
  }
  return Write(text);
}

// `records` begin with ",\n{" each, which occurs nowhere else in them.
Status TraceWriter::Write(const std::string& records) {
  std::string block;
  size_t length = 0;
  const auto padding = [&] {
    const size_t room = kPage - (static_cast<size_t>(tail_) + block.size()) % kPage;
    return length > room ? room : 0;
  };
  for (size_t at = 0; at < records.size(); at += length) {
    length = std::min(records.find(",\n{", at + 1), records.size()) - at;
    const int64_t end = tail_ + static_cast<int64_t>(block.size() + padding() + length);
    if (ring_end_ > 0 && end > ring_end_) HORORING_RETURN_IF_ERROR(Wrap(&block));
    block.append(padding(), ' ');
    block.append(records, at, length);
  }
  return Flush(&block);
}

// Writes `block` after the last record; in the ring, clears the last page of half a record.
Status TraceWriter::Flush(std::string* block) {
  const int64_t needed = tail_ + static_cast<int64_t>(block->size());
  if (needed > end_) {
    const int64_t end = needed + std::clamp(needed / 4, kMinReserve, kMaxReserve);
    HORORING_RETURN_IF_ERROR(MoveEnd(ring_end_ > 0 ? std::min(end, ring_end_) : end));
  }
  if (wrapped_) block->append((kPage - static_cast<size_t>(needed) % kPage) % kPage, ' ');
  HORORING_RETURN_IF_ERROR(WriteAt(*block, tail_));
  tail_ = needed;
  block->clear();
  return Status::Ok();
}

// Continues at the beginning of the ring, with a record that marks the gap for readers.
Status TraceWriter::Wrap(std::string* block) {
  HORORING_RETURN_IF_ERROR(Flush(block));
  if (end_ < ring_end_) HORORING_RETURN_IF_ERROR(MoveEnd(ring_end_));
  wrapped_ = true;
  tail_ = ring_begin_;
  *block = Metadata("process_labels", 0, Tid(0, Track::kCaller),
                    "\"labels\":\"without the oldest events\"");
  for (std::vector<Row>& rows : caller_rows_) {  // their names are lost, too
    for (size_t row = 1; row < rows.size(); ++row) rows[row].named = false;
  }
  return Status::Ok();
}

// White space after the end is harmless. `end` must be greater than `end_`.
Status TraceWriter::MoveEnd(int64_t end) {
  const auto spaces = [](int64_t bytes) { return std::string(static_cast<size_t>(bytes), ' '); };
  HORORING_RETURN_IF_ERROR(WriteAt(spaces(end - end_), end_ + kTailBytes));
  HORORING_RETURN_IF_ERROR(WriteAt(spaces(kTailBytes), end_));
  HORORING_RETURN_IF_ERROR(WriteAt(kTail, end));
  end_ = end;
  return Status::Ok();
}

Status TraceWriter::WriteAt(const std::string& bytes, int64_t at) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = pwrite(fd_, bytes.data() + done, bytes.size() - done,
                             static_cast<off_t>(at) + static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const std::string reason = n < 0 ? std::strerror(errno) : "no space";
      // Puts the bracket right after the last record; if even that fails, the file stays unchanged.
      if (tail_ > 0 && ftruncate(fd_, static_cast<off_t>(tail_)) == 0) {
        const ssize_t restored = pwrite(fd_, kTail, kTailBytes, static_cast<off_t>(tail_));
        static_cast<void>(restored);
        end_ = tail_;
        wrapped_ = false;  // the older part is gone
      }
      return Status(Code::kInternal, "cannot write to the timeline '" + path_ + "': " + reason);
    }
    done += static_cast<size_t>(n);
  }
  return Status::Ok();
}

Status TraceWriter::Close() {
  if (fd_ < 0) return Status::Ok();
  Status status;
  if (tail_ > 0 && tail_ < end_ && !wrapped_ && ftruncate(fd_, static_cast<off_t>(tail_)) == 0) {
    status = WriteAt(kTail, tail_);
  }
  const int fd = fd_;
  fd_ = -1;
  if (close(fd) != 0 && status.ok()) {
    return Status(Code::kInternal,
                  "cannot close the timeline '" + path_ + "': " + std::strerror(errno));
  }
  return status;
}

}  // namespace hororing
