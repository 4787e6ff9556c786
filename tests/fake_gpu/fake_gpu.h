/* What tests ask of the fake GPU, beside the functions of libcuda and libnccl that it has.
 *
 * One library stands for both: memory of the device is memory of the process, a stream is a
 * thread that carries out what is put into it, late, so that whoever does not wait for it sees
 * wrong data (and ThreadSanitizer a race), and communicators are mailboxes in shared memory, so
 * that ranks may be threads or processes. What the real libraries leave undefined is counted as a
 * violation here. */
#ifndef TESTS_FAKE_GPU_FAKE_GPU_H_
#define TESTS_FAKE_GPU_FAKE_GPU_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How the fake behaves from now on; all of the process. Returns -1 for an unknown name.
 *   delay_us         before each piece of work in a stream (100)
 *   devices          how many there are (8)
 *   cuda_version     13000
 *   no_module        kernels cannot be loaded
 *   capturing        every stream is being captured into a graph
 *   nccl_version     23203
 *   no_pools         devices have no memory in the order of streams
 *   most_memory      live pieces of it, of all devices, beyond which plain allocations fail
 *   init_fails       communicators cannot be made
 *   init_hangs       and do not come to an end of being made
 *   hang_after       the number of collectives after which all hang, until the abort; -1: none
 *   hang_ranks       those of communicators of so many ranks; 0: of all
 *   async_error_after  the same, after which communicators tell of an error
 *   no_memory_on     the device that has no memory for plain allocations; -1: none */
int fake_gpu_set(const char* name, int64_t value);
void fake_gpu_reset(void);

/* Threads stay in this function of the libraries, "ncclCommAbort", until another one is named, or
 * none (null). `device`: only those with a context of that device; -1: all. */
void fake_gpu_hang_in(const char* function, int device);
/* How many are in there. */
int fake_gpu_hanging(void);

/* What was called in a way that the real libraries forbid, since the last call: how often, and the
 * first one as text (static). */
int fake_gpu_violations(const char** first);
/* Live objects: "events", "streams", "memory", "pinned", "communicators", "contexts",
 * "operations"; and "collectives", "aborts", "kernels", "copies", "recorded"
 * (events): done so far. */
int64_t fake_gpu_count(const char* what);

/* As a framework would: a stream, work in it, and the wait of the host for all of it. */
void* fake_gpu_stream(void);
void fake_gpu_run(void* stream, void (*work)(void*), void* argument);
void fake_gpu_synchronize(void* stream);

#ifdef __cplusplus
}
#endif
#endif
