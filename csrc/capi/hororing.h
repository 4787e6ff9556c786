/* The C interface of hororing: the only boundary between the core and everything else (the
 * Python package through cffi, a TensorFlow plug-in, any program).
 *
 * Plain C, no preprocessor beyond the guard: cffi reads its declarations from this file.
 *
 * One engine per process. Every function may be called from any thread, except that hr_init,
 * hr_shutdown and hr_finalize must not run at the same time as one another. Nothing here calls
 * back. Functions that can fail return an hr_code (0 is success) or, where they return a
 * handle, a negative hr_code; hr_last_error() then tells why, on the calling thread.
 *
 * Memory: pointers in requests belong to the caller and must stay valid until the handle is
 * complete (hr_poll != 0 or hr_wait != HR_PENDING); those to a device, until hr_landed != 0 or a
 * stream that waits for the handle (hr_wait_in_stream) comes to where it waits. Results that the
 * core allocates pass to the caller with hr_take_result and are freed with hr_free.
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
enum { HR_ABI_VERSION = 17 };

/* The values of hororing::Code, and one more. */
typedef enum hr_code {
  HR_PENDING = -1,
  HR_ASKS = -2, /* of hr_init_wait */
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
  HR_BFLOAT16 = 10
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
  HR_REMOVE_PROCESS_SET = 8 /* all ranks; its one result is 1, or 0 when there was no such set */
} hr_collective;

/* The process set of all ranks. */
enum { HR_WORLD_SET = 0 };

typedef enum hr_state {
  HR_STATE_NONE = 0, /* never initialised, shut down, or a forked child */
  HR_STATE_RUNNING = 1,
  HR_STATE_STOPPED = 2, /* another rank has shut down; rank() and size() still answer */
  HR_STATE_FAILED = 3   /* a peer was lost or the engine broke; shutdown() still returns */
} hr_state;

/* All settings of the engine; filled from hororing/config. Strings are copied. */
typedef struct hr_config {
  /* The world. */
  int32_t launched;        /* the fewest processes that mpirun or the like has started, which find
                              one another by MPI; 0: no launcher */
  const char* transport;   /* "auto", "shm", "tcp", "mpi" */
  const char* backend;     /* "auto", "host" */
  const char* mpi_library; /* path of the layer for the MPI that is loaded */
  /* Without MPI: this rank, of `size`, which find one another by the caller of hr_init_wait
   * (HR_ASKS). size 0: by MPI. */
  int32_t rank, size;
  const char* address;      /* of this host, as others reach it; or NULL: not known */
  const char* key;          /* of the job, secret: proves who belongs to it; or NULL */
  const char* fabric;       /* a network of this host on which MPI beats TCP; or NULL: none */
  int64_t generation;       /* of an elastic job, from 1; 0: it is none */
  int32_t mpi_communicator; /* Fortran handle of the communicator to duplicate; -1: the world */
  const int32_t* ranks;     /* the sub-job of these ranks of it, or NULL */
  int32_t ranks_count;
  /* Rank-visible: every rank must hold the same values. */
  int64_t fusion_bytes;    /* most bytes fused into one batch; 0: no fusion */
  double cycle_time_ms;    /* longest that requests are held back to be fused */
  int32_t cache_capacity;  /* entries of the response cache; 0: none */
  int32_t reproducible;    /* same bits in every run */
  int32_t tune;            /* nonzero: find the first two of these by trying */
  const char* algorithm;   /* "auto", "ring", "recursive_doubling", "three_phase" */
  const char* fingerprint; /* "knob=value" lines compared over the ranks at init */
  /* Local. */
  double stall_warning_s;  /* <= 0: never */
  double stall_shutdown_s; /* <= 0: never */
  double deadlock_s;       /* that blocked callers may wait for one another; <= 0: for ever */
  double timeout_s;        /* longest wait for a peer inside a collective; <= 0: for ever */
  double spin_us;          /* how long the engine polls before it sleeps */
  int32_t cpu;             /* core for the engine's thread; -1: not bound */
  int32_t watch_parent;    /* nonzero: fail, then end the process, when its parent dies */
  const char* kernels;     /* "auto", "portable", "avx2", "avx512" */
  int32_t log_level;       /* least level kept: 10 debug, 20 info, 30 warning, 40 error */
  const char* timeline;    /* path of the timeline, or NULL; rank 0's counts */
  int64_t timeline_bytes;  /* most of its file, which holds the last part then; 0: no limit */
  /* The steps of training that it is about, from 1; 0: everything. A step ends where the name of an
   * allreduce among all ranks comes again on rank 0. */
  int64_t timeline_from, timeline_to;
  int32_t timeline_mark_cycles;
  int32_t tune_fusion;     /* of `tune`, on rank 0: nonzero: smaller fusion_bytes */
  int32_t tune_cycle_time; /* nonzero: other cycle_time_ms */
  int32_t tune_warmup_samples;
  int32_t tune_steps_per_sample;
  const char* tune_log; /* path of its CSV log, or NULL */
  /* Tensors on GPUs. */
  const char* gpu;            /* rank-visible: "auto", "nccl", "staged" */
  const char* cuda_library;   /* of NVIDIA's driver; NULL: libcuda.so.1 */
  const char* nccl_libraries; /* "a:b": the first that can be loaded; NULL: libnccl.so.2 */
} hr_config;

typedef struct hr_topology {
  int32_t rank, size, local_rank, local_size, cross_rank, cross_size;
  int32_t homogeneous;
} hr_topology;

/* One tensor of a request: contiguous memory. */
typedef struct hr_tensor {
  uintptr_t input;  /* 0 only where it has no elements */
  uintptr_t output; /* HR_ALLREDUCE, HR_BROADCAST: may equal input. HR_REDUCESCATTER: this rank's
                       rows of the result. HR_ALLGATHER, HR_ALLTOALL: 0, the core allocates */
  int32_t dtype;    /* hr_dtype */
  int32_t ndim;
  const int64_t* shape; /* ndim entries; copied */
  int32_t device; /* 0: host memory; n: that of CUDA device n - 1, the same for all of a request,
                     and of all requests of this process */
} hr_tensor;

typedef struct hr_request {
  int32_t collective;         /* hr_collective */
  const char* name;           /* unique among the set's requests in flight, equal on its ranks */
  int32_t process_set;        /* this rank is a member of it */
  int32_t op;                 /* hr_op; HR_ALLREDUCE, HR_REDUCESCATTER */
  int32_t root;               /* HR_BROADCAST: a rank of the job; HR_REMOVE_PROCESS_SET: the set;
                                 HR_ADD_PROCESS_SET: 1: may duplicate a set; 2: may also duplicate a
                                 set; only its members call, with a name derived from the ranks */
  double prescale, postscale; /* HR_ALLREDUCE, HR_REDUCESCATTER */
  const double* weight;  /* HR_ALLREDUCE with HR_AVERAGE, of floats: how much this rank's tensors
                            count, and 0 if it has joined; read when the request is submitted. NULL,
                            on all ranks or none: all count the same. The result is the sum of the
                            ranks' tensors times their weights, divided by the sum of the weights,
                            or 0 where that is 0. What is of weight 0 is not read */
  int32_t tensors_count; /* 0 for HR_BARRIER and from HR_JOIN on; one for HR_ALLTOALL; more than
                            one otherwise: a group, all or nothing */
  const hr_tensor* tensors;
  /* HR_ALLTOALL: rows for each rank of the set, in rank order; NULL: equally many for each. Rows
   * beyond their sum are not sent. HR_ADD_PROCESS_SET: the ranks. */
  const int64_t* integers;
  int32_t integers_count;
  int32_t blocking; /* nonzero: this thread calls hr_wait next. The engine need not be woken,
                           and small sums need no negotiation where the ranks of a host make them
                           at the same time (ADR 33) */
  uintptr_t stream; /* tensors on a device: the CUDA stream whose work, so far, computes them; 0:
                       the default stream */
  const uintptr_t* streams; /* the stream of each tensor, where they differ; NULL: all `stream` */
  uint64_t id; /* set by hr_start when the request is prepared; 0 at first. Neither a cache id nor a
                  process set's id */
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
  int64_t tensors;                  /* that went through batches */
  int64_t bytes;                    /* of this rank's inputs in batches */
  int64_t cache_hits, cache_misses; /* reports sent as an id, reports sent in full */
  int64_t control_messages_sent, control_messages_received;
  int64_t loop_wakeups;  /* times that the engine's thread came out of a sleep */
  int64_t scratch_bytes; /* fusion and receive buffers held now */
  int64_t trace_events_dropped;
  int64_t fusion_bytes;  /* the threshold in use; the tuner's on rank 0 */
  int64_t cycle_time_ns; /* likewise the time that bursts are held */
  /* Batches of HR_ALLREDUCE among several ranks, on the host, by the algorithm that ran. */
  int64_t allreduces_shm_direct, allreduces_three_phase, allreduces_ring;
  int64_t allreduces_recursive_doubling, allreduces_rank_order;
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
/* Waits, at most so long and for a second, until all ranks have started their engines: HR_OK; or
 * until that has failed, on all of them. HR_PENDING: call it again, or hr_abort. HR_ASKS: hr_asked
 * is this rank's text, and hr_answer wants those of all ranks; then call it again. */
int hr_init_wait(double timeout_s);
const char* hr_asked(void);
/* `texts`: of all ranks, in rank order; or NULL and why there are none. */
void hr_answer(const char* const* texts, const char* error);
/* Ends the engine: everything that all ranks had submitted before is carried out, everything
 * else pending fails with HR_SHUT_DOWN on every rank, `reason` in the text ("" for none).
 * Returns within about timeout_s also when peers are dead. hr_init works again afterwards. */
int hr_shutdown(const char* reason, double timeout_s);
/* The same without waiting for the peers, which fail with HR_PEER_LOST and `reason`. For a process
 * that is about to exit, or to give up hr_init. */
int hr_abort(const char* reason);
/* Finalises MPI if this library initialised it. At the end of the process only. */
void hr_finalize(void);

/* Elastic jobs: from now on this process tells the store at the other end of `socket`, which stays
 * open until hr_membership_end, every interval_s that it lives; and when the store says that a
 * generation is over, every wait of its engine ends with HR_PEER_LOST. If the connection ends, so
 * does the engine, with HR_TRANSPORT. Replaces an earlier one. */
void hr_membership_begin(int32_t socket, double interval_s);
void hr_membership_end(void);
/* When (microseconds since the epoch; 0: never) and what the store has told last of hosts and
 * processes: 0 nothing since `generation` began, 1 some are to go, 2 some have come, 3 both. */
int64_t hr_membership_updates(int64_t generation, int32_t* what);

int hr_state_now(void);
int hr_topology_now(hr_topology* topology);
/* This rank's rank in a process set, and the size of the set. */
int hr_group_rank_now(int32_t process_set, int32_t* rank, int32_t* size);
const char* hr_host_name(int32_t rank); /* NULL when there is no such rank or no engine */

/* The text of the last failure on the calling thread, and the rank to blame, or -1. */
const char* hr_last_error(void);
int32_t hr_last_error_rank(void);

/* A handle > 0, or a negative hr_code. Does not block; with `blocking` it may poll for the
 * other ranks for 40 us, and the handle may be complete. */
int64_t hr_submit(const hr_request* request);
/* Starts `count` persistent requests (MPI's term) of HR_ALLREDUCE with one tensor each, in place,
 * now at `addresses`: what gradient hooks call. Each is prepared by its first starts, as hr_submit
 * would take it, and has an id then; from then on nothing of it may change but `stream` and
 * `weight`, and only the id and the weight are looked at. Where the id is no longer valid, the
 * request is prepared again. Wakes the engine once. Ends at the first that fails. Returns how many
 * were started, which have handles; where those are fewer than `count`, the next handle is the
 * negated hr_code. */
int32_t hr_start(hr_request* const* requests, const uintptr_t* addresses, int32_t count,
                 int64_t* handles);
/* 1 if complete, 0 if pending, HR_INVALID_ARGUMENT negated if there is no such handle. */
int hr_poll(int64_t handle);
/* For a thread that waits for any of many handles. Blocks until the completion counter exceeds
 * `seen`, or until the timeout. The counter counts handles that a caller had polled or waited for
 * before they completed. Returns the counter; at once if `seen` is -1. */
int64_t hr_next_completion(int64_t seen, double timeout_s);
/* Waits at most timeout_s (< 0: for ever): HR_PENDING, or the handle's final code. The handle
 * stays valid until hr_release. */
int hr_wait(int64_t handle, double timeout_s);
/* Waits at most timeout_s for all of these (0: only looks). HR_OK: all have succeeded, and are
 * released. HR_PENDING: some are not complete. Anything else: all are complete but some have
 * failed, which hr_wait tells of each; none is released. May be called again: handles that are no
 * more have succeeded. */
int hr_wait_many(const int64_t* handles, int32_t count, double timeout_s);
/* Moves result `index` out of a complete handle. HR_ALLGATHER: one per tensor. HR_ALLTOALL: the
 * tensor, then the rows received from each rank. Numbers (those rows; what HR_JOIN and later ones
 * tell) are int64. */
int hr_take_result(int64_t handle, int32_t index, hr_result* result);
void hr_free(uintptr_t data);
/* A handle with tensors on a device is complete when its work is in a stream of ours, which costs
 * no time. Its results are there when a stream has come to where it was told to wait: */

/* Has `stream`, of the device of the handle, wait for the results of a complete handle. Does not
 * block, and does nothing for a handle without tensors on a device. */
int hr_wait_in_stream(int64_t handle, uintptr_t stream);
/* As hr_wait_many; on success `stream` waits for the results. */
int hr_wait_many_in_stream(const int64_t* handles, int32_t count, double timeout_s,
                           uintptr_t stream);
/* 1 when the results of a complete handle are there and nothing uses its memory any more, 0 when
 * not, 1 where there is no such handle. */
int hr_landed(int64_t handle);
/* The first dimension of result `index` of a complete handle, which stays where it is. */
int hr_result_rows(int64_t handle, int32_t index, int64_t* rows);
/* Copies result `index`, which is on a device, to `memory` there, in the order of `stream`, which
 * waits for it; the core's is given up. */
int hr_move_result(int64_t handle, int32_t index, uintptr_t memory, uintptr_t stream);
/* CUDA device `ordinal` is the one of this process from now on, as if a tensor had been there.
 * Nothing where there are no devices. */
int hr_use_device(int32_t ordinal);
/* The version of NCCL that would be used: 23203 is 2.32.3; 0: there is none, see hr_last_error. */
int32_t hr_nccl_version(const char* nccl_libraries);
/* What is there for tensors on GPUs, one "name: value" in a line: the driver, each device, NCCL, or
 * why not. Starts the driver. */
void hr_describe_gpu(const char* cuda_library, const char* nccl_libraries, char* text,
                     int32_t text_bytes);
/* Forgets the handle. A pending one is forgotten when it completes; its memory must stay
 * valid until then. */
int hr_release(int64_t handle);

/* The timeline. Collective in effect: rank 0's call starts it on all ranks; other ranks' calls
 * only check that the engine runs. */
int hr_timeline_start(const char* path, int32_t mark_cycles);
int hr_timeline_stop(void);
int hr_timeline_enabled(void);
int64_t hr_now_ns(void);
/* stage: 0 HOOK, 1 VIEW, 2 SUBMIT (trace/trace.h); drawn on the caller's row. */
void hr_trace_span(int32_t stage, const char* tensor, int64_t begin_ns, int64_t end_ns,
                   int64_t bytes);

/* Waits at most timeout_s for a log record: 1 with a record, 0 without one, -1 when
 * hr_log_close was called. Works without an engine. */
int hr_log_next(double timeout_s, hr_log_record* record);
void hr_log_close(void);
void hr_log_open(void);
/* Maps the file of hororing/recorder.py, which stays open for appending, and notes events there
 * from now on. `stack_signal`: by whose handler the main thread appends its Python stack; 0: none.
 * Once per process. */
int hr_recorder_open(int32_t file, int32_t stack_signal);

void hr_stats_now(hr_stats* stats);
/* "avx512", "avx2" or "portable". */
const char* hr_kernels(void);
/* Library version, thread level and path of the MPI behind `mpi_library`, without initialising it:
 * "Open MPI v5.0.11, ...\nserialized\n/opt/mpi/lib/libmpi.so.40" (second line empty before
 * initialisation). */
int hr_describe_mpi(const char* mpi_library, char* text, int32_t text_bytes);

#ifdef __cplusplus
}
#endif
#endif
