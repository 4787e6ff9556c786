// The path of gradients through an optimizer's hooks, as far as it is the same for all of them.
// hororing/torch/gradient.py and reducer.py own it and do the rest.
#pragma once

#include <Python.h>

namespace hororing {

// Adds the types Arrivals, Gradient and Prepared, and the functions below, to the module. -1: an
// exception is set.
int AddGradients(PyObject* module);

}  // namespace hororing
