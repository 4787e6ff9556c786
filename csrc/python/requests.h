// Requests of plain tensors, from submission to result, as hororing/collectives.py keeps them.
// Under the GIL, which only waiting releases.
#pragma once

#include <Python.h>

#include <cstdint>

#include "capi/hororing.h"
#include "python/dlpack_view.h"

namespace hororing {

struct Table {
  Reference pending;    // dict: by handle, what owns the memory and is the result, or a `general`
  Reference general;    // the type of those that have to be finished in another way
  Reference abandoned;  // dict; to be swept when something is in it
  Reference sweep;      // function without arguments
};

// What the core can take of the arguments of a reduction as they are. 1: it is in `request`; 0:
// they need a closer look.
int ParseName(PyObject* name, hr_request* request);
int ParseReduction(PyObject* op, PyObject* prescale, PyObject* postscale, hr_request* request);

// A handle, and `keep` owns what the core borrows until it is finished; or the core's code,
// negated; or `keep`, where the caller waits and it is finished already. Null: an exception is set,
// and the owner lives for ever.
PyObject* Submit(const Table& table, const hr_request& request, PyObject* keep);

// What was kept for a handle, once it is done. None: it is unknown, has failed or must be finished
// in another way, and was not forgotten.
PyObject* Finish(const Table& table, PyObject* handle);

}  // namespace hororing
