// TraceWriter: one Chrome-trace JSON file for the whole job, written by rank 0 as events
// arrive. A job that is killed at any moment leaves a complete JSON array.
//
// Note [Whole at every moment]: the end of the array is written in advance, behind a reserve of
// white space, and records are written into the reserve:
//
//   [ record, record, record            ...white space...            ]
//                           ^ tail_                                  ^ end_
//
// Linux checks for SIGKILL between the pages of a write, so no record crosses a page. When a
// reserve is used up, the closing bracket, optional in the format, is missing for a microsecond.
//
// Note [The last part]: with a limit, the pages behind the metadata are a ring. When the file has
// reached the limit, records overwrite the oldest ones, page by page. Each page consists of
// complete records, so the array stays complete, even if the process is killed between two pages.
//
// pid = rank + 1, tid = 16 * rank + track + 1: viewers drop 0, and tids are unique in the file.
//
// The spans of one tid must nest. A caller's span that would cross that of another thread moves to
// another row of its rank ("caller 2", ...; up to 14 rows).
//
// Thread-safety: none; the engine's loop thread owns it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "trace/trace.h"

namespace hororing {

class TraceWriter {
 public:
  TraceWriter() = default;
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  // Creates or truncates `path` and writes the metadata (process and thread names, sort
  // order, wall-clock time of timestamp 0). `hosts[r]` is the host name of rank r. A file that
  // was open before is closed. Beyond `max_bytes` (0: no limit; otherwise at least two pages for
  // records) the oldest records are lost. A link or a file of another user is refused, and so is
  // what is no file, such as a pipe, which could block.
  Status Open(const std::string& path, const std::vector<std::string>& hosts,
              int64_t max_bytes = 0);
  bool is_open() const { return fd_ >= 0; }
  // Whether later records have overwritten earlier ones.
  bool wrapped() const { return wrapped_; }

  // Long names of tensors lose their middle, so that a record fits into a page.
  // `clock_offset_ns` is added to every time stamp: the difference between rank 0's clock and
  // that of `rank`'s host. Times in the file are microseconds since Open.
  Status Append(int rank, TimeNs clock_offset_ns, const std::vector<TraceEvent>& events);
  Status Close();

 private:
  // One row of the viewer: the outermost of the latest spans, disjoint and ordered by time.
  struct Row {
    struct Interval {
      TimeNs begin_ns, end_ns;
    };
    bool named = false;
    std::vector<Interval> outermost;

    bool Add(TimeNs begin_ns, TimeNs end_ns);
  };
  int CallerTid(int rank, TimeNs begin_ns, TimeNs end_ns, std::string* text);
  Status Write(const std::string& records);
  Status Flush(std::string* block);
  Status Wrap(std::string* block);
  Status MoveEnd(int64_t end);
  Status WriteAt(const std::string& bytes, int64_t at);

  int fd_ = -1;
  std::string path_;
  int64_t tail_ = 0;                       // offsets: behind the last record,
  int64_t end_ = 0;                        // and of the closing bracket's line
  int64_t ring_begin_ = 0, ring_end_ = 0;  // whole pages; 0: there is no limit
  bool wrapped_ = false;
  TimeNs origin_ns_ = 0;
  uint64_t next_async_id_ = 1;
  std::vector<std::vector<Row>> caller_rows_;  // per rank
};

}  // namespace hororing
