#include "python/requests.h"

#include <cstring>

namespace hororing {

static_assert(sizeof(long) == sizeof(int64_t), "handles are made of long");

namespace {

constexpr double kWaitSlice = 0.2;  // seconds between two looks at Python's signals

int ParseFactor(PyObject* factor, double* number) {
  *number = 1.0;
  if (factor == nullptr) return 1;
  if (!PyFloat_CheckExact(factor)) return 0;
  *number = PyFloat_AsDouble(factor);
  return 1;
}

}  // namespace

int ParseName(PyObject* name, hr_request* request) {
  if (!PyUnicode_CheckExact(name)) return 0;
  Py_ssize_t length = 0;
  request->name = PyUnicode_AsUTF8AndSize(name, &length);
  if (request->name == nullptr) PyErr_Clear();  // no text; verbs know what to do
  return request->name != nullptr && std::strlen(request->name) == static_cast<size_t>(length) ? 1
                                                                                               : 0;
}

int ParseReduction(PyObject* op, PyObject* prescale, PyObject* postscale, hr_request* request) {
  request->op = HR_AVERAGE;
  if (op != nullptr && op != Py_None) {
    if (!PyLong_CheckExact(op)) return 0;
    int overflow = 0;
    const long number = PyLong_AsLongAndOverflow(op, &overflow);
    if (overflow != 0 || number < HR_AVERAGE || number > HR_PRODUCT || number == HR_ADASUM)
      return 0;
    request->op = static_cast<int32_t>(number);
  }
  return ParseFactor(prescale, &request->prescale) == 1 &&
                 ParseFactor(postscale, &request->postscale) == 1
             ? 1
             : 0;
}

int ParseRoot(PyObject* root, hr_request* request) {
  if (root == nullptr || !PyLong_CheckExact(root)) return 0;
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(root, &overflow);
  request->root = static_cast<int32_t>(number);
  return overflow == 0 && request->root == number ? 1 : 0;
}

void Sweep(const Table& table) {
  if (PyDict_Size(table.abandoned.get()) == 0) return;
  PyObject* const swept = PyObject_CallFunctionObjArgs(table.sweep.get(), nullptr);
  if (swept == nullptr) PyErr_WriteUnraisable(table.sweep.get());
  Py_XDECREF(swept);
}

PyObject* Note(const Table& table, int64_t handle, PyObject* keep) {
  PyObject* const number = PyLong_FromLong(handle);
  if (number == nullptr || !table.in_flight().Put(handle, keep)) {
    Py_INCREF(keep);  // for ever: the core may be writing there
    Py_XDECREF(number);
    return nullptr;
  }
  return number;
}

PyObject* Submit(const Table& table, const hr_request& request, PyObject* keep) {
  const int64_t handle = hr_submit(&request);
  if (handle <= 0) return PyLong_FromLong(handle);
  PyObject* const number = Note(table, handle, keep);
  if (number != nullptr) Sweep(table);
  return number;
}

int Wait(int64_t handle) {
  int code = HR_PENDING;
  while (code == HR_PENDING) {
    Py_BEGIN_ALLOW_THREADS;
    code = hr_finish(handle, kWaitSlice);
    Py_END_ALLOW_THREADS;
    if (code == HR_PENDING && PyErr_CheckSignals() != 0) return HR_PENDING;
  }
  return code;
}

PyObject* Finish(const Table& table, PyObject* handle) {
  const int64_t number = HandleOf(handle);
  const Reference found(table.in_flight().Find(number));
  if (found.get() == nullptr ||
      reinterpret_cast<PyObject*>(Py_TYPE(found.get())) == table.general.get()) {
    Py_RETURN_NONE;
  }
  table.in_flight().writes().Tell();
  // The core forgets it under the GIL: until it is taken out of the table, no other may have its
  // place there.
  int code = hr_finish(number, 0.0);
  while (code == HR_PENDING) {
    Py_BEGIN_ALLOW_THREADS;
    code = hr_wait(number, kWaitSlice);
    Py_END_ALLOW_THREADS;
    if (code == HR_PENDING && PyErr_CheckSignals() != 0) return nullptr;
    if (code != HR_PENDING) code = hr_finish(number, 0.0);
  }
  PyObject* const taken = code == HR_OK ? table.in_flight().Take(number) : nullptr;
  if (taken != nullptr) return taken;
  Py_RETURN_NONE;  // or another thread has it
}

}  // namespace hororing
