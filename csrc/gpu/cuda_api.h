// The functions of NVIDIA's driver that we use. libcuda.so.1 is found at run time: the build needs
// nothing of CUDA, and a machine without a GPU never loads it.
//
// Names, numbers and signatures are those of cuda.h of CUDA 13.0. All have existed since CUDA 11.2,
// and the driver keeps them (a symbol with a version suffix never changes; newer ones are added).
// tests/python/core/test_gpu_declarations.py compares them with the real header, if present.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "gpu/library.h"

namespace hororing {

// Opaque types. A CuAddress is an address in device memory.
using CuResult = int;
using CuDevice = int;
using CuAddress = uint64_t;
using CuContext = struct CuContextOpaque*;
using CuStream = struct CuStreamOpaque*;  // null: the default stream
using CuEvent = struct CuEventOpaque*;
using CuModule = struct CuModuleOpaque*;
using CuFunction = struct CuFunctionOpaque*;
struct CuUuid {
  char bytes[16];
};

constexpr CuResult kCuSuccess = 0;
constexpr CuResult kCuNotReady = 600;
// CUDA_ERROR_STREAM_CAPTURE_...: what a stream that is captured cannot take.
constexpr CuResult kCuFirstCaptureError = 900, kCuLastCaptureError = 908;
constexpr unsigned kCuStreamNonBlocking = 1;     // does not wait for the default stream
constexpr unsigned kCuEventDisableTiming = 2;    // cheaper
constexpr unsigned kCuMemHostAllocPortable = 1;  // pinned for every context
constexpr int kCuMemoryPoolsSupported = 115;     // an attribute of a device
constexpr int kCuStreamCaptureStatusNone = 0;
constexpr int kCuStreamCaptureModeRelaxed = 2;
constexpr int kMinCudaVersion = 11020;  // 11.2: memory that is allocated in the order of a stream

// X(member, symbol, parameters)
#define HORORING_CUDA_FUNCTIONS(X)                                                                 \
  X(init, cuInit, (unsigned flags))                                                                \
  X(driver_get_version, cuDriverGetVersion, (int* version))                                        \
  X(get_error_name, cuGetErrorName, (CuResult result, const char** text))                          \
  X(get_error_string, cuGetErrorString, (CuResult result, const char** text))                      \
  X(device_get, cuDeviceGet, (CuDevice * device, int ordinal))                                     \
  X(device_get_count, cuDeviceGetCount, (int* count))                                              \
  X(device_get_name, cuDeviceGetName, (char* name, int bytes, CuDevice device))                    \
  X(device_get_attribute, cuDeviceGetAttribute, (int* value, int attribute, CuDevice device))      \
  X(device_get_uuid, cuDeviceGetUuid, (CuUuid * uuid, CuDevice device))                            \
  X(primary_ctx_retain, cuDevicePrimaryCtxRetain, (CuContext * context, CuDevice device))          \
  X(primary_ctx_release, cuDevicePrimaryCtxRelease_v2, (CuDevice device))                          \
  X(ctx_push, cuCtxPushCurrent_v2, (CuContext context))                                            \
  X(ctx_pop, cuCtxPopCurrent_v2, (CuContext * context))                                            \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))                         \
  X(ctx_priorities, cuCtxGetStreamPriorityRange, (int* least, int* greatest))                      \
  X(stream_create, cuStreamCreateWithPriority, (CuStream * stream, unsigned flags, int priority))  \
  X(stream_destroy, cuStreamDestroy_v2, (CuStream stream))                                         \
  X(stream_synchronize, cuStreamSynchronize, (CuStream stream))                                    \
  X(stream_wait_event, cuStreamWaitEvent, (CuStream stream, CuEvent event, unsigned flags))        \
  X(stream_is_capturing, cuStreamIsCapturing, (CuStream stream, int* status))                      \
  X(event_create, cuEventCreate, (CuEvent * event, unsigned flags))                                \
  X(event_record, cuEventRecord, (CuEvent event, CuStream stream))                                 \
  X(event_query, cuEventQuery, (CuEvent event))                                                    \
  X(event_destroy, cuEventDestroy_v2, (CuEvent event))                                             \
  X(mem_alloc, cuMemAlloc_v2, (CuAddress * memory, size_t bytes))                                  \
  X(mem_free, cuMemFree_v2, (CuAddress memory))                                                    \
  X(mem_alloc_async, cuMemAllocAsync, (CuAddress * memory, size_t bytes, CuStream stream))         \
  X(mem_free_async, cuMemFreeAsync, (CuAddress memory, CuStream stream))                           \
  X(mem_host_alloc, cuMemHostAlloc, (void** memory, size_t bytes, unsigned flags))                 \
  X(mem_free_host, cuMemFreeHost, (void* memory))                                                  \
  X(copy_to_device, cuMemcpyHtoDAsync_v2,                                                          \
    (CuAddress to, const void* from, size_t bytes, CuStream stream))                               \
  X(copy_to_host, cuMemcpyDtoHAsync_v2, (void* to, CuAddress from, size_t bytes, CuStream stream)) \
  X(copy_on_device, cuMemcpyDtoDAsync_v2,                                                          \
    (CuAddress to, CuAddress from, size_t bytes, CuStream stream))                                 \
  X(module_load_data, cuModuleLoadData, (CuModule * module, const void* image))                    \
  X(module_unload, cuModuleUnload, (CuModule module))                                              \
  X(module_get_function, cuModuleGetFunction,                                                      \
    (CuFunction * function, CuModule module, const char* name))                                    \
  X(launch_kernel, cuLaunchKernel,                                                                 \
    (CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,     \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream stream,                   \
     void** parameters, void** extra))

struct CudaApi {
#define HORORING_MEMBER(member, symbol, parameters) \
  Watched<CuResult parameters> member{#symbol, "NVIDIA's driver", true};
  HORORING_CUDA_FUNCTIONS(HORORING_MEMBER)
#undef HORORING_MEMBER
  Library library;
  int version = 0;  // of the CUDA that the driver is made for: 13000 is 13.0
  int devices = 0;

  // Loads the driver and starts it. kInvalidArgument with a text for the user if there is none, if
  // it is too old, or if it finds no device.
  static Status Load(const std::string& paths, CudaApi* api);
  std::string version_text() const {  // "12.8"
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  }

  // Calls a function. kTransport: "cuMemAllocAsync: out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2)";
  // kInvalidArgument if the cause is that the framework captures its stream into a graph.
  template <typename Function, typename... Arguments>
  Status Call(const Function& function, Arguments... arguments) const {
    return Check(function(arguments...), function.name());
  }
  // The same for a result of `call`, which may have a version suffix.
  Status Check(CuResult result, const std::string& call) const;
};

// Tells the user what to do about a collective while a graph is captured.
std::string CapturedText();

}  // namespace hororing
