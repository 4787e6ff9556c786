// The path of gradients through an optimizer's hooks, as far as it is the same for all of them.
// hororing/torch/gradient.py and reducer.py own it and do the rest.
#pragma once

#include <Python.h>

namespace hororing {

// Adds the types Queue and Gradient and the functions send_gradients and finish_gradients to the
// module. Returns -1 with an exception set if that fails.
int AddGradients(PyObject* module);

}  // namespace hororing
