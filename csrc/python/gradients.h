// The common path of gradients through an optimizer's hooks. hororing/torch/_optimizer/gradient.py
// and step.py own these objects and handle all other cases.
#pragma once

#include <Python.h>

namespace hororing {

// Adds the types Queue and Gradient and the function finish_gradients to the module. Returns -1
// with an exception set if that fails.
int AddGradients(PyObject* module);

// PlainTensors.send_gradients.
extern const char* const kSendGradientsText;
PyObject* SendGradients(PyObject* self, PyObject* const* arguments, Py_ssize_t count);

}  // namespace hororing
