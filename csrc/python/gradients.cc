#include <Python.h>
#include <pythread.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "capi/hororing.h"
#include "python/module.h"

namespace hororing {
namespace {

// The gradients of one optimizer that are computed and not sent. Its step derives from it.
struct Queue {
  PyObject_HEAD PyObject* queued;  // list of Gradient
  long long bytes_left;            // in the batch; at 0 it is sent
  unsigned long thread;            // the thread whose backward pass reports its end; 0: none
};

// The states of a gradient (hororing/_requests/persistent.py has them, too).
enum State : int {
  kAsk,     // not computed; the hook asks may_send()
  kReady,   // not computed; the hook sends it
  kQueued,  // computed, and in the queue
  kSent,    // in flight
};

// One parameter's gradient, and the persistent request that reduces it.
struct Gradient {
  PyObject_HEAD PyObject* step;  // Queue
  PyObject* param;               // from the hook until its gradient is sent; else None
  PyObject* keep;                // the tensor that the request reduces now; else None
  unsigned long long address;    // of the hr_request, which the owner keeps; 0: none
  long long handle;              // of the request in flight; 0: none
  long long latest;              // the handle of the latest request
  long long share;               // its share of Queue::bytes_left
  int state;
  char simple;  // the request takes the tensor unchanged if it is plain, in host memory
};

PyTypeObject *queue_type, *gradient_type;  // one per process, as the engine
PyObject *may_send_name, *send_queued_name, *share_name, *grad_name, *send_alone_name,
    *failure_name;

bool IsNone(PyObject* object) { return object == nullptr || object == Py_None; }

void Replace(PyObject** place, PyObject* object) {  // takes the reference
  PyObject* const old = *place;
  *place = object;
  Py_XDECREF(old);
}

// Notes an accumulated gradient. Rare cases are methods of the gradient.
PyObject* OnGradient(PyObject* object, PyObject* param) {
  auto* const self = reinterpret_cast<Gradient*>(object);
  if (self->step == nullptr || PyObject_TypeCheck(self->step, queue_type) == 0) {
    PyErr_SetString(PyExc_TypeError, "a gradient needs a step");
    return nullptr;
  }
  auto* const queue = reinterpret_cast<Queue*>(self->step);
  if (self->state != kReady || queue->thread != PyThread_get_thread_ident()) {
    const Reference goes = Owned(PyObject_CallMethodObjArgs(object, may_send_name, nullptr));
    const int goes_now = goes.get() == nullptr ? -1 : PyObject_IsTrue(goes.get());
    if (goes_now < 0) return nullptr;
    if (goes_now == 0) Py_RETURN_NONE;
  }
  self->state = kQueued;
  Py_INCREF(param);
  Replace(&self->param, param);
  long long share = self->share;
  if (self->simple == 0) {
    const Reference found = Owned(PyObject_CallMethodObjArgs(object, share_name, param, nullptr));
    if (found.get() == nullptr) return nullptr;
    share = PyLong_AsLongLong(found.get());
    if (share == -1 && PyErr_Occurred() != nullptr) return nullptr;
  }
  queue->bytes_left -= share;
  if (PyList_Append(queue->queued, object) != 0) return nullptr;
  if (queue->bytes_left > 0) Py_RETURN_NONE;
  return PyObject_CallMethodObjArgs(self->step, send_queued_name, nullptr);
}

// Gradients that are being submitted, each with its tensor.
struct Batch {
  std::vector<Reference> gradients, tensors;
  std::vector<hr_request*> requests;
  std::vector<uintptr_t> addresses;
};

// Adds a queued gradient to the batch, or calls the method that sends it alone. 0, or -1.
int Take(const Plain& plain, PyObject* object, PyObject* failures, Batch* batch) {
  auto* const gradient = reinterpret_cast<Gradient*>(object);
  if (IsNone(gradient->param)) {
    PyErr_SetString(PyExc_AssertionError, "this gradient is not queued");
    return -1;
  }
  const Reference held = Owned(PyObject_GetAttr(gradient->param, grad_name));
  PyObject* const grad = held.get();
  Replace(&gradient->param, nullptr);
  if (grad == nullptr) return -1;
  if (gradient->simple != 0 && gradient->address != 0) {
    auto* const request = reinterpret_cast<hr_request*>(gradient->address);
    hr_tensor seen;
    Plain::Shapes shapes;
    const int is_plain = plain.Describe(grad, &seen, &shapes);
    if (is_plain < 0) return -1;
    const hr_tensor& prepared = request->tensors[0];
    if (is_plain == 1 && seen.dtype == prepared.dtype &&
        std::equal(seen.shape, seen.shape + seen.ndim, prepared.shape,
                   prepared.shape + prepared.ndim)) {
      batch->gradients.emplace_back(object);
      batch->tensors.emplace_back(grad);
      batch->requests.push_back(request);
      batch->addresses.push_back(seen.input);
      return 0;
    }
  }
  const Reference sent =
      Owned(PyObject_CallMethodObjArgs(object, send_alone_name, grad, failures, nullptr));
  return sent.get() == nullptr ? -1 : 0;
}

// Notes which gradients the core has accepted.
int Started(const Batch& batch, size_t begin, const std::vector<int64_t>& handles, size_t count,
            PyObject* in_flight) {
  for (size_t i = begin; i < begin + count; ++i) {
    auto* const gradient = reinterpret_cast<Gradient*>(batch.gradients[i].get());
    Py_INCREF(batch.tensors[i].get());
    Replace(&gradient->keep, batch.tensors[i].get());
    gradient->handle = gradient->latest = handles[i - begin];
    gradient->state = kSent;
  }
  for (size_t i = 0; i < count; ++i) {
    const Reference handle = Owned(PyLong_FromLongLong(handles[i]));
    if (handle.get() == nullptr || PyList_Append(in_flight, handle.get()) != 0) return -1;
  }
  return 0;
}

}  // namespace

const char* const kSendGradientsText =
    "send_gradients(gradients, in_flight, failures)\n\n"
    "Submit queued `gradients`, in one call where they are plain; handles go to `in_flight`.";

PyObject* SendGradients(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyList_Check(arguments[0]) || !PyList_Check(arguments[1]) ||
      !PyList_Check(arguments[2])) {
    PyErr_SetString(PyExc_TypeError, "send_gradients takes three lists");
    return nullptr;
  }
  const Plain& plain = *reinterpret_cast<PlainTensors*>(self)->plain;
  PyObject *const gradients = arguments[0], *const in_flight = arguments[1],
                  *const failures = arguments[2];
  Batch batch;
  for (Py_ssize_t i = 0; i < PyList_Size(gradients); ++i) {
    const Reference gradient(PyList_GetItem(gradients, i));
    if (PyObject_TypeCheck(gradient.get(), gradient_type) == 0) {
      PyErr_SetString(PyExc_TypeError, "gradients are Gradients");
      return nullptr;
    }
    if (Take(plain, gradient.get(), failures, &batch) != 0) return nullptr;
  }
  size_t begin = 0;
  while (begin < batch.gradients.size()) {
    const size_t wanted = batch.gradients.size() - begin;
    std::vector<int64_t> handles(wanted);
    const int32_t started = hr_start(batch.requests.data() + begin, batch.addresses.data() + begin,
                                     static_cast<int32_t>(wanted), handles.data());
    const size_t number = static_cast<size_t>(started);
    if (Started(batch, begin, handles, number, in_flight) != 0) return nullptr;
    begin += number;
    if (number == wanted) break;
    const Reference code = Owned(PyLong_FromLongLong(handles[number]));
    if (code.get() == nullptr) return nullptr;
    PyObject* const failed = batch.gradients[begin++].get();
    const Reference failure =
        Owned(PyObject_CallMethodObjArgs(failed, failure_name, code.get(), nullptr));
    if (failure.get() == nullptr || PyList_Append(failures, failure.get()) != 0) return nullptr;
  }
  Py_RETURN_NONE;
}

namespace {

// Whether the reduced tensor is the gradient: the next step may begin. -1: an exception.
int Finish(PyObject* param, Gradient* gradient, State next) {
  if (gradient->handle == 0 || IsNone(gradient->keep)) return 0;
  const Reference grad = Owned(PyObject_GetAttr(param, grad_name));
  if (grad.get() == nullptr) return -1;
  if (grad.get() != gradient->keep) return 0;
  gradient->handle = 0;
  Replace(&gradient->keep, nullptr);
  gradient->state = next;
  return 1;
}

const char* const kFinishText =
    "finish_gradients(entries, state)\n\n"
    "Set `state` on the entries (param, gradient) that are reduced. Return the others.";

PyObject* FinishGradients(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "finish_gradients takes a list and a number");
    return nullptr;
  }
  const long next = PyLong_AsLong(arguments[1]);
  if (next == -1 && PyErr_Occurred() != nullptr) return nullptr;
  PyObject* const others = PyList_New(0);
  for (Py_ssize_t i = 0; others != nullptr && i < PyList_Size(arguments[0]); ++i) {
    const Reference entry(PyList_GetItem(arguments[0], i));
    PyObject* const param = PyTuple_GetItem(entry.get(), 0);
    PyObject* const gradient = param != nullptr ? PyTuple_GetItem(entry.get(), 1) : nullptr;
    int finished = -1;
    if (gradient != nullptr && PyObject_TypeCheck(gradient, gradient_type) != 0) {
      finished = Finish(param, reinterpret_cast<Gradient*>(gradient), static_cast<State>(next));
    } else if (gradient != nullptr) {
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

// Garbage collection: the references of such an object, which may form cycles.

auto Parts(Queue* self) { return std::array{&self->queued}; }
auto Parts(Gradient* self) { return std::array{&self->step, &self->param, &self->keep}; }

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
  static PyMemberDef queue[] = {
      {"queued", T_OBJECT, offsetof(Queue, queued), 0, nullptr},
      {"bytes_left", T_LONGLONG, offsetof(Queue, bytes_left), 0, nullptr},
      {"thread", T_ULONG, offsetof(Queue, thread), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyMemberDef gradient[] = {
      {"step", T_OBJECT, offsetof(Gradient, step), 0, nullptr},
      {"param", T_OBJECT, offsetof(Gradient, param), 0, nullptr},
      {"keep", T_OBJECT, offsetof(Gradient, keep), 0, nullptr},
      {"address", T_ULONGLONG, offsetof(Gradient, address), 0, nullptr},
      {"handle", T_LONGLONG, offsetof(Gradient, handle), 0, nullptr},
      {"latest", T_LONGLONG, offsetof(Gradient, latest), 0, nullptr},
      {"share", T_LONGLONG, offsetof(Gradient, share), 0, nullptr},
      {"state", T_INT, offsetof(Gradient, state), 0, nullptr},
      {"simple", T_BOOL, offsetof(Gradient, simple), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyMethodDef none[] = {{nullptr, nullptr, 0, nullptr}};
  static PyMethodDef hook[] = {
      {"on_gradient", OnGradient, METH_O, "on_gradient(param)\n\nThe hook."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyMethodDef functions[] = {
      {"finish_gradients", AsMethod(FinishGradients), METH_FASTCALL, kFinishText},
      {nullptr, nullptr, 0, nullptr},
  };
  queue_type = MakeType<Queue>(module, "hororing._tensors.Queue", queue, none);
  gradient_type = MakeType<Gradient>(module, "hororing._tensors.Gradient", gradient, hook);
  if (queue_type == nullptr || gradient_type == nullptr) return -1;
  const std::pair<PyObject**, const char*> names[] = {
      {&may_send_name, "may_send"}, {&send_queued_name, "send_queued"}, {&share_name, "share_of"},
      {&grad_name, "grad"},         {&send_alone_name, "send_alone"},   {&failure_name, "failure"},
  };
  for (const auto& [place, text] : names) {
    *place = PyUnicode_InternFromString(text);
    if (*place == nullptr) return -1;
  }
  return PyModule_AddFunctions(module, functions);
}

}  // namespace hororing
