// Verb: a public verb as its callers see it. The most usual calls of it need no frame of Python;
// all others are made to the Python function that it was made of, with the very same arguments.
#pragma once

#include <Python.h>

namespace hororing {

int AddVerb(PyObject* module);

}  // namespace hororing
