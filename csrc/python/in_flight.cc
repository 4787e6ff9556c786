#include "python/in_flight.h"

#include <new>

#include "python/module.h"

namespace hororing {
namespace {

struct Object {
  PyObject_HEAD InFlight* table;
};

PyTypeObject* in_flight_type;  // of the process, as its engine is

InFlight& TableIn(PyObject* self) { return *reinterpret_cast<Object*>(self)->table; }

PyObject* New(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (self != nullptr) reinterpret_cast<Object*>(self)->table = new InFlight;
  return self;
}

void Delete(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->table;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

Py_ssize_t Length(PyObject* self) { return TableIn(self).size(); }

PyObject* OrNone(PyObject* reference) {
  if (reference != nullptr) return reference;
  Py_RETURN_NONE;
}

PyObject* Put(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const int64_t handle = count == 2 ? HandleOf(arguments[0]) : 0;
  if (handle <= 0) {
    PyErr_SetString(PyExc_TypeError, "put takes a handle and an object");
    return nullptr;
  }
  if (!TableIn(self).Put(handle, arguments[1])) return nullptr;
  Py_RETURN_NONE;
}

PyObject* Get(PyObject* self, PyObject* handle) {
  PyObject* const owner = TableIn(self).Find(HandleOf(handle));
  Py_XINCREF(owner);
  return OrNone(owner);
}

PyObject* Take(PyObject* self, PyObject* handle) {
  return OrNone(TableIn(self).Take(HandleOf(handle)));
}

PyObject* CaughtNew(PyTypeObject* type, PyObject* arguments, PyObject* named) {
  return Caught(New, type, arguments, named);
}

}  // namespace

bool InFlight::Put(int64_t handle, PyObject* owner) {
  const size_t place = PlaceOf(handle);
  if (place >= slots_.size()) {
    try {
      slots_.resize(place + 1);
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
      return false;
    }
  }
  Py_INCREF(owner);
  slots_[place] = {handle, owner};
  ++size_;
  return true;
}

PyObject* InFlight::Find(int64_t handle) const {
  const size_t place = PlaceOf(handle);
  const bool there = handle > 0 && place < slots_.size() && slots_[place].handle == handle;
  return there ? slots_[place].owner : nullptr;
}

PyObject* InFlight::Take(int64_t handle) {
  PyObject* const owner = Find(handle);
  if (owner == nullptr) return nullptr;
  slots_[PlaceOf(handle)] = {};
  --size_;
  return owner;
}

InFlight* InFlightOf(PyObject* object) {
  return Py_TYPE(object) == in_flight_type ? &TableIn(object) : nullptr;
}

int64_t HandleOf(PyObject* object) {
  PyObject* number = nullptr;
  if (!PyLong_Check(object)) {
    number = PyIndex_Check(object) ? PyNumber_Index(object) : nullptr;
    if (number == nullptr) PyErr_Clear();
    if (number == nullptr) return 0;
    object = number;
  }
  int overflow = 0;
  const long handle = PyLong_AsLongAndOverflow(object, &overflow);
  Py_XDECREF(number);
  return overflow == 0 ? handle : 0;
}

int AddInFlight(PyObject* module) {
  static PyMethodDef methods[] = {
      {"put", AsMethod(Put), METH_FASTCALL, "put(handle, owner)"},
      {"get", Get, METH_O, "get(handle)\n\nReturn the owner, or None."},
      {"take", Take, METH_O, "take(handle)\n\nReturn the owner, which is no longer here, or None."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, AsSlot(CaughtNew)},
      {Py_tp_dealloc, AsSlot(Delete)},
      {Py_tp_methods, methods},
      {Py_sq_length, AsSlot(Length)},
      {0, nullptr},
  };
  static PyType_Spec spec = {"hororing._tensors.InFlight", sizeof(Object), 0, Py_TPFLAGS_DEFAULT,
                             slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) return -1;
  Py_INCREF(type);  // one is the module's
  in_flight_type = reinterpret_cast<PyTypeObject*>(type);
  return PyModule_AddObject(module, "InFlight", type);
}

}  // namespace hororing
