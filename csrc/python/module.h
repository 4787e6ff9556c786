// Shared by the files of the module.
#pragma once

#include <Python.h>

#include <exception>

#include "python/dlpack_view.h"
#include "python/requests.h"

namespace hororing {

struct PlainTensors {
  PyObject_HEAD Plain* plain;
  Table* table;
};

// Python calls this instead of `function`: C++ (std::bad_alloc, mostly) must not throw into Python.
template <auto function>
struct Catching;
template <typename... Given, PyObject* (*function)(Given...)>
struct Catching<function> {
  static PyObject* Call(Given... given) {
    try {
      return function(given...);
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
  }
};

template <typename Function>
PyCFunction AsMethod(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

template <typename Function>
void* AsSlot(Function function) {
  return reinterpret_cast<void*>(function);
}

// gradients.cc: the common path of gradients through an optimizer's hooks.
// hororing/torch/_optimizer/gradient.py and step.py own these objects and handle all other cases.

// Adds Queue, Gradient and finish_gradients to the module. Returns -1 with an exception set.
int AddGradients(PyObject* module);

// PlainTensors.send_gradients.
extern const char* const kSendGradientsText;
PyObject* SendGradients(PyObject* self, PyObject* const* arguments, Py_ssize_t count);

}  // namespace hororing
