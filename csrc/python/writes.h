// Writes: of which tensors a framework has to be told that they were written to. It is told of many
// together, which is quicker, and before any of them is given back as a result.
#pragma once

#include <Python.h>

#include <cstddef>
#include <vector>

#include "python/plain.h"

namespace hororing {

// Under the GIL.
class Writes {
 public:
  // `tell`: counts writes to the tensors of a tuple.
  void Add(PyObject* tell, PyObject* tensor);
  // May run anything. That it cannot be is told, not raised: the writes have happened.
  void Tell();

 private:
  static constexpr size_t kMost = 64;  // at a time: what is abandoned should not live much longer

  Reference tell_;  // of tensors_
  std::vector<Reference> tensors_;
};

}  // namespace hororing
