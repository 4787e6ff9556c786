/* The interface of the fake GPU for tests, in addition to the functions of libcuda and libnccl.
 *
 * One library replaces both. Memory of the device is memory of the process. A stream is a thread
 * that executes its work late, so code that does not wait for it sees wrong data (and
 * ThreadSanitizer sees a race). Communicators are mailboxes in shared memory, so ranks may be
 * threads or processes. The fake counts undefined uses of the real libraries as violations. */
#ifndef TESTS_FAKE_GPU_FAKE_GPU_H_
#define TESTS_FAKE_GPU_FAKE_GPU_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sets how the fake behaves from now on, in the whole process. Returns -1 for an unknown name.
 *   delay_us         before each piece of work in a stream (100)
 *   devices          their number (8)
 *   cuda_version     13000
 *   no_module        kernels cannot be loaded
 *   capturing        every stream is being captured into a graph
 *   nccl_version     23203
 *   no_pools         devices have no memory pools
 *   most_memory      live allocations, on all devices, beyond which allocations fail
 *   init_fails       communicators cannot be created
 *   init_hangs       the creation of communicators never ends
 *   hang_after       the number of collectives after which all hang, until the abort; -1: none
 *   hang_ranks       hang only collectives of communicators with so many ranks; 0: of all
 *   async_error_after  the number of collectives after which communicators have an error; -1: none
 *   full_queue       functions of the driver wait until so many communicators have been aborted
 *   no_memory_on     the device that has no memory for plain allocations; -1: none */
int fake_gpu_set(const char* name, int64_t value);
void fake_gpu_reset(void);

/* Threads hang in this function of the libraries, as "ncclCommAbort", until the next call, which
 * names another one or none (null). `device`: only threads with its context; -1: all. */
void fake_gpu_hang_in(const char* function, int device);
/* The number of threads that hang there. */
int fake_gpu_hanging(void);

/* Returns the number of violations since the last call, and the text of the first one (static). */
int fake_gpu_violations(const char** first);
/* Counts live objects ("events", "streams", "memory", "pinned", "communicators", "contexts",
 * "operations") or what was done so far ("collectives", "aborts", "kernels", "copies", "recorded"
 * events). */
int64_t fake_gpu_count(const char* what);

/* What a framework does: it creates a stream, puts work into it, and waits for all of it. */
void* fake_gpu_stream(void);
void fake_gpu_run(void* stream, void (*work)(void*), void* argument);
void fake_gpu_synchronize(void* stream);

#ifdef __cplusplus
}
#endif
#endif
