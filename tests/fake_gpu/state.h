// The state that both halves of the fake share.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

namespace fake_gpu {

constexpr int64_t kUnlimited = INT64_MAX;
struct Settings {
  std::atomic<int64_t> delay_us{100}, devices{8}, cuda_version{13000}, no_module{0}, capturing{0},
      nccl_version{23203}, init_fails{0}, init_hangs{0}, hang_after{-1}, async_error_after{-1},
      no_memory_on{-1}, no_pools{0}, full_queue{0}, hang_ranks{0}, most_memory{kUnlimited};
};
struct Counts {
  std::atomic<int64_t> events{0}, streams{0}, memory{0}, pinned{0}, communicators{0}, contexts{0},
      collectives{0}, aborts{0}, kernels{0}, copies{0}, recorded{0}, operations{0};
};
extern Settings settings;
extern Counts counts;

void Violation(const std::string& what);
// At the beginning of each function of the libraries.
void Visit(const char* function);
// Puts work into a stream (null: the default one).
void Enqueue(void* stream, std::function<void()> work);
// Whether a context is current on this thread.
bool HasContext();
// The device of that context; -1: there is none.
int CurrentDevice();

}  // namespace fake_gpu
