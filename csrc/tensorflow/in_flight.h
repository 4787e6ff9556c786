// Requests that were submitted and not yet waited for, with the tensors whose memory they use.
//
// The core reads and writes that memory until a request is complete, even if the graph that
// submitted it no longer runs: when another operation of the graph fails, TensorFlow drops the
// tensors of the rest. References are therefore held here. TensorFlow drops the handle, too, which
// shows that a request is abandoned. The request continues, because other ranks take part in it,
// and is forgotten when it is complete.
//
// Callable from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/api.h"

namespace hororing::tensorflow {

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { api.DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;  // a reference, not the memory

struct InFlight {
  int64_t collective;           // hr_collective
  std::string key;              // process set and name, unique among requests in flight
  std::vector<Tensor> inputs;   // null if an output took over the memory
  std::vector<Tensor> outputs;  // none if the core allocates the results
};

// Takes ownership of the tensors that `handle` uses.
void Keep(int64_t handle, InFlight request);

// Blocks until `handle` is complete, and forgets it. 0 or an hr_code; hr_last_error() has the
// reason on this thread. `collect` sees a request that has succeeded before the core forgets it.
int Finish(int64_t handle, const std::function<void(const InFlight&)>& collect);

// Blocks until the request of this key is complete, if there is one and it was abandoned.
void FinishAbandoned(const std::string& key);

// A tensor for a handle, to be filled in. If it is freed before Finish, the request is abandoned.
Tensor NewHandle();

}  // namespace hororing::tensorflow
