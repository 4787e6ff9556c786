// How many unnamed calls there were (hororing/names.py): each step is one under the GIL.
#pragma once

#include <Python.h>

namespace hororing {

// How often `key` was counted in the dict; -1: an exception is set.
long long Counted(PyObject* counters, PyObject* key);
// 0; -1: an exception is set.
int SetCount(PyObject* counters, PyObject* key, long long count);

int AddNames(PyObject* module);

}  // namespace hororing
