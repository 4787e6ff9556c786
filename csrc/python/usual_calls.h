// What the usual calls of the public verbs do, without a frame of Python.
//
// Usual: plain tensors, among all ranks, arguments of the types that they are meant to have.
// Whatever else there may be, and every error, is left to the verb's Python function.
#pragma once

#include <Python.h>

#include <array>
#include <string_view>

#include "python/module.h"
#include "python/plain.h"

namespace hororing {

// What a usual call may give.
enum Parameter { kSubject, kName, kOp, kPrescale, kPostscale, kRoot, kParameters };
using Given = std::array<PyObject*, kParameters>;  // null: omitted

// What the calls of a verb work with.
struct Working {
  Reference tensors;              // PlainTensors
  Reference wait;                 // a function of a handle, for what has failed
  Reference counters, counter;    // of unnamed calls: a dict and a key of it
  const char* counted = nullptr;  // what those are named after

  const Plain& plain() const { return *PlainOf(tensors.get()); }
  const Table& table() const { return *TableOf(tensors.get()); }
};

// Null without an exception: it is not usual, and nothing has been done.
using UsualCall = PyObject* (*)(const Working&, const Given&);
UsualCall FindUsualCall(std::string_view kind);  // null: there is none of that name

}  // namespace hororing
