#include "negotiation/messages.h"

namespace hororing {

bool Request::operator==(const Request& other) const {
  return kind == other.kind && op == other.op && root == other.root && prescale == other.prescale &&
         postscale == other.postscale && name == other.name && tensors == other.tensors;
}

int64_t Request::bytes() const {
  int64_t total = 0;
  for (const Tensor& tensor : tensors) {
    int64_t elements = 1;
    for (int64_t dimension : tensor.shape) elements *= dimension;
    total += elements * static_cast<int64_t>(ElementSize(tensor.dtype));
  }
  return total;
}

}  // namespace hororing
