// Python's view of what checkpoints need and the CPU engine alone offers: decoding, CRC-32. Without the interpreter's
// lock: saves run beside training.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "crc32.h"
#include "decode.h"

namespace py = pybind11;

namespace fused_optim::decoding {
namespace {

void require(bool condition, const char* expected) {
    if (!condition) throw std::invalid_argument(std::string("fused_optim: decoding: expected ") + expected);
}

void decode_state(uint64_t bits, uint64_t scale, uint64_t values, uint64_t numel, uint64_t block, uint32_t format,
                  bool square) {
    require(format < kCount<Format> && static_cast<Format>(format) != Format::kFloat32, "a format to be decoded");
    const bool scaled = is_scaled(static_cast<Format>(format));
    require(bits && values && (!scaled || (scale && block)), "addresses of all tensors, and blocks");
    const StateKind kind = square ? StateKind::kSquare : StateKind::kSigned;
    decode_state_cpu({bits, scale, numel, block, static_cast<Format>(format), kind}, reinterpret_cast<float*>(values));
}

void join_remainder(uint64_t high, uint64_t low, uint64_t values, uint64_t numel, uint32_t bits) {
    require(high && low && values, "addresses of all tensors");
    require(bits == 16 || bits == 8, "remainders of 16 or 8 bits");
    const auto* upper = reinterpret_cast<const uint16_t*>(high);
    auto* joined = reinterpret_cast<float*>(values);
    if (bits == 16) {
        join_remainder_cpu(upper, reinterpret_cast<const int16_t*>(low), numel, joined);
    } else {
        join_remainder_cpu(upper, reinterpret_cast<const int8_t*>(low), numel, joined);
    }
}

// Of contiguous bytes; BufferError for others.
uint32_t crc32(const py::object& content, uint32_t crc) {
    Py_buffer view;
    if (PyObject_GetBuffer(content.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    {
        py::gil_scoped_release release;
        crc = crc32_cpu(static_cast<const uint8_t*>(view.buf), static_cast<size_t>(view.len), crc);
    }
    PyBuffer_Release(&view);
    return crc;
}

inline void define_all(py::module_& m) {
    m.def("can_fold_crc32", &can_fold_crc32);
    m.def("crc32", &crc32, py::arg("content"), py::arg("crc"));
    using NoGil = py::call_guard<py::gil_scoped_release>;
    m.def("decode_state", &decode_state, py::arg("bits"), py::arg("scale"), py::arg("values"), py::arg("numel"),
          py::arg("block"), py::arg("format"), py::arg("square"), NoGil());
    m.def("join_remainder", &join_remainder, py::arg("high"), py::arg("low"), py::arg("values"), py::arg("numel"),
          py::arg("bits"), NoGil());
}

}  // namespace
}  // namespace fused_optim::decoding
