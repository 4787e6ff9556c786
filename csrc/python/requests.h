// Requests of plain tensors, from submission to result, in the tables of
// hororing/_requests/handles.py. Under the GIL, which is released only for waiting.
#pragma once

#include <Python.h>

#include "capi/hororing.h"
#include "python/dlpack_view.h"

namespace hororing {

struct Table {
  Reference pending;    // dict: handle -> the result, which owns the memory, or a `general`
  Reference general;    // the type of entries that Python code must finish
  Reference abandoned;  // dict; to be swept unless it is empty
  Reference sweep;      // function without arguments
};

// Fast parsing of a reduction's arguments. 1: they are in `request`; 0: Python must check them.
int ParseName(PyObject* name, hr_request* request);
int ParseReduction(PyObject* op, PyObject* prescale, PyObject* postscale, hr_request* request);

// Returns a handle, and `keep` owns the memory that the core uses until the request is finished; or
// the core's code, negated; or `keep`, if the caller waits and the request is already finished.
// Null: an exception is set, and `keep` is never freed.
PyObject* Submit(const Table& table, const hr_request& request, PyObject* keep);

// Waits for a handle, forgets it, and returns the `keep` of Submit. None: the handle is unknown,
// has failed or must be finished by Python code, and was not forgotten.
PyObject* Finish(const Table& table, PyObject* handle);

}  // namespace hororing
