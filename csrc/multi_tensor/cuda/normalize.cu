// Matrices are divided by their Frobenius norms: two launches for many of one shape. One adds up squares, a fixed
// number of sums for each matrix; each thread block of the other adds up these. All in an order that the shape alone
// decides.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/device.h"
#include "cuda/warp.cuh"
#include "product.h"

namespace fused_optim {
namespace {

constexpr const char* kName = "normalize";  // in errors
constexpr uint32_t kThreads = 512;
constexpr uint32_t kMostBlocks = 264;  // of the second launch, for a matrix
constexpr uint32_t kTogether = 256;    // matrices of a launch

template <class T>
struct Matrices {
    const T* values[kTogether];
    uint64_t eights;  // of each
};

__device__ __forceinline__ void load8(float (&x)[8], const float* from) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    const float all[] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = all[i];
}

__device__ __forceinline__ void load8(float (&x)[8], const __nv_bfloat16* from) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from);
    const uint32_t all[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(all[i] << 16);
        x[2 * i + 1] = __uint_as_float(all[i] & 0xFFFF0000u);
    }
}

__device__ __forceinline__ uint32_t packed(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &both, 4);
    return bits;
}

__device__ __forceinline__ float sum_over_warp(float x) {
    return combine_lanes<kWarp>(x, [](float a, float b) { return a + b; });
}

// Of all threads of the block, on all of them.
__device__ __forceinline__ float sum_over_block(float x) {
    __shared__ float of_warps[kThreads / kWarp];
    x = sum_over_warp(x);
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = x;
    __syncthreads();
    return sum_over_warp(threadIdx.x % kWarp < kThreads / kWarp ? of_warps[threadIdx.x % kWarp] : 0.0f);
}

template <class T>
__global__ void __launch_bounds__(kThreads) add_squares(const __grid_constant__ Matrices<T> matrices, float* sums) {
    const T* values = matrices.values[blockIdx.y];
    float sum = 0.0f;
#pragma unroll 4
    for (uint64_t i = blockIdx.x * uint64_t{kThreads} + threadIdx.x; i < matrices.eights;
         i += uint64_t{kNormSums} * kThreads) {
        float x[8];
        load8(x, values + 8 * i);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum = fmaf(x[j], x[j], sum);
    }
    sum = sum_over_block(sum);
    if (threadIdx.x == 0) sums[blockIdx.y * kNormSums + blockIdx.x] = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) normalize(const __grid_constant__ Matrices<T> matrices, const float* sums,
                                                      __half* results, float factor, float least) {
    static_assert(kNormSums <= kThreads);
    const uint32_t matrix = blockIdx.y;
    const float norm = sqrtf(sum_over_block(threadIdx.x < kNormSums ? sums[matrix * kNormSums + threadIdx.x] : 0.0f));
    const float divisor = fmaxf(norm, least);
    const T* values = matrices.values[matrix];
    uint4* result = reinterpret_cast<uint4*>(results) + matrix * matrices.eights;
    for (uint64_t i = blockIdx.x * uint64_t{kThreads} + threadIdx.x; i < matrices.eights;
         i += uint64_t{gridDim.x} * kThreads) {
        float x[8];
        load8(x, values + 8 * i);
        uint32_t made[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) made[j] = packed(x[2 * j] / divisor * factor, x[2 * j + 1] / divisor * factor);
        result[i] = make_uint4(made[0], made[1], made[2], made[3]);
    }
}

template <class T>
void launch(const Normalization& n, int device, cudaStream_t stream) {
    Matrices<T> matrices{};
    matrices.eights = n.numel / 8;
    const auto blocks =
        static_cast<uint32_t>(std::min<uint64_t>((matrices.eights + 2 * kThreads - 1) / (2 * kThreads), kMostBlocks));
    for (size_t first = 0; first < n.values.size(); first += kTogether) {
        const auto count = static_cast<uint32_t>(std::min<size_t>(n.values.size() - first, kTogether));
        for (uint32_t i = 0; i < count; ++i) matrices.values[i] = reinterpret_cast<const T*>(n.values[first + i]);
        auto* const sums = reinterpret_cast<float*>(n.sums) + first * kNormSums;
        auto* const results = reinterpret_cast<__half*>(n.result) + first * n.numel;
        add_squares<<<dim3(kNormSums, count), kThreads, 0, stream>>>(matrices, sums);
        normalize<<<dim3(blocks, count), kThreads, 0, stream>>>(matrices, sums, results, n.factor, n.least);
        check_cuda(cudaGetLastError(), kName, device);
    }
}

}  // namespace

void normalize_cuda(const Normalization& n, int device, uint64_t stream_handle) {
    CudaDeviceGuard guard(kName, device);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
    n.type == Element::kBFloat16 ? launch<__nv_bfloat16>(n, device, stream) : launch<float>(n, device, stream);
}

void load_normalize_kernels(int device) {
    CudaDeviceGuard guard(kName, device);
    load_kernel(add_squares<float>, kName, device);
    load_kernel(add_squares<__nv_bfloat16>, kName, device);
    load_kernel(normalize<float>, kName, device);
    load_kernel(normalize<__nv_bfloat16>, kName, device);
}

}  // namespace fused_optim
