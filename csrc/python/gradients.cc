#include "python/gradients.h"

#include <pythread.h>
#include <structmember.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "capi/hororing.h"
#include "python/module.h"
#include "python/plain.h"

namespace hororing {
namespace {

// What the gradients of an optimizer have in common (Shared).
struct Arrivals {
  PyObject_HEAD PyObject* arrived;  // list of Gradient
  long long room;                   // for more, in bytes, until they are sent
  unsigned long thread;             // whose backward pass will tell when it ends; 0: none
};

// A request that is made again and again (PreparedAllreduce).
struct Prepared {
  PyObject_HEAD PyObject* keep;  // the tensor in flight
  unsigned long long address;    // of the hr_request, which the owner keeps
  long long handle;              // 0: not in flight
};

// One parameter's gradient (Slot).
struct Gradient {
  PyObject_HEAD PyObject* shared;  // Arrivals
  PyObject* prepared;              // Prepared, or None
  PyObject* param;                 // while its gradient has arrived and is not sent; else None
  long long weight;                // of room
  int left;                        // 1: goes when it comes; 0: has come; else ask the owner
  char sent;
  char simple;  // goes as it is, if it is plain: in host memory, and by itself
};

PyTypeObject *arrivals_type, *prepared_type, *gradient_type;  // of the process, as its engine is
PyObject *count_name, *send_arrived_name, *weight_name, *grad_name, *send_alone_name, *failure_name;

bool IsNone(PyObject* object) { return object == nullptr || object == Py_None; }

void Replace(PyObject** place, PyObject* object) {  // takes the reference
  PyObject* const old = *place;
  *place = object;
  Py_XDECREF(old);
}

// Takes note of an accumulated gradient. What happens rarely is a method of the owner's.
PyObject* OnGradient(PyObject* object, PyObject* param) {
  auto* const self = reinterpret_cast<Gradient*>(object);
  if (self->shared == nullptr || PyObject_TypeCheck(self->shared, arrivals_type) == 0) {
    PyErr_SetString(PyExc_TypeError, "a gradient needs what it shares");
    return nullptr;
  }
  auto* const shared = reinterpret_cast<Arrivals*>(self->shared);
  if (self->left != 1 || shared->thread != PyThread_get_thread_ident()) {
    PyObject* const goes = PyObject_CallMethodObjArgs(object, count_name, nullptr);
    if (goes == nullptr) return nullptr;
    const int goes_now = PyObject_IsTrue(goes);
    Py_DECREF(goes);
    if (goes_now < 0) return nullptr;
    if (goes_now == 0) Py_RETURN_NONE;
  }
  self->left = 0;
  Py_INCREF(param);
  Replace(&self->param, param);
  long long weight = self->weight;
  if (self->simple == 0) {
    PyObject* const found = PyObject_CallMethodObjArgs(object, weight_name, param, nullptr);
    if (found == nullptr) return nullptr;
    weight = PyLong_AsLongLong(found);
    Py_DECREF(found);
    if (weight == -1 && PyErr_Occurred() != nullptr) return nullptr;
  }
  shared->room -= weight;
  if (PyList_Append(shared->arrived, object) != 0) return nullptr;
  if (shared->room > 0) Py_RETURN_NONE;
  return PyObject_CallMethodObjArgs(self->shared, send_arrived_name, nullptr);
}

// Gradients on their way into the core, each with its slot.
struct Batch {
  std::vector<Reference> slots, grads;
  std::vector<hr_request*> requests;
  std::vector<uintptr_t> addresses;
};

// Whether it is what was prepared, and lies where the core can take it.
bool IsAsPrepared(const hr_tensor& prepared, const hr_tensor& grad) {
  if (prepared.dtype != grad.dtype || prepared.ndim != grad.ndim) return false;
  for (int32_t i = 0; i < grad.ndim; ++i) {
    if (prepared.shape[i] != grad.shape[i]) return false;
  }
  return true;
}

// Puts the gradient that has arrived into the batch, or has its owner send it. 0, or -1.
int Take(const Plain& plain, PyObject* slot, PyObject* failures, Batch* batch) {
  auto* const gradient = reinterpret_cast<Gradient*>(slot);
  if (IsNone(gradient->param)) {
    PyErr_SetString(PyExc_AssertionError, "no gradient has arrived there");
    return -1;
  }
  PyObject* const grad = PyObject_GetAttr(gradient->param, grad_name);
  Replace(&gradient->param, nullptr);
  if (grad == nullptr) return -1;
  const Reference held(grad);
  Py_DECREF(grad);
  if (gradient->simple != 0 && !IsNone(gradient->prepared) &&
      PyObject_TypeCheck(gradient->prepared, prepared_type) != 0) {
    auto* const request =
        reinterpret_cast<hr_request*>(reinterpret_cast<Prepared*>(gradient->prepared)->address);
    hr_tensor seen;
    Plain::Shapes shapes;
    const int is_plain = plain.Describe(grad, &seen, &shapes);
    if (is_plain < 0) return -1;
    if (is_plain == 1 && IsAsPrepared(request->tensors[0], seen)) {
      batch->slots.emplace_back(slot);
      batch->grads.emplace_back(grad);
      batch->requests.push_back(request);
      batch->addresses.push_back(seen.input);
      return 0;
    }
  }
  PyObject* const sent = PyObject_CallMethodObjArgs(slot, send_alone_name, grad, failures, nullptr);
  Py_XDECREF(sent);
  return sent == nullptr ? -1 : 0;
}

// Notes what the core has taken.
int Started(const Batch& batch, size_t begin, const std::vector<int64_t>& handles, size_t count,
            PyObject* flying) {
  for (size_t i = begin; i < begin + count; ++i) {
    auto* const slot = reinterpret_cast<Gradient*>(batch.slots[i].get());
    auto* const prepared = reinterpret_cast<Prepared*>(slot->prepared);
    Py_INCREF(batch.grads[i].get());
    Replace(&prepared->keep, batch.grads[i].get());
    prepared->handle = handles[i - begin];
    slot->sent = 1;
  }
  for (size_t i = 0; i < count; ++i) {
    PyObject* const handle = PyLong_FromLongLong(handles[i]);
    const bool added = handle != nullptr && PyList_Append(flying, handle) == 0;
    Py_XDECREF(handle);
    if (!added) return -1;
  }
  return 0;
}

const char* const kSendText =
    "send_gradients(plain, slots, flying, failures)\n\n"
    "Submit what has arrived at `slots`, in one call where it is plain; handles go to `flying`.";

PyObject* SendGradients(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  const Plain* const plain = count == 4 ? PlainOf(arguments[0]) : nullptr;
  if (plain == nullptr || !PyList_Check(arguments[1]) || !PyList_Check(arguments[2]) ||
      !PyList_Check(arguments[3])) {
    PyErr_SetString(PyExc_TypeError, "send_gradients takes PlainTensors and three lists");
    return nullptr;
  }
  PyObject *const slots = arguments[1], *const flying = arguments[2],
                  *const failures = arguments[3];
  Batch batch;
  for (Py_ssize_t i = 0; i < PyList_Size(slots); ++i) {
    const Reference slot(PyList_GetItem(slots, i));
    if (PyObject_TypeCheck(slot.get(), gradient_type) == 0) {
      PyErr_SetString(PyExc_TypeError, "slots are Gradients");
      return nullptr;
    }
    if (Take(*plain, slot.get(), failures, &batch) != 0) return nullptr;
  }
  size_t begin = 0;
  while (begin < batch.slots.size()) {
    const size_t wanted = batch.slots.size() - begin;
    std::vector<int64_t> handles(wanted);
    const int32_t started = hr_start(batch.requests.data() + begin, batch.addresses.data() + begin,
                                     static_cast<int32_t>(wanted), handles.data());
    const size_t number = static_cast<size_t>(started);
    if (Started(batch, begin, handles, number, flying) != 0) return nullptr;
    begin += number;
    if (number == wanted) break;
    PyObject* const code = PyLong_FromLongLong(handles[number]);
    if (code == nullptr) return nullptr;
    PyObject* const failure =
        PyObject_CallMethodObjArgs(batch.slots[begin].get(), failure_name, code, nullptr);
    Py_DECREF(code);
    const bool noted = failure != nullptr && PyList_Append(failures, failure) == 0;
    Py_XDECREF(failure);
    if (!noted) return nullptr;
    ++begin;
  }
  Py_RETURN_NONE;
}

// Whether the reduced gradient is where it belongs; if so, its slot is ready for the next step. -1:
// an exception is set.
int Finish(PyObject* param, Gradient* slot, int passes) {
  if (IsNone(slot->prepared) || PyObject_TypeCheck(slot->prepared, prepared_type) == 0) return 0;
  auto* const prepared = reinterpret_cast<Prepared*>(slot->prepared);
  if (prepared->handle == 0 || IsNone(prepared->keep)) return 0;
  PyObject* const grad = PyObject_GetAttr(param, grad_name);
  if (grad == nullptr) return -1;
  const bool in_place = grad == prepared->keep;
  Py_DECREF(grad);
  if (!in_place) return 0;
  prepared->handle = 0;
  Replace(&prepared->keep, nullptr);
  slot->sent = 0;
  slot->left = passes;
  return 1;
}

const char* const kFinishText =
    "finish_gradients(entries, passes)\n\n"
    "Forget what was in flight at entries (param, slot) and has succeeded. Return the other ones.";

PyObject* FinishGradients(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "finish_gradients takes a list and a number");
    return nullptr;
  }
  const long passes = PyLong_AsLong(arguments[1]);
  if (passes == -1 && PyErr_Occurred() != nullptr) return nullptr;
  PyObject* const others = PyList_New(0);
  for (Py_ssize_t i = 0; others != nullptr && i < PyList_Size(arguments[0]); ++i) {
    const Reference entry(PyList_GetItem(arguments[0], i));
    PyObject* const param = PyTuple_GetItem(entry.get(), 0);
    PyObject* const slot = param != nullptr ? PyTuple_GetItem(entry.get(), 1) : nullptr;
    int finished = -1;
    if (slot != nullptr && PyObject_TypeCheck(slot, gradient_type) != 0) {
      finished = Finish(param, reinterpret_cast<Gradient*>(slot), static_cast<int>(passes));
    } else if (slot != nullptr) {
      PyErr_SetString(PyExc_TypeError, "entries are of a parameter and its Gradient");
    }
    if (finished == 0 && PyList_Append(others, entry.get()) != 0) finished = -1;
    if (finished < 0) {
      Py_DECREF(others);
      return nullptr;
    }
  }
  return others;
}

// Memory: what such an object refers to, and that it is a part of cycles.

auto Parts(Arrivals* self) { return std::array{&self->arrived}; }
auto Parts(Prepared* self) { return std::array{&self->keep}; }
auto Parts(Gradient* self) { return std::array{&self->shared, &self->prepared, &self->param}; }

template <typename Object>
int Traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (PyObject** part : Parts(reinterpret_cast<Object*>(self))) Py_VISIT(*part);
  return 0;
}

template <typename Object>
int Clear(PyObject* self) {
  for (PyObject** part : Parts(reinterpret_cast<Object*>(self))) Replace(part, nullptr);
  return 0;
}

template <typename Object>
void Delete(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Clear<Object>(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

template <typename Object>
PyTypeObject* MakeType(PyObject* module, const char* name, PyMemberDef* members,
                       PyMethodDef* methods) {
  std::vector<PyType_Slot> slots = {
      {Py_tp_dealloc, reinterpret_cast<void*>(Delete<Object>)},
      {Py_tp_traverse, reinterpret_cast<void*>(Traverse<Object>)},
      {Py_tp_clear, reinterpret_cast<void*>(Clear<Object>)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  PyType_Spec spec = {name, sizeof(Object), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots.data()};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) return nullptr;
  Py_INCREF(type);  // one is the module's
  if (PyModule_AddObject(module, std::strrchr(name, '.') + 1, type) != 0) return nullptr;
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

int AddGradients(PyObject* module) {
  static PyMemberDef arrivals[] = {
      {"arrived", T_OBJECT, offsetof(Arrivals, arrived), 0, nullptr},
      {"room", T_LONGLONG, offsetof(Arrivals, room), 0, nullptr},
      {"thread", T_ULONG, offsetof(Arrivals, thread), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyMemberDef prepared[] = {
      {"keep", T_OBJECT, offsetof(Prepared, keep), 0, nullptr},
      {"address", T_ULONGLONG, offsetof(Prepared, address), 0, nullptr},
      {"handle", T_LONGLONG, offsetof(Prepared, handle), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyMemberDef gradient[] = {
      {"shared", T_OBJECT, offsetof(Gradient, shared), 0, nullptr},
      {"prepared", T_OBJECT, offsetof(Gradient, prepared), 0, nullptr},
      {"param", T_OBJECT, offsetof(Gradient, param), 0, nullptr},
      {"weight", T_LONGLONG, offsetof(Gradient, weight), 0, nullptr},
      {"left", T_INT, offsetof(Gradient, left), 0, nullptr},
      {"sent", T_BOOL, offsetof(Gradient, sent), 0, nullptr},
      {"simple", T_BOOL, offsetof(Gradient, simple), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyMethodDef none[] = {{nullptr, nullptr, 0, nullptr}};
  static PyMethodDef hook[] = {
      {"on_gradient", OnGradient, METH_O, "on_gradient(param)\n\nThe hook."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyMethodDef functions[] = {
      {"send_gradients", AsMethod(Catching<SendGradients>::Call), METH_FASTCALL, kSendText},
      {"finish_gradients", AsMethod(FinishGradients), METH_FASTCALL, kFinishText},
      {nullptr, nullptr, 0, nullptr},
  };
  arrivals_type = MakeType<Arrivals>(module, "hororing._tensors.Arrivals", arrivals, none);
  prepared_type = MakeType<Prepared>(module, "hororing._tensors.Prepared", prepared, none);
  gradient_type = MakeType<Gradient>(module, "hororing._tensors.Gradient", gradient, hook);
  if (arrivals_type == nullptr || prepared_type == nullptr || gradient_type == nullptr) return -1;
  const std::pair<PyObject**, const char*> names[] = {
      {&count_name, "count"}, {&send_arrived_name, "send_arrived"}, {&weight_name, "weight_of"},
      {&grad_name, "grad"},   {&send_alone_name, "send_alone"},     {&failure_name, "failure"},
  };
  for (const auto& [place, text] : names) {
    *place = PyUnicode_InternFromString(text);
    if (*place == nullptr) return -1;
  }
  return PyModule_AddFunctions(module, functions);
}

}  // namespace hororing
