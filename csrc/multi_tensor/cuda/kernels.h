// The kernels of the update, as the launch sees them: made by one_mix.cu, compiled once per format of moments, and by
// any_mix.cu. So they compile side by side.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>

#include "cuda/device.h"
#include "cuda/table.cuh"
#include "dispatch.h"

namespace fused_optim {

constexpr int kMaxDevices = 64;
constexpr const char* kName = "multi_tensor_adam";  // in errors

template <class Table_>
struct Kernel {
    using Table = Table_;
    void (*function)(Table);
    size_t shared_bytes;
    int tiles_per_chunk;
    bool scaled_masters;  // there may be some
    bool any_mix;
    Master master;  // the mix, where there is one
    Format exp_avg;
    Format exp_avg_sq;
    std::atomic<int> resident[kMaxDevices] = {};  // thread blocks that run at once, by device

    int resident_blocks(int device) {
        std::atomic<int>& known = resident[std::min(device, kMaxDevices - 1)];
        if (int blocks = known.load(std::memory_order_relaxed)) return blocks;
        int multiprocessors = 0, blocks = 0;
        check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kName, device);
        check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, kThreads, shared_bytes), kName,
                   device);
        known.store(std::max(1, multiprocessors * blocks), std::memory_order_relaxed);
        return known;
    }
    bool is_of_formats(Format m, Format v) const { return codec_format(m) == exp_avg && codec_format(v) == exp_avg_sq; }
    bool is_mix_of(const Shard& s) const {
        return s.master_kind == master && is_of_formats(s.exp_avg_format, s.exp_avg_sq_format);
    }
    bool walks_vectors(const Shard& s) const { return any_mix || is_mix_of(s); }
    // Whether the general walk can update a shard.
    bool knows(const Shard& s) const {
        if (is_scaled(s.master_kind) && !scaled_masters) return false;
        return any_mix || ((!is_scaled(s.exp_avg_format) || s.exp_avg_format == exp_avg) &&
                           (!is_scaled(s.exp_avg_sq_format) || s.exp_avg_sq_format == exp_avg_sq));
    }
};

// Those of the mixes in which both moments have one format.
struct KernelsOfFormat {
    std::array<Kernel<BasicTable>, kCount<Master>> plain;
    std::array<Kernel<WeightsTable>, 2> with_weights;  // of masters that quantized weights may have
};

// Defined in one_mix.cu, for the formats that setup.py compiles it for.
template <Format format>
KernelsOfFormat& kernels_of();

template <Format... formats>
std::array<KernelsOfFormat*, sizeof...(formats)> kernels_of_formats() {
    return {&kernels_of<formats>()...};
}

// FP32 stands for all formats without scales.
inline auto own_kernels() {
    return kernels_of_formats<Format::kFloat32, Format::kFloat16, Format::kFloat8, Format::kInt8>();
}

Kernel<BasicTable>& kernel_of_any_mix();

}  // namespace fused_optim
