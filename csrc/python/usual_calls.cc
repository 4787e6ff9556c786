#include "python/usual_calls.h"

#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

#include "capi/hororing.h"
#include "python/names.h"
#include "python/requests.h"

namespace hororing {
namespace {

// An allreduce or a broadcast in the making.
struct Asked {
  hr_request request = {};
  long long number = 0;  // of an unnamed call; 0: it has a name
  char text[64];
};

// Those that follow return 1; 0: unusual; -1: an exception is set.

int Ask(const Working& verb, const Given& given, hr_collective collective, Asked* asked) {
  hr_request& request = asked->request;
  request.collective = collective;
  if (given[kSubject] == nullptr) return 0;
  if (ParseReduction(given[kOp], given[kPrescale], given[kPostscale], &request) == 0) return 0;
  const bool named = given[kName] != nullptr && given[kName] != Py_None;
  return named ? ParseName(given[kName], &request) : verb.counted != nullptr;
}

// The last step before the core: no other thread runs, and nothing can fail, until the call has
// been counted. The handle, or what is not positive.
int64_t Start(const Working& verb, Asked* asked) {
  const bool named = asked->request.name != nullptr;
  if (!named) {
    asked->number = Counted(verb.counters.get(), verb.counter.get()) + 1;
    if (asked->number <= 0) return -1;
    std::snprintf(asked->text, sizeof(asked->text), "%s.noname.%lld", verb.counted, asked->number);
    asked->request.name = asked->text;
  }
  const int64_t handle = hr_submit(&asked->request);
  if (handle > 0 && !named) {
    const int counted = SetCount(verb.counters.get(), verb.counter.get(), asked->number);
    if (counted != 0) PyErr_WriteUnraisable(verb.counters.get());
  }
  return handle;
}

// Blocks. Takes the reference to what is kept; whether it has succeeded.
bool Await(const Working& verb, int64_t handle, PyObject* keep) {
  const int code = Wait(handle);
  if (code == HR_OK) return true;
  // Who makes the error asks for it where all others are; and after an interrupt it lives there.
  const Reference number = Owned(Note(verb.table(), handle, keep));
  if (number.get() != nullptr && code != HR_PENDING) {
    Py_XDECREF(PyObject_CallFunctionObjArgs(verb.wait.get(), number.get(), nullptr));
    if (PyErr_Occurred() == nullptr) {
      PyErr_SetString(PyExc_RuntimeError, "a request that had failed has succeeded");
    }
  }
  return false;
}

// Of what the core reduces or broadcasts in place; `result` owns it, and is what the caller gets.
// `written`: a tuple of the tensors; null: it is `result`, and that can be told later.
PyObject* InPlace(const Working& verb, Asked* asked, bool waits, PyObject* written,
                  PyObject* result) {
  asked->request.wait_follows = waits ? 1 : 0;
  const int64_t handle = Start(verb, asked);
  if (handle <= 0) return nullptr;  // the function comes to the same, and has the words for it
  if (!waits) {
    PyObject* const number = Note(verb.table(), handle, result);
    if (number == nullptr) return nullptr;
    Sweep(verb.table());
    if (written != nullptr) {
      verb.plain().Written(written);
    } else if (verb.plain().written() != Py_None) {
      verb.table().in_flight().writes().Add(verb.plain().written(), result);
    }
    return number;
  }
  verb.plain().Written(written);
  if (!Await(verb, handle, result)) return nullptr;
  Py_INCREF(result);
  return result;
}

template <hr_collective kCollective, bool kWaits>
PyObject* OneInPlace(const Working& verb, const Given& given) {
  Asked asked;
  hr_tensor view;
  Plain::Shapes shapes;
  PyObject* const tensor = given[kSubject];
  if (Ask(verb, given, kCollective, &asked) != 1) return nullptr;
  if (kCollective == HR_BROADCAST && ParseRoot(given[kRoot], &asked.request) != 1) return nullptr;
  if (verb.plain().Describe(tensor, &view, &shapes) != 1) return nullptr;
  asked.request.tensors = &view;
  asked.request.tensors_count = 1;
  const Reference written = Owned(kWaits ? PyTuple_Pack(1, tensor) : nullptr);
  if (kWaits && written.get() == nullptr) return nullptr;
  return InPlace(verb, &asked, kWaits, written.get(), tensor);
}

template <bool kWaits>
PyObject* GroupInPlace(const Working& verb, const Given& given) {
  Asked asked;
  if (Ask(verb, given, HR_ALLREDUCE, &asked) != 1) return nullptr;
  PyObject* const list = given[kSubject];
  if (!PyTuple_CheckExact(list) && !PyList_CheckExact(list)) return nullptr;
  const Reference tensors = Owned(PySequence_Tuple(list));
  const Py_ssize_t size = tensors.get() != nullptr ? PyTuple_Size(tensors.get()) : 0;
  if (size <= 0 || size > INT32_MAX) return nullptr;
  std::vector<hr_tensor> views;
  Plain::Shapes shapes;
  if (verb.plain().DescribeAll(tensors.get(), &views, &shapes) != 1) return nullptr;
  asked.request.tensors = views.data();
  asked.request.tensors_count = static_cast<int32_t>(size);
  return InPlace(verb, &asked, kWaits, tensors.get(), tensors.get());
}

PyObject* Allreduce(const Working& verb, const Given& given) {
  Asked asked;
  hr_tensor view, output;
  Plain::Shapes shapes;
  PyObject* const tensor = given[kSubject];
  if (Ask(verb, given, HR_ALLREDUCE, &asked) != 1) return nullptr;
  if (verb.plain().Describe(tensor, &view, &shapes) != 1) return nullptr;
  if (verb.plain().Recorded(tensor) != 0) return nullptr;
  const Reference result = Owned(verb.plain().Like(tensor, &output, &shapes));
  const Reference keep =
      Owned(result.get() != nullptr ? PyTuple_Pack(2, tensor, result.get()) : nullptr);
  if (keep.get() == nullptr) return nullptr;
  view.output = output.output;
  asked.request.tensors = &view;
  asked.request.tensors_count = 1;
  asked.request.wait_follows = 1;
  const int64_t handle = Start(verb, &asked);
  if (handle <= 0 || !Await(verb, handle, keep.get())) return nullptr;
  Py_INCREF(result.get());
  return result.get();
}

PyObject* Synchronize(const Working& verb, const Given& given) {
  if (given[kSubject] == nullptr) return nullptr;
  PyObject* const result = Finish(verb.table(), given[kSubject]);
  if (result != Py_None) return result;
  Py_DECREF(result);
  return nullptr;
}

PyObject* Poll(const Working& verb, const Given& given) {
  const int64_t number = given[kSubject] != nullptr ? HandleOf(given[kSubject]) : 0;
  verb.table().in_flight().writes().Tell();
  if (verb.table().in_flight().Find(number) == nullptr) return nullptr;
  const int done = hr_poll(number);
  return done < 0 ? nullptr : PyBool_FromLong(done);
}

constexpr std::pair<std::string_view, UsualCall> kCalls[] = {
    {"allreduce", Allreduce},
    {"allreduce_", OneInPlace<HR_ALLREDUCE, true>},
    {"allreduce_async_", OneInPlace<HR_ALLREDUCE, false>},
    {"grouped_allreduce_", GroupInPlace<true>},
    {"grouped_allreduce_async_", GroupInPlace<false>},
    {"broadcast_", OneInPlace<HR_BROADCAST, true>},
    {"broadcast_async_", OneInPlace<HR_BROADCAST, false>},
    {"synchronize", Synchronize},
    {"poll", Poll},
};

}  // namespace

UsualCall FindUsualCall(std::string_view kind) {
  for (const auto& [name, call] : kCalls) {
    if (name == kind) return call;
  }
  return nullptr;
}

}  // namespace hororing
