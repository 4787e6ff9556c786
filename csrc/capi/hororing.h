/* The C interface of hororing: the only boundary between the core and everything else (the
 * Python package through cffi, a TensorFlow plug-in, any program).
 *
 * Plain C, no preprocessor beyond the guard: cffi reads its declarations from this file.
 *
 * One engine per process. Every function may be called from any thread, except that hr_init,
 * hr_shutdown and hr_finalize must not run at the same time as one another. Nothing here calls
 * back. Functions that can fail return an hr_code (0 is success) or, where they return a
 * handle, a negative hr_code; hr_last_error() then has the reason, on the calling thread. No C++
 * exception leaves a function: HR_INTERNAL stands for it.
 *
 * Memory: pointers in requests belong to the caller and must stay valid until the handle is
 * complete (hr_poll != 0 or hr_wait != HR_PENDING). Device pointers must stay valid until hr_landed
 * != 0, or until a stream has passed its wait for the handle (hr_wait_in_stream). hr_take_result
 * passes results that the core has allocated to the caller, who frees them with hr_free.
 *
 * After fork() the child is not initialised: every function that needs the engine returns
 * HR_NOT_INITIALIZED there, and hr_shutdown and hr_finalize do nothing. */
#ifndef HORORING_CAPI_HORORING_H_
#define HORORING_CAPI_HORORING_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Grows with every incompatible change of this file. */
enum { HR_ABI_VERSION = 22 };

/* The values of hororing::Code, and one more. */
typedef enum hr_code {
  HR_PENDING = -1,
  HR_EXCHANGES = -2, /* of hr_init_wait */
  HR_OK = 0,
  HR_INVALID_ARGUMENT = 1,
  HR_MISMATCH = 2,
  HR_DUPLICATE_NAME = 3,
  HR_NOT_INITIALIZED = 4,
  HR_SHUT_DOWN = 5,
  HR_PEER_LOST = 6,
  HR_STALLED = 7,
  HR_TRANSPORT = 8,
  HR_INTERNAL = 9
} hr_code;

typedef enum hr_dtype {
  HR_UINT8 = 0,
  HR_INT8 = 1,
  HR_UINT16 = 2,
  HR_INT16 = 3,
  HR_INT32 = 4,
  HR_INT64 = 5,
  HR_FLOAT16 = 6,
  HR_FLOAT32 = 7,
  HR_FLOAT64 = 8,
  HR_BOOL = 9,
  HR_BFLOAT16 = 10,
  /* These are copied as bytes; reductions refuse them. */
  HR_UINT32 = 11,
  HR_UINT64 = 12,
  HR_FLOAT8_E4M3FN = 13,
  HR_FLOAT8_E5M2 = 14,
  HR_FLOAT8_E4M3FNUZ = 15,
  HR_FLOAT8_E5M2FNUZ = 16,
  HR_FLOAT8_E8M0FNU = 17,
  HR_FLOAT4_E2M1FN_X2 = 18, /* two numbers in a byte */
  HR_INT4 = 19,             /* these two: one number in a byte */
  HR_UINT4 = 20
} hr_dtype;

typedef enum hr_op {
  HR_AVERAGE = 0,
  HR_SUM = 1,
  HR_ADASUM = 2,
  HR_MIN = 3,
  HR_MAX = 4,
  HR_PRODUCT = 5
} hr_op;
enum { HR_OP_COUNT = 6 }; /* the number of reduction operations */

typedef enum hr_collective {
  HR_ALLREDUCE = 0,
  HR_ALLGATHER = 1,
  HR_BROADCAST = 2,
  HR_BARRIER = 3,
  HR_ALLTOALL = 4,
  HR_REDUCESCATTER = 5,
  HR_JOIN = 6,              /* all ranks; its one result is the last rank to join */
  HR_ADD_PROCESS_SET = 7,   /* all ranks, or see `root`; its one result is the set's id */
  HR_REMOVE_PROCESS_SET = 8 /* all ranks; its one result is 1, or 0 if there was no such set */
} hr_collective;

/* The process set of all ranks. */
enum { HR_WORLD_SET = 0 };

typedef enum hr_state {
  HR_STATE_NONE = 0, /* never initialised, shut down, or a forked child */
  HR_STATE_RUNNING = 1,
  HR_STATE_STOPPED = 2, /* another rank has shut down; rank() and size() still work */
  HR_STATE_FAILED = 3   /* a peer was lost or the engine broke; shutdown() still returns */
} hr_state;

/* All settings of the engine; filled from hororing/config. Strings are copied. */
typedef struct hr_config {
  /* The world. */
  int32_t launched;        /* the minimum number of processes that mpirun or the like has started,
                              which meet through MPI; 0: no launcher */
  const char* transport;   /* "auto", "shm", "tcp", "mpi" */
  const char* backend;     /* "auto", "host" */
  const char* mpi_library; /* path of the layer for the loaded MPI */
  /* Without MPI: this rank, of `size` ranks, which meet through the caller of hr_init_wait
   * (HR_EXCHANGES). size 0: through MPI. */
  int32_t rank, size;
  const char* address;      /* of this host, as others reach it; NULL: unknown */
  const char* key;          /* secret of the job, which its members prove to hold; or NULL */
  const char* fabric;       /* a network of this host on which MPI beats TCP; NULL: none */
  int64_t generation;       /* of an elastic job, from 1; 0: not elastic */
  int32_t mpi_communicator; /* Fortran handle of the communicator to duplicate; -1: the world */
  const int32_t* ranks;     /* the sub-job of these ranks of the communicator, or NULL */
  int32_t ranks_count;
  /* Rank-visible: every rank must hold the same values. */
  int64_t fusion_bytes;    /* maximum size of a fused batch; 0: no fusion */
  double cycle_time_ms;    /* maximum time that requests are held for fusion; < 0: default */
  int32_t cache_capacity;  /* entries of the response cache; 0: none */
  int64_t verify;          /* every n-th batch of allreduces: results are compared; 0: none */
  int32_t reproducible;    /* same bits in every run */
  const char* fingerprint; /* "knob=value" lines, compared between ranks at init */
  /* Local. */
  double stall_warning_s;  /* <= 0: never */
  double stall_shutdown_s; /* <= 0: never */
  double deadlock_s;       /* limit for callers that wait for one another; <= 0: none */
  double timeout_s;        /* limit of a wait for a peer in a collective; <= 0: none */
  double silent_s;         /* over TCP, a network cut for this long loses a rank; 0: default */
  double spin_us;          /* how long the engine polls before it sleeps */
  int32_t cpu;             /* core of the engine's thread; -1: not bound */
  int32_t watch_parent;    /* nonzero: fail, then end the process, when its parent dies */
  const char* kernels;     /* "auto", "portable", "avx2", "avx512" */
  int32_t log_level;       /* minimum level: 10 debug, 20 info, 30 warning, 40 error */
  const char* timeline;    /* path of the timeline, or NULL; rank 0's is used */
  int64_t timeline_bytes;  /* maximum size of its file, which keeps the last part; 0: none */
  /* The first and last training step that it covers, from 1; 0: everything. A step ends when rank 0
   * allreduces among all ranks under a name that the step has had. */
  int64_t timeline_from, timeline_to;
  int32_t timeline_mark_cycles;
  /* Tensors on GPUs. */
  const char* gpu;            /* rank-visible: "auto", "nccl", "staged" */
  const char* cuda_library;   /* NVIDIA's driver; NULL: libcuda.so.1 */
  const char* nccl_libraries; /* "a:b": the first that can be loaded; NULL: libnccl.so.2 */
} hr_config;

typedef struct hr_topology {
  int32_t rank, size, local_rank, local_size, cross_rank, cross_size;
  int32_t homogeneous;
} hr_topology;

/* One tensor of a request: contiguous memory. */
typedef struct hr_tensor {
  uintptr_t input;  /* 0 only if there are no elements */
  uintptr_t output; /* HR_ALLREDUCE, HR_BROADCAST: may equal input. HR_REDUCESCATTER: this rank's
                       rows of the result. HR_ALLGATHER, HR_ALLTOALL: 0, the core allocates */
  int32_t dtype;    /* hr_dtype */
  int32_t ndim;
  const int64_t* shape; /* ndim entries; copied */
  int32_t device; /* 0: host memory; n: CUDA device n - 1, the same for all tensors of a request and
                     all requests of this process */
} hr_tensor;

typedef struct hr_request {
  int32_t collective;         /* hr_collective */
  const char* name;           /* unique among the set's requests in flight; equal on its ranks */
  int32_t process_set;        /* REQUIRES: this rank is a member */
  int32_t op;                 /* hr_op; HR_ALLREDUCE, HR_REDUCESCATTER */
  int32_t root;               /* HR_BROADCAST: a rank of the job; HR_REMOVE_PROCESS_SET: the set;
                                 HR_ADD_PROCESS_SET: 1: may duplicate a set; 2: may also duplicate a
                                 set; only its members call, with a name derived from the ranks */
  double prescale, postscale; /* HR_ALLREDUCE, HR_REDUCESCATTER */
  /* HR_ALLREDUCE with HR_AVERAGE, of floats: the weight of this rank's tensors, read when the
   * request is submitted; a joined rank has weight 0. NULL, on all ranks or none: equal weights.
   * The result is the sum of the ranks' tensors times their weights, divided by the sum of the
   * weights, or 0 if that is 0. Tensors of weight 0 are not read. */
  const double* weight;
  int32_t tensors_count; /* 0 for HR_BARRIER and from HR_JOIN on; 1 for HR_ALLTOALL. Several form a
                            group: all or nothing */
  const hr_tensor* tensors;
  /* HR_ALLTOALL: rows for each rank of the set, in rank order; NULL: the same number for each. Rows
   * beyond their sum are not sent. HR_ADD_PROCESS_SET: the ranks. */
  const int64_t* integers;
  int32_t integers_count;
  int32_t blocking; /* nonzero: this thread calls hr_wait next. The engine need not be woken,
                           and small sums need no negotiation if the ranks of a host submit them at
                           the same time (ADR 33) */
  uintptr_t stream; /* tensors on a device: the CUDA stream whose present work computes them; 0: the
                       default stream */
  const uintptr_t* streams; /* the stream of each tensor, if they differ; NULL: all `stream` */
  uint64_t id; /* set by hr_start when the request is prepared; 0 at first. It is neither a cache id
                  nor the id of a process set */
} hr_request;

typedef struct hr_result {
  uintptr_t data; /* malloc'ed; 0 when bytes == 0 */
  int64_t bytes;
  int64_t rows; /* the first dimension */
} hr_result;

typedef struct hr_stats {
  int64_t submitted; /* requests */
  int64_t completed; /* with or without success */
  int64_t batches;
  int64_t tensors;                  /* in all batches */
  int64_t bytes;                    /* of this rank's inputs in all batches */
  int64_t cache_hits, cache_misses; /* reports sent as an id, reports sent in full */
  int64_t control_messages_sent, control_messages_received;
  int64_t loop_wakeups;  /* how often the engine's thread woke up */
  int64_t scratch_bytes; /* fusion and receive buffers held now */
  int64_t trace_events_dropped;
  int64_t fusion_bytes, cycle_time_ns; /* in use */
  /* Batches of HR_ALLREDUCE among several ranks, on the host, by the algorithm that ran. */
  int64_t allreduces_shm_direct, allreduces_three_phase, allreduces_ring, allreduces_rank_order;
  int64_t allreduces_at_once; /* without negotiation (`blocking`), each a batch of its own */
} hr_stats;

typedef struct hr_log_record {
  int32_t level;    /* 10 debug, 20 info, 30 warning, 40 error */
  double time;      /* seconds since the epoch */
  char text[20480]; /* zero-terminated; longer texts are cut and end in "..." */
} hr_log_record;

int hr_abi_version(void);
const char* hr_version(void);

/* Begins to start an engine. Returns HR_OK at once if already initialised. */
int hr_init(const hr_config* config);
/* Waits until all ranks have started their engines (HR_OK), or until that has failed on all of
 * them, for at most timeout_s and at most a second. HR_PENDING: call it again, or hr_abort.
 * HR_EXCHANGES, the out-of-band exchange: pass the texts of all ranks, of which hr_exchange_text is
 * this rank's, to hr_exchanged; then call it again. */
int hr_init_wait(double timeout_s);
const char* hr_exchange_text(void);
/* `texts`: of all ranks, in rank order; or NULL, with the reason in `error`. */
void hr_exchanged(const char* const* texts, const char* error);
/* Ends the engine. Requests that all ranks have submitted are carried out; all other pending ones
 * fail with HR_SHUT_DOWN on every rank, with `reason` in the text ("" for none). Returns within
 * about timeout_s, even if peers are dead. hr_init works again afterwards. */
int hr_shutdown(const char* reason, double timeout_s);
/* The same without waiting for the peers, which fail with HR_PEER_LOST and `reason`. For a process
 * that is about to exit or to abandon hr_init. */
int hr_abort(const char* reason);
/* Finalises MPI if this library initialised it. At the end of the process only. */
void hr_finalize(void);

/* Elastic jobs: sends a heartbeat every interval_s to the store at the other end of `socket`, which
 * must stay open until hr_membership_end. When the store ends a generation, every wait of its
 * engine ends with HR_PEER_LOST. When the connection ends, the engine ends with HR_TRANSPORT.
 * Replaces an earlier membership. */
int hr_membership_begin(int32_t socket, double interval_s);
void hr_membership_end(void);
/* Returns when the store last sent an update (microseconds since the epoch; 0: never). `what`,
 * since `generation` began: 0 no updates, 1 some hosts must leave, 2 some have joined, 3 both. */
int64_t hr_membership_updates(int64_t generation, int32_t* what);

int hr_state_now(void);
int hr_topology_now(hr_topology* topology);
/* This rank's rank in a process set, and the size of the set. */
int hr_group_rank_now(int32_t process_set, int32_t* rank, int32_t* size);
const char* hr_host_name(int32_t rank); /* NULL if there is no such rank or no engine */

/* The text of the last failure on the calling thread, and the rank to blame, or -1. */
const char* hr_last_error(void);
int32_t hr_last_error_rank(void);
/* The ranks that this one could not reach over TCP, in the latest engine; -1 after the last. */
int32_t hr_unreachable(int32_t index);

/* Returns a handle > 0, or a negative hr_code. Does not block; with `blocking` it may poll for the
 * other ranks for 40 us and return a complete handle. */
int64_t hr_submit(const hr_request* request);
/* For gradient hooks: starts `count` persistent requests (MPI's term) of HR_ALLREDUCE with one
 * tensor each, in place, now at `addresses`. The first starts prepare a request like hr_submit and
 * set its id; afterwards only its `stream` and `weight` may change, and only id and weight are
 * read. If the id is no longer valid, the request is prepared again. Wakes the engine once. Stops
 * at the first failure. Returns the number of started requests, each of which has a handle; if it
 * is less than `count`, the next handle is the negated hr_code. */
int32_t hr_start(hr_request* const* requests, const uintptr_t* addresses, int32_t count,
                 int64_t* handles);
/* 1 if complete, 0 if pending, HR_INVALID_ARGUMENT negated if there is no such handle. */
int hr_poll(int64_t handle);
/* For a thread that waits for any of many handles. Blocks until the completion counter exceeds
 * `seen`, or until the timeout. The counter counts handles that a caller had polled or waited for
 * before they completed. Returns the counter; at once if `seen` is -1. */
int64_t hr_next_completion(int64_t seen, double timeout_s);
/* Waits at most timeout_s (< 0: forever): HR_PENDING, or the handle's final code. The handle
 * stays valid until hr_release. */
int hr_wait(int64_t handle, double timeout_s);
/* Waits at most timeout_s for all of these (0: only polls). HR_OK: all have succeeded and are
 * released. HR_PENDING: some are not complete. Anything else: all are complete, some have failed,
 * and none is released; call hr_wait on each for its error. May be called again: released handles
 * count as succeeded. `stream`: null, or a stream on a device, which then waits for the results. */
int hr_wait_many(const int64_t* handles, int32_t count, double timeout_s, const uintptr_t* stream);
/* Moves result `index` out of a complete handle. HR_ALLGATHER: one per tensor. HR_ALLTOALL: the
 * tensor, then the rows received from each rank. Numbers (these rows; the results of HR_JOIN and
 * later collectives) are int64. */
int hr_take_result(int64_t handle, int32_t index, hr_result* result);
void hr_free(uintptr_t data);
/* A handle with tensors on a device is complete when its work is in a stream of the engine. Its
 * results are valid in a stream that waits for them: */

/* Makes `stream`, on the handle's device, wait for the results of a complete handle. Does not
 * block, and does nothing for a handle without tensors on a device. */
int hr_wait_in_stream(int64_t handle, uintptr_t stream);
/* 1 if the results of a complete handle are valid and nothing uses its memory any more, otherwise
 * 0; 1 if there is no such handle. */
int hr_landed(int64_t handle);
/* The first dimension of result `index` of a complete handle, which keeps the result. */
int hr_result_rows(int64_t handle, int32_t index, int64_t* rows);
/* Copies result `index`, which is on a device, to `memory` there, in the order of `stream`, which
 * waits for it, and frees the core's memory. */
int hr_move_result(int64_t handle, int32_t index, uintptr_t memory, uintptr_t stream);
/* Makes CUDA device `ordinal` the one of this process, like the first tensor on it. Does nothing if
 * there are no devices. */
int hr_use_device(int32_t ordinal);
/* The version of NCCL that would be used: 23203 is 2.32.3; 0: there is none, see hr_last_error. */
int32_t hr_nccl_version(const char* nccl_libraries);
/* Describes the support of tensors on GPUs, one "name: value" in a line: the driver, each device
 * and NCCL, or why they are missing. Starts the driver. */
void hr_describe_gpu(const char* cuda_library, const char* nccl_libraries, char* text,
                     int32_t text_bytes);
/* Releases the handle. A pending one is released when it completes; its memory must stay valid
 * until then. */
int hr_release(int64_t handle);

/* The timeline. Rank 0's call starts or stops it on all ranks; other ranks' calls only check that
 * the engine runs. Path "": the timeline in progress goes on, and marks cycles or does not. */
int hr_timeline_start(const char* path, int32_t mark_cycles);
int hr_timeline_stop(void);
int hr_timeline_enabled(void);
int64_t hr_now_ns(void);
/* The digest of hororing/_adapters/replica_check.py: sums of signed words times `factors`, of which
 * there are `chunk`; a sum is multiplied by `chain` before the next is added. Modulo 2^64. */
int64_t hr_digest(const void* words, int64_t count, int32_t word_bytes, const int64_t* factors,
                  int64_t chunk, int64_t chain);
/* Looks at sums of floats in host memory from now on, or does not. 1, and the oldest note of one
 * that was not finite (engine/finite_watch.h); 0: there is none. */
int hr_take_nonfinite(int32_t on, char* text, int32_t text_bytes);
/* stage: 0 HOOK, 1 VIEW, 2 SUBMIT, 9 GUARD (trace/trace.h); drawn on the caller's row. */
void hr_trace_span(int32_t stage, const char* tensor, int64_t begin_ns, int64_t end_ns,
                   int64_t bytes);

/* Waits at most timeout_s for a log record: 1 with a record, 0 without one, -1 after hr_log_close.
 * Works without an engine. */
int hr_log_next(double timeout_s, hr_log_record* record);
void hr_log_close(void);
void hr_log_open(void);
/* Maps the file of hororing/_engine/recorder.py, which stays open for appending, and records events
 * there. `stack_signal`: the signal whose handler appends the main thread's Python stack; 0: none.
 * Once per process. */
int hr_recorder_open(int32_t file, int32_t stack_signal);

void hr_stats_now(hr_stats* stats);
/* "avx512", "avx2" or "portable". */
const char* hr_kernels(void);
/* Library version, thread level and path of the MPI behind `mpi_library`, without initialising it:
 * "Open MPI v5.0.11, ...\nserialized\n/opt/mpi/lib/libmpi.so.40" (the second line is empty before
 * initialisation). */
int hr_describe_mpi(const char* mpi_library, char* text, int32_t text_bytes);

#ifdef __cplusplus
}
#endif
#endif
