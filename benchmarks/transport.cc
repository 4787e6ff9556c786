// The cost of the transports between ranks 0 and 1:
//
//   mpirun -np 2 build/bench_transport build/libhororing_mpi_openmpi.so
//
// Prints for each transport the one-way latency of 8 bytes on the data and on the control plane
// (half a round trip: median, 99th percentile), the bandwidth of a stream of 64 MiB messages, and
// the processor time of an idle Sleep.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "transport/factory.h"

namespace hororing {
namespace {

constexpr int kRounds = 20000, kStreams = 10;
constexpr size_t kStreamBytes = 64 << 20;
constexpr TimeNs kIdle = 2 * kSecond;

void Must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

TimeNs Deadline() { return After(NowNs(), 60 * kSecond); }

// Half round trips in microseconds, sorted.
template <typename RoundTrip>
std::vector<double> Latencies(RoundTrip round_trip) {
  std::vector<double> latencies;
  for (int round = 0; round < kRounds; ++round) {
    const TimeNs begin = NowNs();
    round_trip();
    latencies.push_back(static_cast<double>(NowNs() - begin) / 2e3);
  }
  std::sort(latencies.begin(), latencies.end());
  return latencies;
}

void DataRoundTrip(Transport& transport) {
  char bytes[8] = {};
  const int peer = 1 - transport.rank();
  if (transport.rank() == 0) Must(transport.Wait(transport.Send(peer, bytes, 8), Deadline()));
  Must(transport.Wait(transport.Receive(peer, bytes, 8), Deadline()));
  if (transport.rank() == 1) Must(transport.Wait(transport.Send(peer, bytes, 8), Deadline()));
}

void ControlRoundTrip(Transport& transport) {
  int peer = 1 - transport.rank();
  std::string message(8, 'm');
  if (transport.rank() == 0) transport.Post(peer, message);
  while (!transport.Poll(&peer, &message)) transport.Sleep(Deadline());
  if (transport.rank() == 1) transport.Post(peer, message);
}

double StreamGigabytesPerSecond(Transport& transport) {
  std::string bytes(kStreamBytes, 'b');
  double best = 0;
  for (int i = 0; i < kStreams; ++i) {
    DataRoundTrip(transport);
    const TimeNs begin = NowNs();
    const Transport::Request request = transport.rank() == 0
                                           ? transport.Send(1, bytes.data(), bytes.size())
                                           : transport.Receive(0, bytes.data(), bytes.size());
    Must(transport.Wait(request, Deadline()));
    best = std::max(best, static_cast<double>(bytes.size()) / static_cast<double>(NowNs() - begin));
  }
  return best;
}

double IdleCpuPercent(Transport& transport) {
  const auto cpu_now = [] {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
  };
  const double begin = cpu_now();
  const TimeNs end = NowNs() + kIdle;
  while (NowNs() < end) transport.Sleep(end);
  return (cpu_now() - begin) / static_cast<double>(kIdle) * 100;
}

void Measure(const std::string& name, const std::string& library) {
  World world;
  WorldOptions options;
  options.launched = true;
  options.transport = name;
  options.mpi_library_path = library;
  options.spin_ns = 50 * kMicrosecond;
  options.timeout_ns = 60 * kSecond;
  Must(MakeWorld(options, &world));
  Transport& transport = *world.transport;
  if (transport.rank() > 1) return;
  const std::vector<double> data = Latencies([&] { DataRoundTrip(transport); });
  const std::vector<double> control = Latencies([&] { ControlRoundTrip(transport); });
  const double stream = StreamGigabytesPerSecond(transport);
  const double idle = IdleCpuPercent(transport);
  if (transport.rank() != 0) return;
  if (name == "shm") {
    std::puts("         8 B data us       8 B control us    64 MiB GB/s  idle CPU %");
  }
  const size_t median = data.size() / 2, p99 = data.size() * 99 / 100;
  std::printf("%-6s  %6.2f (%7.2f)  %6.2f (%7.2f)  %8.2f  %10.3f\n", transport.name(), data[median],
              data[p99], control[median], control[p99], stream, idle);
  std::fflush(stdout);
}

}  // namespace
}  // namespace hororing

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: mpirun -np 2 %s path/to/libhororing_mpi_openmpi.so\n", argv[0]);
    return 2;
  }
  hororing::Measure("shm", argv[1]);
  hororing::Measure("mpi", argv[1]);
  hororing::FinalizeMpi();
  return 0;
}
