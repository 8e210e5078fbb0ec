// What every launcher needs of the CUDA runtime: errors as exceptions, the current device set and restored, a limit.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace fused_optim {

constexpr int kParameterLimit = 32764;  // bytes of kernel parameters, compute capability 7.0 and later

inline void check_cuda(cudaError_t error, const char* kernel, int device) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // launch errors that are not sticky must not surface in somebody else's call
    throw std::runtime_error(std::string("fused_optim: kernel ") + kernel + " on cuda:" + std::to_string(device) +
                             ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

class CudaDeviceGuard {
public:
    CudaDeviceGuard(const char* kernel, int device) : device_(device) {
        check_cuda(cudaGetDevice(&previous_), kernel, device);
        if (previous_ != device_) check_cuda(cudaSetDevice(device_), kernel, device);
    }
    ~CudaDeviceGuard() {
        if (previous_ != device_) cudaSetDevice(previous_);
    }
    CudaDeviceGuard(const CudaDeviceGuard&) = delete;
    CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

private:
    int device_;
    int previous_ = 0;
};

// Makes the runtime load a kernel, which by default it does at the first launch: too late within a graph capture.
template <class... Arguments>
void load_kernel(void (*kernel)(Arguments...), const char* name, int device) {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), name, device);
}

}  // namespace fused_optim
