// The way of gradients through an optimizer's hooks, as far as all of them go the same way:
// hororing/torch/gradient.py and reducer.py are the owners, and do the rest.
#pragma once

#include <Python.h>

namespace hororing {

// Adds the types Arrivals, Gradient and Prepared, and the functions below, to the module. -1: an
// exception is set.
int AddGradients(PyObject* module);

}  // namespace hororing
