// The part of XLA's foreign function interface that the plug-in needs, declared by ourselves.
//
// No header of XLA is included, no library linked: a call brings the functions with it. Layouts as
// in xla/ffi/api/c_api.h, a stable interface; versions 0.1 (jaxlib 0.5) to 0.3 (jaxlib 0.10) were
// tried. XLA keeps the arguments, results and attributes of a call alive until its future is
// complete.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hororing::jax {

struct XlaError;   // opaque
struct XlaFuture;  // opaque

constexpr int32_t kFailedPrecondition = 9, kAborted = 10;  // XLA_FFI_Error_Code

// The beginning of every struct: its size, and a list of extensions.
struct XlaExtension {
  size_t struct_size;
  int32_t type;
  XlaExtension* next;
};
struct XlaHead {
  size_t struct_size;
  XlaExtension* extensions;
};
struct XlaVersion {
  XlaHead head;
  int32_t major, minor;
};

// A call with this extension (type 1) asks for our version instead of work.
struct XlaMetadataExtension {
  XlaExtension base;
  struct {
    size_t struct_size;
    XlaVersion version;  // what follows in later versions keeps its defaults
  }* metadata;
};

struct XlaBuffer {
  XlaHead head;
  int32_t type;  // XLA_FFI_DataType
  void* data;
  int64_t rank;
  int64_t* dimensions;
};
struct XlaSpan {
  const char* data;
  size_t size;
};
struct XlaArray {
  int32_t type;
  size_t size;
  const void* data;
};

// Arguments or results; all of them are buffers here.
struct XlaBuffers {
  XlaHead head;
  int64_t size;
  int32_t* kinds;
  XlaBuffer** buffers;
};
struct XlaAttributes {
  XlaHead head;
  int64_t size;
  int32_t* kinds;
  XlaSpan** names;
  void** values;  // XlaArray or XlaSpan
};
struct XlaErrorCreate {
  XlaHead head;
  const char* message;
  int32_t code;
};

// Of three calls, to create a future (an out parameter), to make it available, and to fail it.
struct XlaFutureCall {
  XlaHead head;
  XlaFuture* future;
  XlaError* error;  // passes to XLA
};
struct XlaStreamGet {
  XlaHead head;
  const void* context;
  void* stream;  // out; on CUDA a CUstream
};
struct XlaDeviceOrdinalGet {
  XlaHead head;
  const void* context;
  int32_t ordinal;  // out
};
struct XlaApi {
  XlaHead head;
  XlaVersion version;
  const void* internal;
  XlaError* (*error_create)(XlaErrorCreate*);
  void* unused[3];
  XlaError* (*stream_get)(XlaStreamGet*);
  void* unused_too[8];
  XlaError* (*future_create)(XlaFutureCall*);
  XlaError* (*future_set_available)(XlaFutureCall*);
  XlaError* (*future_set_error)(XlaFutureCall*);
  void* run_id_get;  // this and what follows: from version 0.3, see head.struct_size
  XlaError* (*device_ordinal_get)(XlaDeviceOrdinalGet*);
};
struct XlaCall {
  XlaHead head;
  const XlaApi* api;
  const void* context;
  int32_t stage;
  XlaBuffers arguments;
  XlaBuffers results;
  XlaAttributes attributes;
  XlaFuture* future;  // out
};

}  // namespace hororing::jax
