// A tensor's address, type, device and shape as DLPack's C exchange API tells them (DLPack 1.x,
// https://dmlc.github.io/dlpack), in one call and without a torch header. The structs repeat DLPack's stable ABI.
#pragma once

#include <cstdint>

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

constexpr uint8_t kDLFloat = 2, kDLBfloat = 4;  // values of DLDataType::code

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

}  // namespace fused_optim
