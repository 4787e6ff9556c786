// hororing._tensors: the work for every tensor of every call: inspecting it, submitting it, waiting
// for it. The C interface does the rest; hororing/verbs and collectives.py the unusual cases.
//
// Uses CPython's limited API, so that one binary serves all versions, and no header of a framework.
// Everything runs under the GIL, except for waits.
#include <Python.h>

#include "capi/hororing.h"
#include "python/module.h"

namespace hororing {
namespace {

int Arguments(Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return 0;
  PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, given);
  return -1;
}

PyObject* New(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *types, *exchange, *refusals, *describe, *pending, *general, *abandoned, *sweep;
  if (PyArg_ParseTuple(arguments, "OOOOO!OO!O", &types, &exchange, &refusals, &describe,
                       &PyDict_Type, &pending, &general, &PyDict_Type, &abandoned, &sweep) == 0) {
    return nullptr;
  }
  PyObject* const self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (self == nullptr) return nullptr;
  auto* const tensors = reinterpret_cast<PlainTensors*>(self);
  tensors->table =
      new Table{Reference(pending), Reference(general), Reference(abandoned), Reference(sweep)};
  tensors->plain = new Plain;
  if (tensors->plain->Init(types, exchange, refusals, describe)) return self;
  Py_DECREF(self);
  return nullptr;
}

void Delete(PyObject* self) {
  auto* const tensors = reinterpret_cast<PlainTensors*>(self);
  delete tensors->plain;
  delete tensors->table;
  PyTypeObject* const type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// 1: `request` has the arguments; 0: Python must check them; -1: an exception is set.
int Parse(PyObject* const* arguments, hr_request* request) {
  *request = {};
  request->collective = HR_ALLREDUCE;
  if (ParseName(arguments[0], request) == 0 ||
      ParseReduction(arguments[2], arguments[3], arguments[4], request) == 0) {
    return 0;
  }
  request->process_set = static_cast<int32_t>(PyLong_AsLong(arguments[1]));
  request->blocking = PyObject_IsTrue(arguments[5]);
  return PyErr_Occurred() == nullptr ? 1 : -1;
}

PyObject* Answer(int plain) {
  if (plain < 0) return nullptr;
  Py_RETURN_NONE;
}

const char* const kAllreduceText =
    "allreduce(tensor, output, keep, name, process_set, op, prescale, postscale, blocking)\n\n"
    "Submit an allreduce. Return its handle, the core's code negated, or None if Python must do it. "
    "A blocking one may be complete: then return `keep`, as finish(handle) does.";

PyObject* Allreduce(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (Arguments(count, 9) != 0) return nullptr;
  const auto* const tensors = reinterpret_cast<PlainTensors*>(self);
  hr_request request;
  hr_tensor tensor, output;
  Plain::Shapes shapes;
  int plain = Parse(arguments + 3, &request);
  if (plain == 1) plain = tensors->plain->Describe(arguments[0], &tensor, &shapes);
  if (plain == 1 && arguments[1] != arguments[0]) {
    plain = tensors->plain->Describe(arguments[1], &output, &shapes);
    tensor.output = output.output;
  }
  if (plain != 1) return Answer(plain);
  request.tensors = &tensor;
  request.tensors_count = 1;
  return Submit(*tensors->table, request, arguments[2]);
}

const char* const kGroupedText =
    "grouped_allreduce(tensors, name, process_set, op, prescale, postscale, blocking)\n\n"
    "The same as allreduce, in place, for a tuple of tensors, which is also the result.";

PyObject* GroupedAllreduce(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (Arguments(count, 7) != 0) return nullptr;
  const auto* const tensors = reinterpret_cast<PlainTensors*>(self);
  hr_request request;
  int plain = PyTuple_CheckExact(arguments[0]) ? Parse(arguments + 1, &request) : 0;
  const Py_ssize_t size = plain == 1 ? PyTuple_Size(arguments[0]) : 0;
  if (size == 0 || size > INT32_MAX) return Answer(plain == 1 ? 0 : plain);
  std::vector<hr_tensor> views;
  Plain::Shapes shapes;
  plain = tensors->plain->DescribeAll(arguments[0], &views, &shapes);
  if (plain != 1) return Answer(plain);
  request.tensors = views.data();
  request.tensors_count = static_cast<int32_t>(size);
  return Submit(*tensors->table, request, arguments[0]);
}

const char* const kFinishText =
    "finish(handle)\n\n"
    "Wait for a handle, forget it, and return the object kept for it. Return None, and do not "
    "forget it, if it is unknown, has failed, or must be finished in another way.";

PyObject* FinishHandle(PyObject* self, PyObject* handle) {
  return Finish(*reinterpret_cast<PlainTensors*>(self)->table, handle);
}

int Execute(PyObject* module) {
  static PyMethodDef methods[] = {
      {"allreduce", AsMethod(Catching<Allreduce>::Call), METH_FASTCALL, kAllreduceText},
      {"grouped_allreduce", AsMethod(Catching<GroupedAllreduce>::Call), METH_FASTCALL,
       kGroupedText},
      {"finish", FinishHandle, METH_O, kFinishText},
      {"send_gradients", AsMethod(Catching<SendGradients>::Call), METH_FASTCALL,
       kSendGradientsText},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, AsSlot(Catching<New>::Call)},
      {Py_tp_dealloc, AsSlot(Delete)},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  static PyType_Spec spec = {"hororing._tensors.PlainTensors", sizeof(PlainTensors), 0,
                             Py_TPFLAGS_DEFAULT, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) return -1;
  if (PyModule_AddObject(module, "PlainTensors", type) != 0) return -1;
  return AddGradients(module);
}

}  // namespace

}  // namespace hororing

PyMODINIT_FUNC PyInit__tensors(void);
PyMODINIT_FUNC PyInit__tensors(void) {
  static PyModuleDef_Slot slots[] = {
      {Py_mod_exec, hororing::AsSlot(hororing::Execute)},
      {0, nullptr},
  };
  static PyModuleDef module;
  module.m_base = PyModuleDef_HEAD_INIT;
  module.m_name = "hororing._tensors";
  module.m_slots = slots;
  return PyModuleDef_Init(&module);
}
