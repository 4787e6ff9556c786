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

// Python calls this instead of `function`, because C++ must not throw into Python. It usually
// catches std::bad_alloc.
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

}  // namespace hororing
