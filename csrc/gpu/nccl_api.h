// The functions that we use of NCCL, libnccl.so.2, which is found at run time.
//
// Names, numbers and signatures: nccl.h of NCCL 2.32.3. The minimum is 2.14, the first with
// non-blocking communicators. tests/python/core/test_gpu_declarations.py compares the real header.
#pragma once

#include <cstddef>
#include <string>

#include "gpu/cuda_api.h"
#include "gpu/library.h"

namespace hororing {

using NcclComm = struct NcclCommOpaque*;
struct NcclId {
  char bytes[128];
};
// The first part of ncclConfig_t, as it was in 2.14: NCCL reads `size` bytes of it.
struct NcclConfig {
  size_t size;
  unsigned magic, version;
  int blocking;
};

enum NcclResult : int { kNcclSuccess = 0, kNcclInProgress = 7 };
enum NcclType : int {
  kNcclInt8 = 0,
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclInt64 = 4,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBfloat16 = 9,
};
enum NcclOp : int { kNcclSum = 0, kNcclProd = 1, kNcclMax = 2, kNcclMin = 3, kNcclAvg = 4 };
constexpr int kNcclScalarHostImmediate = 1;
constexpr unsigned kNcclConfigMagic = 0xcafebeef;
constexpr int kMinNcclVersion = 21400;
constexpr int kMinNcclVersionOfGroupedAborts = 22200;

// X(member, symbol, parameters)
#define HORORING_NCCL_FUNCTIONS(X)                                                             \
  X(get_version, ncclGetVersion, (int* version))                                               \
  X(get_unique_id, ncclGetUniqueId, (NcclId * id))                                             \
  X(comm_init, ncclCommInitRankConfig,                                                         \
    (NcclComm * comm, int ranks, NcclId id, int rank, NcclConfig* config))                     \
  X(comm_finalize, ncclCommFinalize, (NcclComm comm))                                          \
  X(comm_destroy, ncclCommDestroy, (NcclComm comm))                                            \
  X(comm_abort, ncclCommAbort, (NcclComm comm))                                                \
  X(comm_async_error, ncclCommGetAsyncError, (NcclComm comm, NcclResult * error))              \
  X(group_start, ncclGroupStart, ())                                                           \
  X(group_end, ncclGroupEnd, ())                                                               \
  X(all_reduce, ncclAllReduce,                                                                 \
    (const void* send, void* receive, size_t count, NcclType type, NcclOp op, NcclComm comm,   \
     CuStream stream))                                                                         \
  X(broadcast, ncclBroadcast,                                                                  \
    (const void* send, void* receive, size_t count, NcclType type, int root, NcclComm comm,    \
     CuStream stream))                                                                         \
  X(reduce, ncclReduce,                                                                        \
    (const void* send, void* receive, size_t count, NcclType type, NcclOp op, int root,        \
     NcclComm comm, CuStream stream))                                                          \
  X(reduce_scatter, ncclReduceScatter,                                                         \
    (const void* send, void* receive, size_t count, NcclType type, NcclOp op, NcclComm comm,   \
     CuStream stream))                                                                         \
  X(all_gather, ncclAllGather,                                                                 \
    (const void* send, void* receive, size_t count, NcclType type, NcclComm comm,              \
     CuStream stream))                                                                         \
  X(send, ncclSend,                                                                            \
    (const void* send, size_t count, NcclType type, int peer, NcclComm comm, CuStream stream)) \
  X(receive, ncclRecv,                                                                         \
    (void* receive, size_t count, NcclType type, int peer, NcclComm comm, CuStream stream))    \
  X(op_create_pre_mul_sum, ncclRedOpCreatePreMulSum,                                           \
    (NcclOp * op, void* scalar, NcclType type, int residence, NcclComm comm))                  \
  X(op_destroy, ncclRedOpDestroy, (NcclOp op, NcclComm comm))

struct NcclApi {
#define HORORING_MEMBER(member, symbol, parameters) \
  Watched<NcclResult parameters> member{#symbol, "NCCL", false};
  HORORING_NCCL_FUNCTIONS(HORORING_MEMBER)
#undef HORORING_MEMBER
  const char* (*get_error_string)(NcclResult result) = nullptr;
  const char* (*get_last_error)(NcclComm comm) = nullptr;
  Library library;
  int version = 0;  // 23203 is 2.32.3

  // Loads the first of `paths` ("a:b:c") that can be loaded. kInvalidArgument with a text for the
  // user if there is none, or if it is too old.
  static Status Load(const std::string& paths, NcclApi* api);
  std::string version_text() const;  // "2.32.3"

  // kTransport: "ncclAllReduce of NCCL 2.32.3: invalid usage: text of the last error". `comm` may
  // be null.
  Status Check(NcclResult result, const char* call, NcclComm comm) const;
};

}  // namespace hororing
