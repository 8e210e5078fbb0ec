// Where torch keeps in memory what DLPack tells of a tensor, and what it does not tell. Found out by examples, and only
// read: with DLPack instead the host takes a sixth more for a step, of 146 tensors as of 2,000.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "bindings/dlpack.h"

namespace fused_optim {

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

}  // namespace fused_optim
