// Launches of casts' kernels.
#pragma once

#include <stdexcept>

#include "cast.h"
#include "cuda/cast_tile.cuh"
#include "cuda/device.h"

namespace fused_optim {
namespace {

// One of the kernels for the formats, in their order.
template <class Work>
auto kernel_for(CastFormat format, void (*e4m3)(Work), void (*e5m2)(Work)) {
    static_assert(kCount<CastFormat> == 2);
    return format == CastFormat::kE4M3 ? e4m3 : e5m2;
}

// `half`: of FP16 values.
#define FUSED_OPTIM_KERNEL(name, format, half)                                                           \
    ((half) ? kernel_for(format, name<CastFormat::kE4M3, FP16Pairs>, name<CastFormat::kE5M2, FP16Pairs>) \
            : kernel_for(format, name<CastFormat::kE4M3, BF16Pairs>, name<CastFormat::kE5M2, BF16Pairs>))

template <class Work>
void launch(void (*kernel)(Work), const char* name, uint64_t blocks, const Work& work, int device, uint64_t stream) {
    if (blocks == 0) return;
    if (blocks > 0x7FFFFFFFu) throw std::runtime_error("fused_optim: a matrix is too large to be cast");
    kernel<<<static_cast<uint32_t>(blocks), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(work);
    check_cuda(cudaGetLastError(), name, device);
}

// What was written or read from its start on is read from its end on, which the L2 cache still has.
inline Cast from_the_end(Cast cast) {
    cast.backwards = true;
    return cast;
}

inline void clear_absmax(const Cast& cast, uint64_t words, const char* name, int device, uint64_t stream) {
    const auto absmax = reinterpret_cast<void*>(cast.absmax);
    check_cuda(cudaMemsetAsync(absmax, 0, words * sizeof(float), reinterpret_cast<cudaStream_t>(stream)), name, device);
}

inline uint64_t tiles(const Cast& cast) {
    return ceil_divide(cast.rows, kTileSize) * ceil_divide(cast.columns, kTileSize);
}

}  // namespace
}  // namespace fused_optim
