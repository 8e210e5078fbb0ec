// The kernels of the update, as the launch sees them: made by one_combination.cu, compiled once per update rule and
// format of states, and by any_combination.cu, once per rule. So they compile side by side.
#pragma once

#include <algorithm>
#include <atomic>
#include <iterator>
#include <vector>

#include "cuda/device.h"
#include "cuda/table.cuh"
#include "dispatch.h"

namespace fused_optim {

constexpr int kMaxDevices = 64;
constexpr const char* kName = "multi_tensor_update";  // in errors

template <class Table_>
struct Kernel {
    using Table = Table_;
    void (*function)(Table);
    size_t shared_bytes;
    int tiles_per_chunk;
    bool scaled_masters;  // there may be some
    bool any_combination;
    Master master;  // the combination, where there is one
    Format format;
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
    bool is_of_format(const State* states) const {
        return std::all_of(states, states + state_count(Table::rule),
                           [this](const State& state) { return codec_format(state.format) == format; });
    }
    bool is_combination_of(const Shard& s) const { return s.master_kind == master && is_of_format(s.states); }
    bool has_vector_loop_for(const Shard& s) const { return any_combination || is_combination_of(s); }
    // Whether the general loop can update a shard.
    bool knows(const Shard& s) const {
        if (is_scaled(s.master_kind) && !scaled_masters) return false;
        return any_combination || std::all_of(std::begin(s.states), std::end(s.states), [this](const State& state) {
                   return !is_scaled(state.format) || state.format == format;
               });
    }
};

// Those of the combinations in which all states have one format.
template <Rule rule>
struct KernelsOfFormat {
    std::vector<Kernel<BasicTable<rule>>*> plain;
    std::vector<Kernel<WeightsTable<rule>>*> with_weights;  // of masters that quantized weights may have
};

// Defined in one_combination.cu, for the rules and formats that setup.py compiles it for.
template <Rule rule, Format format>
const KernelsOfFormat<rule>& kernels_of();

template <Rule rule, Format... formats>
std::vector<const KernelsOfFormat<rule>*> kernels_of_formats() {
    return {&kernels_of<rule, formats>()...};
}

// FP32 stands for all formats without scales.
template <Rule rule>
const std::vector<const KernelsOfFormat<rule>*>& own_kernels();
#define FUSED_OPTIM_OWN(enumerator, ...)                                                                  \
    template <>                                                                                           \
    inline const std::vector<const KernelsOfFormat<Rule::enumerator>*>& own_kernels<Rule::enumerator>() { \
        static const auto all = kernels_of_formats<Rule::enumerator, __VA_ARGS__>();                      \
        return all;                                                                                       \
    }
FUSED_OPTIM_OWN_KERNELS(FUSED_OPTIM_OWN)
#undef FUSED_OPTIM_OWN

// Defined in any_combination.cu.
template <Rule rule>
Kernel<BasicTable<rule>>& kernel_of_any_combination();

}  // namespace fused_optim
