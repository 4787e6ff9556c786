// The common path of gradients through an optimizer's hooks. hororing/torch/gradient.py and
// reducer.py own these objects and handle all other cases.
#pragma once

#include <Python.h>

namespace hororing {

// Adds the types Queue and Gradient and the functions send_gradients and finish_gradients to the
// module. Returns -1 with an exception set if that fails.
int AddGradients(PyObject* module);

}  // namespace hororing
