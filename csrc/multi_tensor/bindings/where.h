// What differs between the engines' interfaces: where a function runs, its last arguments.
#pragma once

#include <pybind11/pybind11.h>

#if defined(FUSED_OPTIM_ENGINE_CUDA)
#define FUSED_OPTIM_WHERE int device, uint64_t stream
#define FUSED_OPTIM_HERE device, stream
#define FUSED_OPTIM_ON(name) name##_cuda
#else
#define FUSED_OPTIM_WHERE int threads
#define FUSED_OPTIM_HERE threads
#define FUSED_OPTIM_ON(name) name##_cpu
#endif

namespace fused_optim {

// Adds a function that ends with FUSED_OPTIM_WHERE and runs without the interpreter's lock.
template <class Function, class... Arguments>
void define(pybind11::module_& m, const char* name, Function function, const Arguments&... arguments) {
    using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;
#if defined(FUSED_OPTIM_ENGINE_CUDA)
    m.def(name, function, arguments..., pybind11::arg("device"), pybind11::arg("stream"), NoGil());
#else
    m.def(name, function, arguments..., pybind11::arg("threads"), NoGil());
#endif
}

}  // namespace fused_optim
