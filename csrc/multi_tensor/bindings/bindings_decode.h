// Python's view of what checkpoints need and the CPU engine alone offers: decoding, CRC-32. Without the interpreter's
// lock: saves run beside training.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
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

// Of bytes of a file, and how many there were: fewer than `size` where it ends. OSError for what cannot be read.
// Python threads that read piece by piece would wait for the lock at every piece.
py::tuple crc32_of_file(int descriptor, uint64_t start, uint64_t size) {
    constexpr uint64_t kPiece = 1 << 19;  // which stays in the second-level cache
    uint64_t done = 0;
    uint32_t crc = 0;
    int error = 0;
    {
        py::gil_scoped_release release;
        const std::unique_ptr<uint8_t[]> piece(new uint8_t[std::min(size, kPiece)]);
        while (done < size && !error) {
            const ssize_t count = pread(descriptor, piece.get(), std::min(size - done, kPiece), start + done);
            if (count == 0) break;
            if (count > 0) {
                crc = crc32_cpu(piece.get(), static_cast<size_t>(count), crc);
                done += static_cast<uint64_t>(count);
            } else if (errno != EINTR) {
                error = errno;
            }
        }
    }
    if (error) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
    return py::make_tuple(crc, done);
}

inline void define_all(py::module_& m) {
    m.def("can_fold_crc32", &can_fold_crc32);
    m.def("crc32", &crc32, py::arg("content"), py::arg("crc"));
    m.def("crc32_of_file", &crc32_of_file, py::arg("descriptor"), py::arg("start"), py::arg("size"));
    using NoGil = py::call_guard<py::gil_scoped_release>;
    m.def("decode_state", &decode_state, py::arg("bits"), py::arg("scale"), py::arg("values"), py::arg("numel"),
          py::arg("block"), py::arg("format"), py::arg("square"), NoGil());
    m.def("join_remainder", &join_remainder, py::arg("high"), py::arg("low"), py::arg("values"), py::arg("numel"),
          py::arg("bits"), NoGil());
}

}  // namespace
}  // namespace fused_optim::decoding
