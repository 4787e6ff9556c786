#include "python/requests.h"

#include <cstring>

namespace hororing {
static_assert(sizeof(long) == sizeof(int64_t), "handles are made of long");

namespace {

constexpr double kWaitSlice = 0.2;  // seconds between two checks for Python's signals

// Forgets abandoned requests that are complete.
void Sweep(const Table& table) {
  if (PyDict_Size(table.abandoned.get()) == 0) return;
  const Reference swept = Owned(PyObject_CallFunctionObjArgs(table.sweep.get(), nullptr));
  if (swept.get() == nullptr) PyErr_WriteUnraisable(table.sweep.get());
}

// Waits, and makes the core forget a successful request. HR_PENDING: an exception is set.
int Wait(int64_t handle) {
  int code = hr_wait_many(&handle, 1, 0.0, nullptr);
  while (code == HR_PENDING) {
    Py_BEGIN_ALLOW_THREADS;
    code = hr_wait_many(&handle, 1, kWaitSlice, nullptr);
    Py_END_ALLOW_THREADS;
    if (code == HR_PENDING && PyErr_CheckSignals() != 0) return HR_PENDING;
  }
  return code;
}

}  // namespace

int ParseName(PyObject* name, hr_request* request) {
  if (!PyUnicode_Check(name)) return 0;
  Py_ssize_t length = 0;
  request->name = PyUnicode_AsUTF8AndSize(name, &length);
  if (request->name == nullptr) PyErr_Clear();  // not a text; the verbs handle it
  return request->name != nullptr && std::strlen(request->name) == static_cast<size_t>(length) ? 1
                                                                                               : 0;
}

int ParseReduction(PyObject* op, PyObject* prescale, PyObject* postscale, hr_request* request) {
  if (!PyFloat_CheckExact(prescale) || !PyFloat_CheckExact(postscale)) return 0;
  request->prescale = PyFloat_AsDouble(prescale);
  request->postscale = PyFloat_AsDouble(postscale);
  request->op = HR_AVERAGE;
  if (op == Py_None) return 1;
  if (!PyLong_CheckExact(op)) return 0;
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(op, &overflow);
  if (overflow != 0 || number < 0 || number >= HR_OP_COUNT || number == HR_ADASUM) return 0;
  request->op = static_cast<int32_t>(number);
  return 1;
}

PyObject* Submit(const Table& table, const hr_request& request, PyObject* keep) {
  const int64_t handle = hr_submit(&request);
  if (handle > 0 && request.blocking != 0 && hr_wait_many(&handle, 1, 0.0, nullptr) == HR_OK) {
    Py_INCREF(keep);
    return keep;
  }
  PyObject* const number = PyLong_FromLong(handle);
  if (handle <= 0) return number;
  if (number == nullptr || PyDict_SetItem(table.pending.get(), number, keep) != 0) {
    Py_INCREF(keep);  // forever: the core may be writing there
    Py_XDECREF(number);
    return nullptr;
  }
  Sweep(table);
  return number;
}

PyObject* Finish(const Table& table, PyObject* handle) {
  const Reference found(PyDict_GetItemWithError(table.pending.get(), handle));
  if (found.get() == nullptr ||
      reinterpret_cast<PyObject*>(Py_TYPE(found.get())) == table.general.get()) {
    PyErr_Clear();  // it is not hashable
    Py_RETURN_NONE;
  }
  const long number = PyLong_AsLong(handle);  // 64 bits, and faster than long long
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  const int code = Wait(number);
  if (code == HR_PENDING) return nullptr;
  if (code == HR_OK) {
    if (PyDict_DelItem(table.pending.get(), handle) == 0) {
      Py_INCREF(found.get());
      return found.get();
    }
    PyErr_Clear();  // another thread has it
  }
  Py_RETURN_NONE;
}

}  // namespace hororing
