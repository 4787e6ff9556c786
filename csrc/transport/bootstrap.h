// Bootstrap: how the ranks of a job exchange the few texts that are needed to create a transport.
// It uses MPI, or the caller of init.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace hororing {

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Returns every rank's text, in rank order. Blocks until all have called it, or one is lost.
  virtual Status Share(const std::string& mine, TimeNs deadline,
                       std::vector<std::string>* texts) = 0;
  // Not ok if ranks can no longer reach one another.
  virtual Status CheckPeers() { return Status::Ok(); }
};

// Over an existing transport, in log2(size) rounds. Texts of any bytes and length.
class TransportBootstrap final : public Bootstrap {
 public:
  explicit TransportBootstrap(Transport* transport) : transport_(*transport) {}
  int rank() const override { return transport_.rank(); }
  int size() const override { return transport_.size(); }
  Status Share(const std::string& mine, TimeNs deadline, std::vector<std::string>* texts) override;
  Status CheckPeers() override { return transport_.CheckPeers(); }

  struct Place {
    char* data;
    size_t bytes;
  };
  // Of a text: what ranks send first.
  struct Beginning {
    uint64_t bytes = 0;  // of the whole text
    char text[504] = {};
    Place place() { return {reinterpret_cast<char*>(this), sizeof *this}; }
  };

 private:
  Status Gather(const std::function<Place(int)>& place, TimeNs deadline);

  Transport& transport_;
};

// Out of band: another thread, which can reach the other ranks, exchanges the texts. It calls
// AwaitExchange and Exchanged in turns. Share fails at its deadline if it stops doing so.
class OutOfBandBootstrap final : public Bootstrap {
 public:
  OutOfBandBootstrap(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Status Share(const std::string& mine, TimeNs deadline, std::vector<std::string>* texts) override;

  void Close();  // There will be no more exchanges.

  // For the other thread. True: this rank has a text to exchange; false: Close, or none in time.
  bool AwaitExchange(TimeNs timeout_ns, std::string* mine);
  void Exchanged(Status status, std::vector<std::string> texts);

 private:
  const int rank_, size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool pending_ = false, closed_ = false;  // GUARDED_BY(mutex_), as all below
  std::string mine_;
  Status outcome_;                  // of the exchange; the first error stays
  std::vector<std::string> texts_;  // of all ranks
};

}  // namespace hororing
