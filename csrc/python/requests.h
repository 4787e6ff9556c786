// Requests of plain tensors on their way into the core and out of it, as hororing/collectives.py
// keeps them. Under the GIL; only waiting gives it up.
#pragma once

#include <Python.h>

#include <cstdint>

#include "capi/hororing.h"
#include "python/in_flight.h"
#include "python/plain.h"

namespace hororing {

struct Table {
  Reference pending;    // InFlight: what owns the memory and is the result, or a `general`
  Reference general;    // the type of those that have to be finished in another way
  Reference abandoned;  // dict; to be swept when something is in it
  Reference sweep;      // function without arguments

  InFlight& in_flight() const { return *InFlightOf(pending.get()); }
};

// What the core can take of the arguments of a reduction as they are. 1: it is in `request`; 0:
// they need a closer look; -1: an exception is set. Null is an argument that is omitted.
int ParseName(PyObject* name, hr_request* request);
int ParseRoot(PyObject* root, hr_request* request);
int ParseReduction(PyObject* op, PyObject* prescale, PyObject* postscale, hr_request* request);

// A handle, and `keep` owns what the core borrows until it is finished; or the core's code,
// negated.
PyObject* Submit(const Table& table, const hr_request& request, PyObject* keep);
// Notes the owner of what the core borrows for a handle. Null: an exception is set, and the owner
// lives for ever.
PyObject* Note(const Table& table, int64_t handle, PyObject* keep);

// Forgets what has landed of that which nobody waits for.
void Sweep(const Table& table);

// Waits, and has the core forget a request that has succeeded, which is in no table. HR_PENDING: an
// exception is set.
int Wait(int64_t handle);
// What was kept for a handle, once it is done. None: it is unknown, has failed or must be finished
// in another way, and was not forgotten.
PyObject* Finish(const Table& table, PyObject* handle);

}  // namespace hororing
