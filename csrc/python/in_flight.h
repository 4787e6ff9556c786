// InFlight: what owns the memory that the core reads and writes, by the handle of the request. An
// array, since a handle has its place in it: nothing is hashed, and Python's garbage collector has
// no thousand entries to look through.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

#include "capi/hororing.h"
#include "python/writes.h"

namespace hororing {

// Under the GIL. What is left in the end lives for ever: the core may be writing there.
class InFlight {
 public:
  // False: out of memory, with an exception set. REQUIRES: the core has not forgotten the handle;
  // and until it is taken out, nobody has the core do so but under the GIL, and takes it out then.
  bool Put(int64_t handle, PyObject* owner);
  // Borrowed; null: there is none.
  PyObject* Find(int64_t handle) const;
  // The reference; null: there is none.
  PyObject* Take(int64_t handle);
  Py_ssize_t size() const { return size_; }
  // Of what is in flight. To be told before the core forgets a handle whose owner is given back.
  Writes& writes() { return writes_; }

 private:
  struct Slot {
    int64_t handle = 0;  // 0: free
    PyObject* owner = nullptr;
  };
  static size_t PlaceOf(int64_t handle) {
    return static_cast<size_t>(handle & ((int64_t{1} << HR_HANDLE_PLACE_BITS) - 1));
  }

  std::vector<Slot> slots_;
  Py_ssize_t size_ = 0;
  Writes writes_;
};

// Of an object of type InFlight; null for others.
InFlight* InFlightOf(PyObject* object);
// The number of a handle; 0, which none has: the object is no number of that size.
int64_t HandleOf(PyObject* object);

int AddInFlight(PyObject* module);

}  // namespace hororing
