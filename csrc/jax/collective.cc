// The handlers that XLA calls: one custom call of a compiled program is one request.
//
// The handler submits and returns. XLA goes on with whatever does not need the result, and runs
// calls in any order, which may differ between ranks: requests match by name. Attributes of a call
// are those that hororing/jax/_ffi/primitive.py gives it.
#include <cstring>
#include <string>
#include <vector>

#include "capi/hororing.h"
#include "jax/completion.h"
#include "jax/xla_api.h"

namespace hororing::jax {
namespace {

// Such a request, alone in flight, is waited for: handing it to another thread takes longer.
constexpr int64_t kSmallBytes = 64 << 10;
constexpr double kShort = 0.0002;  // seconds

// Answers a question for our version. Whether the call was one.
bool AnswerMetadata(XlaCall* call) {
  constexpr int32_t kMetadata = 1;
  XlaExtension* extension = call->head.extensions;
  if (extension == nullptr || extension->type != kMetadata) return false;
  XlaVersion& version = reinterpret_cast<XlaMetadataExtension*>(extension)->metadata->version;
  version.major = 0;
  version.minor = 1;  // the oldest that has all members in xla_api.h
  return true;
}

constexpr int32_t kF64 = 12;

struct Type {
  int32_t xla, core, bytes;  // XLA_FFI_DataType, hr_dtype, size of an element
};
// clang-format off
constexpr Type kTypes[] = {
    {1, HR_BOOL, 1}, {2, HR_INT8, 1}, {3, HR_INT16, 2}, {4, HR_INT32, 4}, {5, HR_INT64, 8},
    {6, HR_UINT8, 1}, {7, HR_UINT16, 2}, {8, HR_UINT32, 4}, {9, HR_UINT64, 8}, {10, HR_FLOAT16, 2},
    {11, HR_FLOAT32, 4}, {kF64, HR_FLOAT64, 8}, {16, HR_BFLOAT16, 2}, {19, HR_FLOAT8_E5M2, 1},
    {20, HR_FLOAT8_E4M3FN, 1}, {24, HR_FLOAT8_E5M2FNUZ, 1}, {25, HR_FLOAT8_E4M3FNUZ, 1},
    {33, HR_FLOAT8_E8M0FNU, 1},
};
// clang-format on

Type TypeOf(const XlaBuffer& buffer) {
  for (const Type& each : kTypes) {
    if (each.xla == buffer.type) return each;
  }
  return {buffer.type, -1, 0};  // the core says that it lacks the type
}

int64_t BytesOf(const XlaBuffer& buffer) {
  int64_t bytes = TypeOf(buffer).bytes;
  for (int64_t d = 0; d < buffer.rank; ++d) bytes *= buffer.dimensions[d];
  return bytes;
}

// The attributes, which XLA sorts by their names.
struct Given {
  explicit Given(const XlaAttributes& all)
      : valid(all.size == 3 && static_cast<const XlaArray*>(all.values[0])->size == kIntegers) {
    if (!valid) return;
    integers = static_cast<const int64_t*>(static_cast<const XlaArray*>(all.values[0])->data);
    const auto& span = *static_cast<const XlaSpan*>(all.values[1]);
    name.assign(span.data, span.size);
    numbers = static_cast<const double*>(static_cast<const XlaArray*>(all.values[2])->data);
  }

  enum Integer { kCollective, kProcessSet, kOp, kRoot, kWeighted, kIntegers };
  enum Number { kPrescale, kPostscale, kWeight };
  int32_t Integer(Integer which) const { return static_cast<int32_t>(integers[which]); }

  const bool valid;  // or the program was compiled for another version of hororing
  std::string name;
  const int64_t* integers = nullptr;
  const double* numbers = nullptr;
};

XlaError* WrongVersion(const XlaApi* api) {
  return MakeError(api, HR_INVALID_ARGUMENT,
                   "this program was compiled for another version of hororing; clear JAX's "
                   "persistent compilation cache");
}

// Memory for a result that the core allocates, whose size depends on other ranks.
struct Room {
  void* data;
  int64_t bytes, rows;
};

// `stream`: of the device with the room; null: it is in host memory.
XlaError* TakeResult(const XlaApi* api, const std::string& name, int64_t handle, int32_t index,
                     const Room& room, const uintptr_t* stream) {
  int64_t rows = 0;
  int code = hr_result_rows(handle, index, &rows);
  if (code == HR_OK && rows != room.rows) {
    return MakeError(api, HR_MISMATCH,
                     "'" + name + "': in a compiled program all ranks pass equally many rows; " +
                         "this one expects " + std::to_string(room.rows) +
                         " rows in all, and there are " + std::to_string(rows) +
                         ". Call it outside of jax.jit");
  }
  hr_result result{};
  if (code == HR_OK && stream != nullptr) {
    code = hr_move_result(handle, index, reinterpret_cast<uintptr_t>(room.data), *stream);
  } else if (code == HR_OK && (code = hr_take_result(handle, index, &result)) == HR_OK) {
    if (room.bytes > 0) {
      std::memcpy(room.data, reinterpret_cast<const void*>(result.data),
                  static_cast<size_t>(room.bytes));
    }
    hr_free(result.data);
  }
  return code == HR_OK ? nullptr : CoreError(api, code);
}

class Execution {
 public:
  explicit Execution(XlaCall* call) : call_(call), given_(call->attributes) {}

  XlaError* Run() {
    if (!given_.valid) return WrongVersion(call_->api);
    ReadAttributes();
    ReadTensors();
    // Alone in flight: most often the only request of a program.
    const bool try_at_once = bytes_ <= kSmallBytes && NothingInFlight();
    request_.blocking = try_at_once ? 1 : 0;
    const int64_t handle = hr_submit(&request_);
    if (handle < 0) return CoreError(call_->api, static_cast<int>(-handle));
    if (try_at_once) hr_wait(handle, kShort);
    return CompleteLater(call_, handle, Finish(nullptr));
  }

  // Returns when the results are in the order of XLA's stream, whatever it has still to compute.
  // XLA starts the work of a program in one order, which ranks with equal programs share.
  XlaError* RunOnGpu() {
    if (!given_.valid) return WrongVersion(call_->api);
    const XlaApi& api = *call_->api;
    if (api.head.struct_size < sizeof(XlaApi)) {
      return MakeError(&api, HR_INVALID_ARGUMENT,
                       "this version of jaxlib does not tell which GPU runs a compiled function; " +
                           std::string("install a newer one, such as 0.10"));
    }
    XlaStreamGet stream{{sizeof(stream), nullptr}, call_->context, nullptr};
    if (XlaError* error = api.stream_get(&stream)) return error;
    XlaDeviceOrdinalGet device{{sizeof(device), nullptr}, call_->context, 0};
    if (XlaError* error = api.device_ordinal_get(&device)) return error;
    ReadAttributes();
    ReadTensors();
    for (hr_tensor& each : tensors_) each.device = device.ordinal + 1;
    request_.stream = reinterpret_cast<uintptr_t>(stream.stream);
    request_.blocking = 1;
    const int64_t handle = hr_submit(&request_);
    if (handle < 0) return CoreError(&api, static_cast<int>(-handle));
    int code = hr_wait(handle, -1);
    if (code == HR_OK) code = hr_wait_in_stream(handle, request_.stream);
    XlaError* error = code == HR_OK ? Finish(&request_.stream)(handle) : CoreError(&api, code);
    hr_release(handle);
    return error;
  }

 private:
  void ReadAttributes() {
    request_.collective = given_.Integer(Given::kCollective);
    request_.name = given_.name.c_str();
    request_.process_set = given_.Integer(Given::kProcessSet);
    request_.op = given_.Integer(Given::kOp);
    request_.root = given_.Integer(Given::kRoot);
    request_.prescale = given_.numbers[Given::kPrescale];
    request_.postscale = given_.numbers[Given::kPostscale];
    weight_ = given_.numbers[Given::kWeight];
  }

  // The last argument may be this rank's weight, unless that is an attribute.
  void ReadTensors() {
    int64_t count = call_->arguments.size;
    const int32_t weighted = given_.Integer(Given::kWeighted);  // 1: an argument; 2: an attribute
    if (weighted != 0) request_.weight = &weight_;
    if (weighted == 1) {
      const XlaBuffer& weight = *call_->arguments.buffers[--count];
      weight_ = weight.type == kF64 ? *static_cast<const double*>(weight.data)
                                    : *static_cast<const float*>(weight.data);
    }
    if (request_.collective == HR_BARRIER) return;  // its argument only keeps the order
    for (int64_t i = 0; i < count; ++i) {
      const XlaBuffer& input = *call_->arguments.buffers[i];
      hr_tensor tensor{};
      tensor.input = reinterpret_cast<uintptr_t>(input.data);
      if (!CoreAllocates()) {
        tensor.output = reinterpret_cast<uintptr_t>(call_->results.buffers[i]->data);
      }
      tensor.dtype = TypeOf(input).core;
      tensor.ndim = static_cast<int32_t>(input.rank);
      tensor.shape = input.dimensions;
      tensors_.push_back(tensor);
      bytes_ += BytesOf(input);
    }
    request_.tensors_count = static_cast<int32_t>(tensors_.size());
    request_.tensors = tensors_.data();
  }

  bool CoreAllocates() const {
    return request_.collective == HR_ALLGATHER || request_.collective == HR_ALLTOALL;
  }

  TakeResults Finish(const uintptr_t* stream) const {
    std::vector<Room> rooms;
    for (size_t i = 0; CoreAllocates() && i < tensors_.size(); ++i) {
      const XlaBuffer& result = *call_->results.buffers[i];
      rooms.push_back({result.data, BytesOf(result), result.dimensions[0]});
    }
    return [api = call_->api, name = given_.name, rooms, stream](int64_t handle) {
      XlaError* error = nullptr;
      for (size_t i = 0; i < rooms.size() && error == nullptr; ++i) {
        error = TakeResult(api, name, handle, static_cast<int32_t>(i), rooms[i], stream);
      }
      return error;
    };
  }

  XlaCall* const call_;
  const Given given_;
  hr_request request_{};
  double weight_ = 0;
  std::vector<hr_tensor> tensors_;
  int64_t bytes_ = 0;
};

}  // namespace
}  // namespace hororing::jax

#pragma GCC visibility push(default)
extern "C" {
using namespace hororing::jax;
XlaError* hororing_jax_execute(XlaCall* call) {
  return AnswerMetadata(call) ? nullptr : Execution(call).Run();
}
XlaError* hororing_jax_execute_on_gpu(XlaCall* call) {
  return AnswerMetadata(call) ? nullptr : Execution(call).RunOnGpu();
}
void hororing_jax_end_threads() { EndThreads(); }
}
#pragma GCC visibility pop
