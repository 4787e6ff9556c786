#include "python/dlpack_view.h"

namespace hororing {
namespace {

// NumPy's array interface:
// https://numpy.org/doc/stable/reference/arrays.interface.html
struct ArrayInterface {
  int two;  // always 2: identifies the struct
  int ndim;
  char kind;
  int item_bytes;
  int flags;
  intptr_t* shape;  // owned by the capsule
  intptr_t* strides;
  void* data;
  PyObject* description;
};
// C order, aligned, native byte order, writeable.
constexpr int kArrayFlags = 0x1 | 0x100 | 0x200 | 0x400;

// False if the core has no such type.
bool DataTypeOf(uint8_t kind, int bits, int32_t* dtype) {
  struct Known {
    uint8_t kind, bits;
    int32_t dtype;
  };
  static constexpr Known kKnown[] = {
      {dlpack::kFloat, 32, HR_FLOAT32}, {dlpack::kFloat, 16, HR_FLOAT16},
      {dlpack::kFloat, 64, HR_FLOAT64}, {dlpack::kBfloat, 16, HR_BFLOAT16},
      {dlpack::kInt, 8, HR_INT8},       {dlpack::kInt, 16, HR_INT16},
      {dlpack::kInt, 32, HR_INT32},     {dlpack::kInt, 64, HR_INT64},
      {dlpack::kUint, 8, HR_UINT8},     {dlpack::kUint, 16, HR_UINT16},
      {dlpack::kBool, 8, HR_BOOL},
  };
  for (const Known& known : kKnown) {
    if (known.kind != kind || known.bits != bits) continue;
    *dtype = known.dtype;
    return true;
  }
  return false;
}

bool DataTypeOf(const ArrayInterface& array, int32_t* dtype) {
  static constexpr std::pair<char, dlpack::Kind> kKinds[] = {
      {'f', dlpack::kFloat}, {'i', dlpack::kInt}, {'u', dlpack::kUint}, {'b', dlpack::kBool}};
  for (const auto& [letter, kind] : kKinds) {
    if (letter == array.kind) return DataTypeOf(kind, 8 * array.item_bytes, dtype);
  }
  return false;
}

bool IsInOrder(const dlpack::Tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t expected = 1;
  bool in_order = true;
  for (int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] == 0) return true;
    if (tensor.shape[i] == 1) continue;
    in_order = in_order && tensor.strides[i] == expected;
    expected *= tensor.shape[i];
  }
  return in_order;
}

std::vector<Reference> Items(PyObject* tuple) {
  std::vector<Reference> items;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) {
    items.emplace_back(PyTuple_GetItem(tuple, i));
  }
  return items;
}

}  // namespace

bool Plain::Init(PyObject* types, PyObject* exchange, PyObject* refusals, PyObject* describe) {
  if (!PyTuple_Check(types) || !PyTuple_Check(refusals)) {
    PyErr_SetString(PyExc_TypeError, "types and refusals are tuples");
    return false;
  }
  types_ = Items(types);
  refusals_ = Items(refusals);
  describe_ = Reference(describe);
  if (exchange == Py_None) return true;
  const void* found = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
  if (found == nullptr) return false;
  const auto* table = static_cast<const dlpack::Exchange*>(found);
  while (table != nullptr && table->major != dlpack::kMajor) table = table->previous;
  if (table != nullptr && table->look != nullptr) exchange_ = table;
  return true;
}

int Plain::Describe(PyObject* tensor, hr_tensor* view, Shapes* shapes) const {
  bool known = false;
  for (const Reference& type : types_) {
    known = known || reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == type.get();
  }
  if (!known) return 0;
  view->device = 0;
  if (exchange_ != nullptr) return DescribeDlpack(tensor, view);
  return PyUnicode_Check(describe_.get()) ? DescribeArray(tensor, view, shapes)
                                          : Ask(tensor, view, shapes);
}

int Plain::DescribeAll(PyObject* tensors, std::vector<hr_tensor>* views, Shapes* shapes) const {
  const Py_ssize_t size = PyTuple_Size(tensors);
  views->resize(static_cast<size_t>(size));
  int plain = 1;
  for (Py_ssize_t i = 0; i < size && plain == 1; ++i) {
    plain = Describe(PyTuple_GetItem(tensors, i), &(*views)[static_cast<size_t>(i)], shapes);
  }
  return plain;
}

int Plain::DescribeDlpack(PyObject* tensor, hr_tensor* view) const {
  dlpack::Tensor seen;
  if (exchange_->look(tensor, &seen) != 0) {  // a sparse one, say
    PyErr_Clear();
    return 0;
  }
  if (seen.device != dlpack::kCpu || seen.lanes != 1 || !IsInOrder(seen) ||
      !DataTypeOf(seen.kind, seen.bits, &view->dtype)) {
    return 0;
  }
  for (const Reference& refusal : refusals_) {
    const Reference answer = Owned(PyObject_CallFunctionObjArgs(refusal.get(), tensor, nullptr));
    if (answer.get() != Py_False) return answer.get() == nullptr ? -1 : 0;
  }
  view->input = view->output = reinterpret_cast<uintptr_t>(seen.data) + seen.byte_offset;
  view->ndim = seen.ndim;
  view->shape = seen.shape;
  return 1;
}

int Plain::DescribeArray(PyObject* array, hr_tensor* view, Shapes* shapes) const {
  const Reference capsule = Owned(PyObject_GetAttr(array, describe_.get()));
  const void* const found =
      capsule.get() == nullptr ? nullptr : PyCapsule_GetPointer(capsule.get(), nullptr);
  if (found == nullptr) return -1;
  const ArrayInterface& seen = *static_cast<const ArrayInterface*>(found);
  if (seen.two != 2 || (seen.flags & kArrayFlags) != kArrayFlags ||
      !DataTypeOf(seen, &view->dtype)) {
    return 0;
  }
  const std::vector<int64_t>& shape = shapes->emplace_back(seen.shape, seen.shape + seen.ndim);
  view->input = view->output = reinterpret_cast<uintptr_t>(seen.data);
  view->ndim = seen.ndim;
  view->shape = shape.data();
  return 1;
}

int Plain::Ask(PyObject* tensor, hr_tensor* view, Shapes* shapes) const {
  const Reference answer = Owned(PyObject_CallFunctionObjArgs(describe_.get(), tensor, nullptr));
  if (answer.get() == nullptr) return -1;
  if (answer.get() == Py_None) return 0;
  PyObject* shape = nullptr;
  unsigned long long address = 0;
  if (PyArg_ParseTuple(answer.get(), "KiO!", &address, &view->dtype, &PyTuple_Type, &shape) == 0) {
    return -1;
  }
  std::vector<int64_t>& kept = shapes->emplace_back();
  for (Py_ssize_t i = 0; i < PyTuple_Size(shape); ++i) {
    kept.push_back(PyLong_AsLongLong(PyTuple_GetItem(shape, i)));
  }
  view->input = view->output = static_cast<uintptr_t>(address);
  view->ndim = static_cast<int32_t>(kept.size());
  view->shape = kept.data();
  return PyErr_Occurred() == nullptr ? 1 : -1;
}

}  // namespace hororing
