// Inspects a framework's tensor in a few nanoseconds, in every call of a verb.
//
// A plain tensor has one of the framework's own types, is dense, is in host memory, and stores its
// values directly. hororing/verbs handles all other tensors. Under the GIL.
#pragma once

#include <Python.h>

#include <cstdint>
#include <list>
#include <utility>
#include <vector>

#include "capi/hororing.h"
#include "python/dlpack.h"

namespace hororing {

class Reference {  // to a Python object; counted
 public:
  Reference() = default;
  explicit Reference(PyObject* borrowed) : object_(borrowed) { Py_XINCREF(borrowed); }
  Reference(Reference&& other) noexcept : object_(other.object_) { other.object_ = nullptr; }
  Reference& operator=(Reference&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Reference() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_ = nullptr;
};

// Takes ownership of the result of a Python function; null stays null.
inline Reference Owned(PyObject* object) {
  Reference owned(object);
  Py_XDECREF(object);
  return owned;
}

class Plain {
 public:
  // Shapes that no tensor owns, for as long as a request needs them.
  using Shapes = std::list<std::vector<int64_t>>;

  // `types`: a tuple. `exchange`: a capsule with DLPack's table, or None. `refusals`: a tuple of
  // predicates; a tensor is plain if all of them are false. `describe`, used without a table: a
  // function from a tensor to None, or to address, hr_dtype and shape; or the name of the attribute
  // with NumPy's array interface. False: an exception is set.
  bool Init(PyObject* types, PyObject* exchange, PyObject* refusals, PyObject* describe);

  // 1: `view` is the tensor's memory, until it is resized; 0: not plain; -1: an exception is set.
  int Describe(PyObject* tensor, hr_tensor* view, Shapes* shapes) const;
  int DescribeAll(PyObject* tensors, std::vector<hr_tensor>* views, Shapes* shapes) const;

 private:
  int DescribeDlpack(PyObject* tensor, hr_tensor* view) const;
  int DescribeArray(PyObject* array, hr_tensor* view, Shapes* shapes) const;
  int Ask(PyObject* tensor, hr_tensor* view, Shapes* shapes) const;

  std::vector<Reference> types_, refusals_;
  Reference describe_;
  const dlpack::Exchange* exchange_ = nullptr;  // null: describe_ is asked
};

}  // namespace hororing
