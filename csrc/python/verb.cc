#include "python/verb.h"

#include <structmember.h>

#include <array>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "python/module.h"
#include "python/plain.h"
#include "python/usual_calls.h"

namespace hororing {
namespace {

// The protocol of vector calls (PEP 590), which is in the limited API since 3.12, and has been as
// it is there since 3.9.
using VectorCall = PyObject* (*)(PyObject*, PyObject* const*, size_t, PyObject*);
constexpr unsigned long kHasVectorCall = 1UL << 11;
constexpr size_t kCountMask = ~(size_t{1} << (8 * sizeof(size_t) - 1));

constexpr size_t kMostParameters = 12;

// A parameter in its place.
struct Known {
  Reference name, usual;  // `usual`: the only object that it may be; null: it is the Parameter
  Parameter parameter = kParameters;
};

// Names of arguments as a call has them, and the place of each among the parameters.
struct Names {
  Reference tuple;
  size_t count = 0;
  std::array<size_t, kMostParameters> places{};
};

struct Details {
  UsualCall call = nullptr;
  std::vector<Known> parameters;
  Names names;         // of the last call with any: a constant of the caller's, which calls again
  Reference function;  // does what is unusual
  Working working;
};

struct Verb {
  PyObject_HEAD VectorCall vector_call;
  Details* details;
  PyObject* dictionary;
  PyObject* weak_references;
};

PyObject *method_type, *qualified_name;  // of the process, as its engine is

// ---------------------------------------------------------------------------------------------
// Calls

// The parameter of that name; beyond all: there is none.
size_t PlaceOf(const std::vector<Known>& parameters, PyObject* name) {
  size_t place = 0;
  while (place < parameters.size() && parameters[place].name.get() != name) ++place;
  if (place < parameters.size()) return place;
  place = 0;  // not the same object; perhaps equal nevertheless
  while (place < parameters.size() && PyUnicode_Compare(parameters[place].name.get(), name) != 0)
    ++place;
  return place;
}

// The same where it is known from the call before. Null: some are no parameters.
const Names* PlacesOf(Details* verb, PyObject* tuple) {
  if (tuple == verb->names.tuple.get()) return &verb->names;
  Names names;
  names.count = static_cast<size_t>(PyTuple_Size(tuple));
  if (names.count > kMostParameters) return nullptr;
  for (size_t i = 0; i < names.count; ++i) {
    PyObject* const name = PyTuple_GetItem(tuple, static_cast<Py_ssize_t>(i));
    if (!PyUnicode_CheckExact(name)) return nullptr;  // its end may run anything
    names.places[i] = PlaceOf(verb->parameters, name);
    if (names.places[i] == verb->parameters.size()) return nullptr;
  }
  names.tuple = Reference(tuple);
  std::swap(verb->names, names);
  return &verb->names;
}

// Whether these arguments are some of a usual call.
bool IsUsual(Details* verb, PyObject* const* arguments, size_t count, PyObject* tuple,
             Given* given) {
  if (count > verb->parameters.size()) return false;
  std::array<bool, kMostParameters> seen{};
  const auto take = [&](size_t place, PyObject* argument) {
    const Known& known = verb->parameters[place];
    if (seen[place]) return false;
    seen[place] = true;
    if (known.usual.get() != nullptr) return argument == known.usual.get();
    (*given)[known.parameter] = argument;
    return true;
  };
  for (size_t place = 0; place < count; ++place) {
    if (!take(place, arguments[place])) return false;
  }
  if (tuple == nullptr) return true;
  const Names* const names = PlacesOf(verb, tuple);
  if (names == nullptr) return false;
  for (size_t i = 0; i < names->count; ++i) {
    if (!take(names->places[i], arguments[count + i])) return false;
  }
  return true;
}

PyObject* CallFunction(const Details& verb, PyObject* const* arguments, size_t count,
                       PyObject* names) {
  const Reference positional = Owned(PyTuple_New(static_cast<Py_ssize_t>(count)));
  if (positional.get() == nullptr) return nullptr;
  for (size_t i = 0; i < count; ++i) {
    Py_INCREF(arguments[i]);
    PyTuple_SetItem(positional.get(), static_cast<Py_ssize_t>(i), arguments[i]);
  }
  const Py_ssize_t named = names != nullptr ? PyTuple_Size(names) : 0;
  const Reference keywords = Owned(named > 0 ? PyDict_New() : nullptr);
  if (named > 0 && keywords.get() == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const argument = arguments[count + static_cast<size_t>(i)];
    if (PyDict_SetItem(keywords.get(), PyTuple_GetItem(names, i), argument) != 0) return nullptr;
  }
  return PyObject_Call(verb.function.get(), positional.get(), keywords.get());
}

PyObject* VectorCalled(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  Details& verb = *reinterpret_cast<Verb*>(self)->details;
  const size_t count = flags & kCountMask;
  Given given{};
  if (IsUsual(&verb, arguments, count, names, &given)) {
    PyObject* const result = Caught(verb.call, verb.working, given);
    if (result != nullptr || PyErr_Occurred() != nullptr) return result;
  }
  return CallFunction(verb, arguments, count, names);
}

// ---------------------------------------------------------------------------------------------
// What an object is beside its calls: as like a function as can be

PyObject* Called(PyObject* self, PyObject* arguments, PyObject* named) {  // rare: f.__call__(...)
  return PyObject_Call(reinterpret_cast<Verb*>(self)->details->function.get(), arguments, named);
}

PyObject* Bound(PyObject* self, PyObject* object, PyObject*) {
  if (object != nullptr && object != Py_None) {
    return PyObject_CallFunctionObjArgs(method_type, self, object, nullptr);
  }
  Py_INCREF(self);
  return self;
}

PyObject* Reduced(PyObject* self, PyObject*) {  // pickled as the global that it is
  return PyObject_GetAttr(self, qualified_name);
}

PyObject* Represented(PyObject* self) {
  const Reference name = Owned(PyObject_GetAttr(self, qualified_name));
  if (name.get() == nullptr) return nullptr;
  return PyUnicode_FromFormat("<function %U at %p>", name.get(), static_cast<void*>(self));
}

bool AddParameters(PyObject* given, Details* details) {
  static constexpr std::pair<const char*, Parameter> kKnown[] = {
      {"name", kName},
      {"op", kOp},
      {"prescale_factor", kPrescale},
      {"postscale_factor", kPostscale},
      {"root_rank", kRoot},
  };
  const Py_ssize_t size = PyTuple_Size(given);
  if (size < 1 || size > static_cast<Py_ssize_t>(kMostParameters)) {
    PyErr_SetString(PyExc_ValueError, "a verb has 1 to 12 parameters");
    return false;
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject *name, *usual;
    if (PyArg_ParseTuple(PyTuple_GetItem(given, i), "UO", &name, &usual) == 0) return false;
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    Known known;
    known.name = Owned(name);
    if (i == 0) known.parameter = kSubject;
    for (const auto& [text, parameter] : kKnown) {
      if (PyUnicode_CompareWithASCIIString(name, text) == 0) known.parameter = parameter;
    }
    if (known.parameter == kParameters) known.usual = Reference(usual);
    details->parameters.push_back(std::move(known));
  }
  return true;
}

const char* const kVerbText =
    "Verb(kind, function, parameters, tensors, wait, counters, counter)\n\n"
    "A verb whose usual calls need no frame of Python; `function` does all others. `parameters`: "
    "pairs of a name and a default.";

PyObject* New(PyTypeObject* type, PyObject* arguments, PyObject*) {
  const char* kind = nullptr;
  PyObject *function, *parameters, *tensors, *wait, *counters, *counter;
  if (PyArg_ParseTuple(arguments, "sOO!OOO!O", &kind, &function, &PyTuple_Type, &parameters,
                       &tensors, &wait, &PyDict_Type, &counters, &counter) == 0) {
    return nullptr;
  }
  auto details = std::make_unique<Details>();
  details->call = FindUsualCall(kind);
  if (details->call == nullptr || PlainOf(tensors) == nullptr) {
    return PyErr_Format(PyExc_ValueError, "there is no verb %s of such tensors", kind);
  }
  if (!AddParameters(parameters, details.get())) return nullptr;
  details->function = Reference(function);
  Working& working = details->working;
  working.tensors = Reference(tensors);
  working.wait = Reference(wait);
  working.counters = Reference(counters);
  working.counter = Reference(counter);
  if (PyTuple_Check(counter) && PyTuple_Size(counter) > 0) {
    working.counted = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(counter, 0), nullptr);
    if (working.counted == nullptr) return nullptr;
  }
  PyObject* const self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (self == nullptr) return nullptr;
  auto* const verb = reinterpret_cast<Verb*>(self);
  verb->vector_call = VectorCalled;
  verb->details = details.release();
  return self;
}

int Traverse(PyObject* self, visitproc visit, void* arg) {
  const auto* const verb = reinterpret_cast<Verb*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(verb->dictionary);
  if (verb->details != nullptr) Py_VISIT(verb->details->function.get());
  return 0;
}

int Clear(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Verb*>(self)->dictionary);
  return 0;
}

void Delete(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  auto* const verb = reinterpret_cast<Verb*>(self);
  PyObject_GC_UnTrack(self);
  if (verb->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  Clear(self);
  delete verb->details;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* CaughtNew(PyTypeObject* type, PyObject* arguments, PyObject* named) {
  return Caught(New, type, arguments, named);
}

}  // namespace

int AddVerb(PyObject* module) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Verb, vector_call), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(Verb, dictionary), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(Verb, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef attributes[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyMethodDef methods[] = {
      {"__reduce__", Reduced, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, AsSlot(CaughtNew)},
      {Py_tp_dealloc, AsSlot(Delete)},
      {Py_tp_traverse, AsSlot(Traverse)},
      {Py_tp_clear, AsSlot(Clear)},
      {Py_tp_call, AsSlot(Called)},
      {Py_tp_descr_get, AsSlot(Bound)},
      {Py_tp_repr, AsSlot(Represented)},
      {Py_tp_members, members},
      {Py_tp_getset, attributes},
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char*>(kVerbText)},
      {0, nullptr},
  };
  static PyType_Spec spec = {"hororing._tensors.Verb", sizeof(Verb), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | kHasVectorCall, slots};
  const Reference types = Owned(PyImport_ImportModule("types"));
  if (types.get() == nullptr) return -1;
  method_type = PyObject_GetAttrString(types.get(), "MethodType");
  qualified_name = PyUnicode_InternFromString("__qualname__");
  PyObject* const type = PyType_FromSpec(&spec);
  if (method_type == nullptr || qualified_name == nullptr || type == nullptr) return -1;
  return PyModule_AddObject(module, "Verb", type);
}

}  // namespace hororing
