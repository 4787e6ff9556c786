#include "python/writes.h"

#include <utility>

namespace hororing {

void Writes::Add(PyObject* tell, PyObject* tensor) {
  while (!tensors_.empty() && (tell != tell_.get() || tensors_.size() == kMost)) Tell();
  if (tell != tell_.get()) tell_ = Reference(tell);
  tensors_.emplace_back(tensor);
}

void Writes::Tell() {
  if (tensors_.empty()) return;
  const Reference tell(tell_.get());
  const std::vector<Reference> written = std::exchange(tensors_, {});
  const Reference tuple = Owned(PyTuple_New(static_cast<Py_ssize_t>(written.size())));
  for (size_t i = 0; tuple.get() != nullptr && i < written.size(); ++i) {
    Py_INCREF(written[i].get());
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), written[i].get());
  }
  PyObject* const told = tuple.get() == nullptr
                             ? nullptr
                             : PyObject_CallFunctionObjArgs(tell.get(), tuple.get(), nullptr);
  if (told == nullptr) PyErr_WriteUnraisable(tell.get());
  Py_XDECREF(told);
}

}  // namespace hororing
