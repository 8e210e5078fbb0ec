// Reads a torch tensor's address, type, device and shape through DLPack's C exchange API (DLPack 1.x,
// https://dmlc.github.io/dlpack), in one call and without a torch header. The structs repeat DLPack's stable ABI.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

namespace fused_optim {

struct DLDevice {
    int32_t type;
    int32_t index;
};

struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct DLTensor {
    void* data;
    DLDevice device;
    int32_t dims;
    DLDataType type;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};

struct DLPackExchangeApi {
    uint32_t major;
    uint32_t minor;
    void* previous;
    void* allocate;
    void* to_managed;
    void* from_managed;
    int (*to_tensor)(void* object, DLTensor* out);  // borrows; -1 with a Python error set
    void* current_stream;
};

inline bool operator==(DLDevice a, DLDevice b) { return a.type == b.type && a.index == b.index; }
inline bool operator==(DLDataType a, DLDataType b) {
    return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// As torch defines it: dimensions of size 1 may have any stride, and empty tensors are contiguous.
inline bool is_contiguous(const DLTensor& tensor) {
    int64_t expected = 1;
    bool contiguous = true;
    for (int d = tensor.dims - 1; d >= 0; --d) {
        if (tensor.shape[d] == 0) return true;
        contiguous &= tensor.shape[d] == 1 || tensor.strides[d] == expected;
        expected *= tensor.shape[d];
    }
    return contiguous;
}

inline uint64_t address(const DLTensor& tensor) { return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset; }

// torch's own tensor, a C++ object, to which the first field of the Python object points.
inline const char* body_of(PyObject* tensor) {
    return *reinterpret_cast<const char* const*>(reinterpret_cast<const char*>(tensor) + sizeof(PyObject));
}

constexpr size_t kBodySize = 192;  // not more than torch's own tensor has

template <class T>
T load(const char* memory, size_t offset) {
    T value;
    std::memcpy(&value, memory + offset, sizeof(value));
    return value;
}

// What DLPack does not tell: whether a tensor's bytes are its values. torch negates lazily, makes zeros without memory,
// and wraps tensors for its transforms. All of it is in the tensor's dispatch keys, a word of torch's own tensor. Where
// the word lies is found out by looking for known keys.
class DispatchKeys {
public:
    // `examples`: (tensor, its keys), the first one an ordinary tensor.
    explicit DispatchKeys(const std::vector<std::pair<pybind11::object, uint64_t>>& examples) {
        for (size_t offset = 0; offset < kBodySize && !examples.empty(); offset += sizeof(uint64_t)) {
            offset_ = offset;
            ordinary_ = examples.front().second;
            found_ = std::all_of(examples.begin(), examples.end(),
                                 [&](const auto& example) { return of(example.first.ptr()) == example.second; });
            if (found_) return;
        }
    }

    bool found() const { return found_; }
    bool are_ordinary(const char* body) const { return load<uint64_t>(body, offset_) == ordinary_; }

private:
    uint64_t of(PyObject* tensor) const { return load<uint64_t>(body_of(tensor), offset_); }

    size_t offset_ = 0;
    uint64_t ordinary_ = 0;
    bool found_ = false;
};

// Where torch keeps what DLPack tells: asking DLPack takes most of the time of looking at a tensor that is as it was.
// Found out by examples, like the keys. What is not found, and every tensor that is unlike all examples, is left to
// DLPack, which is also asked whether the examples are read rightly.
class TensorLayout {
public:
    using ToTensor = int (*)(void*, DLTensor*);

    // Of an example: the tensor, the address of torch's own storage, how many bytes it has, and the tensor's offset
    // there in elements.
    struct Example {
        pybind11::object tensor;
        uint64_t storage, bytes;
        int64_t offset;
    };

    TensorLayout() = default;

    // `examples` differ in everything that is looked for. `copied`: two tensors that torch copies when they are
    // written, which DLPack takes care of.
    TensorLayout(const std::vector<Example>& examples, const std::vector<Example>& copied, ToTensor to_tensor) {
        std::vector<DLTensor> told(examples.size());
        for (size_t i = 0; i < examples.size(); ++i) {
            if (to_tensor(examples[i].tensor.ptr(), &told[i]) != 0) {
                PyErr_Clear();
                return;
            }
        }
        const auto all = [&](auto matches) {
            for (size_t i = 0; i < examples.size(); ++i) {
                if (!matches(body_of(examples[i].tensor.ptr()), examples[i], told[i])) return false;
            }
            return !examples.empty();
        };
        using Body = const char*;
        const bool found =
            find(storage_, kBodySize - 8, 8,
                 [&](size_t at) {
                     return all(
                         [&](Body b, const Example& e, const DLTensor&) { return load<uint64_t>(b, at) == e.storage; });
                 }) &&
            find(data_, kStorageSize - 24, 8,
                 [&](size_t at) {
                     return all([&](Body b, const Example& e, const DLTensor& t) {
                         const uint64_t bytes = static_cast<uint64_t>(e.offset) * (t.type.bits / 8);
                         return load<uint64_t>(storage(b), at) + bytes == address(t);
                     });
                 }) &&
            find(size_, kStorageSize - 8, 8,
                 [&](size_t at) {
                     return all([&](Body b, const Example& e, const DLTensor&) {
                         return load<uint64_t>(storage(b), at) == e.bytes;
                     });
                 }) &&
            find(offset_, kBodySize - 8, 8,
                 [&](size_t at) {
                     return all(
                         [&](Body b, const Example& e, const DLTensor&) { return load<int64_t>(b, at) == e.offset; });
                 }) &&
            find(shape_, kBodySize - 8 * (1 + 2 * kMostDims), 8,
                 [&](size_t at) {
                     return all([&](Body b, const Example&, const DLTensor& t) { return has_shape(b, at, t); });
                 }) &&
            find(kind_, kBodySize - 8, 1, [&](size_t at) {
                return all([&](Body b, const Example&, const DLTensor& t) { return has_kind(b, at, t); });
            });
        if (!found || copied.size() != 2) return;
        const Body first = storage(body_of(copied[0].tensor.ptr())), second = storage(body_of(copied[1].tensor.ptr()));
        found_ = find(copier_at_, data_ + 24, 8, [&](size_t at) {
            copier_ = load<uint64_t>(first, at);
            return at > data_ && copier_ == load<uint64_t>(second, at) &&
                   all([&](Body b, const Example&, const DLTensor&) {
                       return load<uint64_t>(storage(b), at) != copier_;
                   });
        });
        found_ = found_ && all([&](Body b, const Example&, const DLTensor& t) {
                     DLTensor read;
                     return this->read(b, read) && address(read) == address(t) && read.device == t.device &&
                            read.type == t.type;
                 });
    }

    bool found() const { return found_; }

    // False where DLPack has to be asked. `body`: of a tensor with ordinary keys.
    bool read(const char* body, DLTensor& out) const {
        const auto dims = load<uint64_t>(body, shape_);
        const Kind kind = load<Kind>(body, kind_);
        if (dims > kMostDims || !kind.has_device || !type_of(kind, out.type) || !device_of(kind, out.device))
            return false;
        const char* memory = storage(body);
        if (!memory || load<uint64_t>(memory, copier_at_) == copier_) return false;
        out.dims = static_cast<int32_t>(dims);
        out.shape = const_cast<int64_t*>(reinterpret_cast<const int64_t*>(body + shape_ + 8));
        out.strides = out.shape + kMostDims;
        out.byte_offset = 0;
        const auto data = load<uint64_t>(memory, data_);
        const bool empty = std::find(out.shape, out.shape + dims, 0) != out.shape + dims;
        const auto offset = static_cast<uint64_t>(load<int64_t>(body, offset_)) * (out.type.bits / 8);
        out.data = empty || !data ? nullptr : reinterpret_cast<void*>(data + offset);
        return true;
    }

    // Whether the storage of a tensor that was read does not end before the tensor does.
    bool is_whole(const char* body, const DLTensor& tensor) const {
        int64_t end = load<int64_t>(body, offset_) + 1;
        for (int d = 0; d < tensor.dims; ++d) end += (tensor.shape[d] - 1) * tensor.strides[d];
        return end * (tensor.type.bits / 8) <= load<int64_t>(storage(body), size_);
    }

    // What `read` reads of a tensor, and of its storage once its body is there.
    static void prefetch_body(const char* body) {
        for (size_t line = 0; line < kBodySize; line += 64) __builtin_prefetch(body + line);
    }
    void prefetch_storage(const char* body) const {
        if (found_) __builtin_prefetch(storage(body) + data_);
    }

private:
    static constexpr size_t kMostDims = 5;      // more are elsewhere
    static constexpr size_t kStorageSize = 64;  // not more than torch's storage has

    struct Kind {  // torch's numbers
        uint16_t type;
        int8_t device, index;
        bool has_device;
        char others[3];
    };
    static_assert(sizeof(Kind) == 8);

    template <class Matches>
    static bool find(size_t& field, size_t end, size_t step, Matches matches) {
        for (size_t at = 0; at <= end; at += step) {
            if (matches(at)) return field = at, true;
        }
        return false;
    }

    const char* storage(const char* body) const { return load<const char*>(body, storage_); }

    static bool has_shape(const char* body, size_t at, const DLTensor& t) {
        if (load<uint64_t>(body, at) != static_cast<uint64_t>(t.dims)) return false;
        for (int d = 0; d < t.dims; ++d) {
            const size_t size = at + 8 * static_cast<size_t>(1 + d);
            if (load<int64_t>(body, size) != t.shape[d]) return false;
            if (load<int64_t>(body, size + 8 * kMostDims) != t.strides[d]) return false;
        }
        return true;
    }

    static bool has_kind(const char* body, size_t at, const DLTensor& t) {
        const Kind kind = load<Kind>(body, at);
        DLDataType type;
        DLDevice device;
        return load<uint8_t>(body, at + offsetof(Kind, has_device)) == 1 && type_of(kind, type) && type == t.type &&
               device_of(kind, device) && device == t.device;
    }

    static bool type_of(const Kind& kind, DLDataType& type) {
        constexpr DLDataType known[] = {{1, 8, 1}, {0, 8, 1}, {0, 16, 1}, {}, {}, {2, 16, 1}, {2, 32, 1}, {},
                                        {},        {},        {},         {}, {}, {},         {},         {4, 16, 1}};
        if (kind.type >= std::size(known)) return false;
        return (type = known[kind.type]).lanes == 1;
    }

    static bool device_of(const Kind& kind, DLDevice& device) {
        constexpr int32_t known[] = {1, 2};  // CPU, CUDA
        if (kind.device < 0 || kind.device > 1) return false;
        device = {known[kind.device], std::max<int32_t>(kind.index, 0)};
        return true;
    }

    size_t storage_ = 0, data_ = 0, size_ = 0, offset_ = 0, shape_ = 0, kind_ = 0, copier_at_ = 0;
    uint64_t copier_ = 0;
    bool found_ = false;
};

// Addresses, and sizes that go with them: Python hands them from one function to another without looking at them.
struct Numbers {
    std::vector<uint64_t> values;
};

class TensorReader {
public:
    using Example = TensorLayout::Example;

    // `capsule`: torch.Tensor.__dlpack_c_exchange_api__; of anything else, or another major version, nothing is read.
    // `checks_ends`: a tensor that ends behind its storage has no memory. That takes longer.
    TensorReader(pybind11::object capsule, pybind11::object tensor_type, DispatchKeys keys,
                 const std::vector<Example>& examples, const std::vector<Example>& copied, bool checks_ends)
        : tensor_type_(tensor_type), keys_(keys), checks_ends_(checks_ends) {
        if (!keys.found()) return;
        constexpr const char* name = "dlpack_exchange_api";
        if (!PyCapsule_IsValid(capsule.ptr(), name)) return;
        auto* api = static_cast<DLPackExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), name));
        if (api->major != 1) return;
        to_tensor_ = api->to_tensor;
        layout_ = TensorLayout(examples, copied, to_tensor_);
    }

    // Whether tensors are read without asking DLPack.
    bool reads_directly() const { return layout_.found(); }

    // False for what is not a tensor whose values lie in memory of its own, such as sparse ones.
    bool read(PyObject* object, DLTensor& out) const {
        if (to_tensor_ == nullptr || !is_tensor(object) || !keys_.are_ordinary(body_of(object))) return false;
        if (read_body(body_of(object), out)) return true;
        if (to_tensor_(object, &out) == 0) return true;
        PyErr_Clear();
        return false;
    }

    // The same of torch's own tensor; also false where DLPack has to be asked, which takes Python's object.
    bool read_body(const char* body, DLTensor& out) const {
        if (!layout_.found() || !keys_.are_ordinary(body) || !layout_.read(body, out)) return false;
        if (checks_ends_ && !layout_.is_whole(body, out)) out.data = nullptr;
        return true;
    }

    // The numbers of those that are not contiguous tensors whose values lie in memory of their own.
    std::vector<size_t> unusual(const std::vector<pybind11::handle>& tensors) const {
        std::vector<size_t> found;
        for (size_t i = 0; i < tensors.size(); ++i) {
            DLTensor tensor;
            if (!read(tensors[i].ptr(), tensor) || !is_contiguous(tensor)) found.push_back(i);
        }
        return found;
    }

    // Of plain contiguous tensors, 0 for None; None where one of them is anything else.
    [[gnu::flatten]] pybind11::object addresses(const pybind11::list& tensors) const {
        Numbers found;
        found.values.reserve(tensors.size());
        for (size_t i = 0; i < tensors.size(); ++i) {
            prefetch(tensors.ptr(), i);
            PyObject* object = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
            DLTensor tensor{};
            const bool fits =
                object == Py_None || (is_plain_tensor(object) && read(object, tensor) && is_contiguous(tensor));
            if (!fits) return pybind11::none();
            found.values.push_back(address(tensor));
        }
        return pybind11::cast(std::move(found));
    }

    const pybind11::object& tensor_type() const { return tensor_type_; }
    const TensorLayout& layout() const { return layout_; }

    // Subclasses hide their memory (DTensors, tensors of unfinished collectives).
    bool is_plain_tensor(PyObject* object) const {
        return reinterpret_cast<PyObject*>(Py_TYPE(object)) == tensor_type_.ptr();
    }

    bool is_tensor(PyObject* object) const {
        return is_plain_tensor(object) ||
               PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(tensor_type_.ptr()));
    }

private:
    // Of a list that is read from its first tensor to its last: what is read soon.
    void prefetch(PyObject* list, size_t i) const {
        const auto plain_tensor = [&](size_t ahead) -> PyObject* {
            if (i + ahead >= static_cast<size_t>(PyList_GET_SIZE(list))) return nullptr;
            PyObject* object = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i + ahead));
            return is_plain_tensor(object) ? object : nullptr;
        };
        if (PyObject* tensor = plain_tensor(8)) layout_.prefetch_body(body_of(tensor));
        if (PyObject* tensor = plain_tensor(4)) layout_.prefetch_storage(body_of(tensor));
    }

    pybind11::object tensor_type_;
    DispatchKeys keys_;
    TensorLayout layout_;
    bool checks_ends_;
    int (*to_tensor_)(void*, DLTensor*) = nullptr;
};

// Reads an attribute, such as DTensor._local_tensor; where it lies in the object itself (Python's __slots__), without
// the way through the interpreter.
class AttributeReader {
public:
    AttributeReader(const pybind11::object& type, const char* name)
        : type_(type), name_(pybind11::reinterpret_steal<pybind11::object>(PyUnicode_InternFromString(name))) {
        pybind11::object member = pybind11::getattr(type, name, pybind11::none());
        if (!PyObject_TypeCheck(member.ptr(), &PyMemberDescr_Type)) return;
        offset_ = reinterpret_cast<PyMemberDescrObject*>(member.ptr())->d_member->offset;
    }

    // Null if there is none. `object` is exactly of the type.
    pybind11::object get(PyObject* object) const {
        if (offset_ > 0) return pybind11::reinterpret_borrow<pybind11::object>(peek(object));
        auto value = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(object, name_.ptr()));
        if (!value) PyErr_Clear();
        return value;
    }

    // Null where it cannot be had at once, and for other types.
    PyObject* peek(PyObject* object) const {
        if (offset_ == 0 || !object || reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.ptr()) return nullptr;
        return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
    }

private:
    pybind11::object type_, name_;
    Py_ssize_t offset_ = 0;
};

// Reads an attribute of any tensor that may be torch's own, such as `grad`: by the C function of torch that the
// interpreter would look up, unless the tensor's class says otherwise.
class PropertyReader {
public:
    PropertyReader(const pybind11::object& tensor_type, PyObject* name)
        : name_(name), descriptor_(pybind11::getattr(tensor_type, name, pybind11::none())) {
        if (!PyObject_TypeCheck(descriptor_.ptr(), &PyGetSetDescr_Type)) return;
        def_ = reinterpret_cast<PyGetSetDescrObject*>(descriptor_.ptr())->d_getset;
    }

    // Whether it is torch's own attribute.
    bool is_torchs(PyObject* tensor) const {
        PyTypeObject* type = Py_TYPE(tensor);
        return def_ && type->tp_getattro == PyObject_GenericGetAttr && _PyType_Lookup(type, name_) == descriptor_.ptr();
    }

    // Null if there is none.
    pybind11::object operator()(PyObject* tensor) const {
        PyObject* found = is_torchs(tensor) ? def_->get(tensor, def_->closure) : PyObject_GetAttr(tensor, name_);
        if (!found) PyErr_Clear();
        return pybind11::reinterpret_steal<pybind11::object>(found);
    }

private:
    PyObject* name_;
    pybind11::object descriptor_;
    const PyGetSetDef* def_ = nullptr;
};

// Where torch keeps a tensor's gradient. Asked for it, torch makes a Python object of each that has none, and looks at
// it even where there is one: most of what new gradients cost. Found out by examples, like the keys.
class GradientLayout {
public:
    // A new tensor, and what becomes its gradient: a tensor or None.
    using Example = std::pair<pybind11::object, pybind11::object>;

    explicit GradientLayout(const std::vector<Example>& examples) {
        for (const auto& [tensor, gradient] : examples) {
            if (!find_record(tensor)) return;
            tensor.attr("grad") = gradient;
        }
        for (; gradient_ < kRecordSize && !examples.empty(); gradient_ += 8) {
            if ((found_ = shows(examples))) return;
        }
    }

    bool found() const { return found_; }

    // What torch keeps of a tensor for autograd; null if nothing.
    const char* record(const char* body) const { return load<const char*>(body, record_); }
    void prefetch_record(const char* body) const { __builtin_prefetch(body + record_); }

    // torch's own tensor in such a record; null if there is no gradient.
    const char* gradient(const char* record) const {
        const char* body = record ? load<const char*>(record, gradient_) : nullptr;
        return body == none_ ? nullptr : body;
    }
    void prefetch_gradient(const char* record) const { __builtin_prefetch(record + gradient_); }

private:
    static constexpr size_t kRecordSize = 128;  // not more than torch's has

    // The one word that is zero until the tensor requires a gradient.
    bool find_record(const pybind11::object& tensor) {
        std::array<char, kBodySize> before;
        std::memcpy(before.data(), body_of(tensor.ptr()), kBodySize);
        tensor.attr("requires_grad_")();
        size_t changed = 0;
        for (size_t at = 0; at < kBodySize; at += 8) {
            const auto was = load<uint64_t>(before.data(), at), is = load<uint64_t>(body_of(tensor.ptr()), at);
            if (was == is) continue;
            if (was != 0 || ++changed > 1) return false;
            record_ = at;
        }
        return changed == 1;
    }

    // The last example has no gradient.
    bool shows(const std::vector<Example>& examples) {
        const auto word = [&](const Example& example) {
            return load<const char*>(record(body_of(example.first.ptr())), gradient_);
        };
        none_ = word(examples.back());
        return std::all_of(examples.begin(), examples.end(), [&](const Example& example) {
            return word(example) == (example.second.is_none() ? none_ : body_of(example.second.ptr()));
        });
    }

    size_t record_ = 0, gradient_ = 0;
    const char* none_ = nullptr;  // what stands for no gradient
    bool found_ = false;
};

// How often tensors were written, which torch counts in a number that a tensor shares with its views. Where it lies is
// found out by examples, like the keys; else torch is asked, and left to count.
class VersionCounters {
public:
    // A tensor that was written a few times, one that counts with it, and one that has only its memory.
    using Example = std::array<pybind11::object, 3>;

    VersionCounters(const pybind11::object& tensor_type, const std::vector<Example>& examples)
        : tensor_type_(tensor_type), descriptor_(pybind11::getattr(tensor_type, "_version", pybind11::none())) {
        if (!PyObject_TypeCheck(descriptor_.ptr(), &PyGetSetDescr_Type)) return;
        def_ = reinterpret_cast<PyGetSetDescrObject*>(descriptor_.ptr())->d_getset;
        for (counter_ = 0; counter_ < kBodySize && !examples.empty(); counter_ += sizeof(uint64_t)) {
            if (!may_be_counters(examples)) continue;
            for (size_t number : {16, 24}) {  // behind the counts of its owners, of which there were one or two
                number_ = number;
                const auto shows = [&](const Example& example) {
                    PyObject* tensor = example[0].ptr();
                    return *number_of(tensor) == ask(tensor);
                };
                if (std::all_of(examples.begin(), examples.end(), shows)) {
                    found_ = counts(examples.front()[0].ptr());
                    return;
                }
            }
        }
    }

    bool found() const { return found_; }

    // Of a tensor; 0 where torch does not tell, as for inference tensors.
    int64_t operator()(PyObject* tensor) const {
        if (!tensor) return 0;
        if (!found_ || !body_of(tensor)) return ask(tensor);
        const uint32_t* number = number_of(tensor);
        return number ? __atomic_load_n(number, __ATOMIC_RELAXED) : 0;
    }

    // Counts a write of each. False, and nothing is counted, where that is left to torch.
    template <class Tensors>
    bool increment(const Tensors& tensors) const {
        if (!found_) return false;
        for (pybind11::handle tensor : tensors) {
            if (!is_tensor(tensor.ptr()) || !body_of(tensor.ptr()) || !number_of(tensor.ptr())) return false;
        }
        for (pybind11::handle tensor : tensors) __atomic_fetch_add(number_of(tensor.ptr()), 1, __ATOMIC_SEQ_CST);
        return true;
    }

private:
    bool is_tensor(PyObject* object) const {
        return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(tensor_type_.ptr()));
    }

    int64_t ask(PyObject* tensor) const {
        PyObject* found = def_ ? def_->get(tensor, def_->closure) : PyObject_GetAttrString(tensor, "_version");
        const auto version = pybind11::reinterpret_steal<pybind11::object>(found);
        if (!version) return PyErr_Clear(), 0;
        return PyLong_AsLongLong(version.ptr());
    }

    char* counter_of(PyObject* tensor) const { return load<char*>(body_of(tensor), counter_); }

    uint32_t* number_of(PyObject* tensor) const {
        char* counter = counter_of(tensor);
        return counter ? reinterpret_cast<uint32_t*>(counter + number_) : nullptr;
    }

    // Whether each example has an address of its own here, which it shares with what counts with it alone. All of it is
    // asked before one is read: what else lies here, flags or no part of the tensor, may be alike by chance.
    bool may_be_counters(const std::vector<Example>& examples) const {
        std::vector<const char*> found;
        for (const Example& example : examples) {
            const char* counter = counter_of(example[0].ptr());
            const bool is_address = counter && reinterpret_cast<uintptr_t>(counter) % alignof(uint64_t) == 0;
            if (!is_address || counter != counter_of(example[1].ptr()) || counter == counter_of(example[2].ptr()) ||
                std::find(found.begin(), found.end(), counter) != found.end())
                return false;
            found.push_back(counter);
        }
        return true;
    }

    // Whether torch sees what is counted here.
    bool counts(PyObject* tensor) const {
        const int64_t before = ask(tensor);
        __atomic_fetch_add(number_of(tensor), 1, __ATOMIC_SEQ_CST);
        if (ask(tensor) == before + 1) return true;
        __atomic_fetch_sub(number_of(tensor), 1, __ATOMIC_SEQ_CST);
        return false;
    }

    pybind11::object tensor_type_, descriptor_;
    const PyGetSetDef* def_ = nullptr;
    size_t counter_ = 0, number_ = 0;  // where the counter's address lies in a tensor, and the number there
    bool found_ = false;
};

}  // namespace fused_optim
