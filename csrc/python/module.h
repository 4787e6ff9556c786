// Shared by the files of the module.
#pragma once

#include <Python.h>

#include <exception>

#include "python/plain.h"

namespace hororing {

// Of an object of type PlainTensors; null for others.
const Plain* PlainOf(PyObject* object);

// Out of memory, mostly: C++ may not throw into Python.
template <typename Function, typename... Given>
PyObject* Caught(const Function& function, const Given&... given) {
  try {
    return function(given...);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

template <typename Function>
PyCFunction AsMethod(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

template <typename Function>
void* AsSlot(Function function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace hororing
