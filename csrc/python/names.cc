#include "python/names.h"

#include "python/module.h"

namespace hororing {
namespace {

const char* const kCountText =
    "count_name(counters, key)\n\n"
    "Count `key` in a dict, in one step, and return how often it has been.";

PyObject* CountName(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyDict_Check(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "count_name takes a dict and a key");
    return nullptr;
  }
  const long long number = Counted(arguments[0], arguments[1]);
  if (number < 0 || SetCount(arguments[0], arguments[1], number + 1) != 0) return nullptr;
  return PyLong_FromLongLong(number + 1);
}

const char* const kUncountText =
    "uncount_name(counters, key, number)\n\n"
    "Undo, in one step, that `key` was counted, if none was after `number`.";

PyObject* UncountName(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyDict_Check(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "uncount_name takes a dict, a key and a number");
    return nullptr;
  }
  const long long given = PyLong_AsLongLong(arguments[2]);
  if (given == -1 && PyErr_Occurred() != nullptr) return nullptr;
  const long long number = Counted(arguments[0], arguments[1]);
  if (number < 0) return nullptr;
  if (number == given && number > 0 && SetCount(arguments[0], arguments[1], number - 1) != 0) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

}  // namespace

long long Counted(PyObject* counters, PyObject* key) {
  PyObject* const number = PyDict_GetItemWithError(counters, key);
  if (number == nullptr) return PyErr_Occurred() == nullptr ? 0 : -1;
  return PyLong_AsLongLong(number);
}

int SetCount(PyObject* counters, PyObject* key, long long count) {
  PyObject* const number = PyLong_FromLongLong(count);
  const int set = number == nullptr ? -1 : PyDict_SetItem(counters, key, number);
  Py_XDECREF(number);
  return set;
}

int AddNames(PyObject* module) {
  static PyMethodDef functions[] = {
      {"count_name", AsMethod(CountName), METH_FASTCALL, kCountText},
      {"uncount_name", AsMethod(UncountName), METH_FASTCALL, kUncountText},
      {nullptr, nullptr, 0, nullptr},
  };
  return PyModule_AddFunctions(module, functions);
}

}  // namespace hororing
