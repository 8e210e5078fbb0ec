// The launch: steps that consist of one combination of formats run a kernel made for it, others one kernel per
// combination, and a kernel of any combination for what is left.
#include <algorithm>
#include <iterator>
#include <map>
#include <stdexcept>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/table_builder.cuh"
#include "launch.h"
#include "rules.h"

namespace fused_optim {
namespace {

constexpr int kHypersPerLaunch = 128;

template <Rule rule>
struct HyperTable {
    Hyper groups[kHypersPerLaunch];
    uint32_t count;
    Scalars<rule>* scalars;
};
static_assert(sizeof(HyperTable<Rule{}>) <= kParameterLimit, "the table must fit into the kernel's parameters");

// Where hyperparameters lie in device memory: derives what multi_tensor_update reads and counts the step.
template <Rule rule>
__global__ void multi_tensor_update_scalars(const __grid_constant__ HyperTable<rule> table) {
    if (threadIdx.x >= table.count) return;
    const Hyper& hyper = table.groups[threadIdx.x];
    const Scalars<rule> scalars = derive<rule>(hyper);
    table.scalars[threadIdx.x] = scalars;
    if (hyper.step_pointer && !scalars.skipped) *hyper.step_pointer += 1;
}

using Shards = std::vector<Shard>;

// Whether a kernel was made for the combination of nearly all of `total` elements and knows the rest.
template <class Table>
bool serves(const Kernel<Table>& kernel, const Shards& shards, uint64_t total) {
    uint64_t others = 0;
    for (const Shard& s : shards) {
        if (kernel.is_combination_of(s)) continue;
        others += s.numel;
        if (!kernel.knows(s) || others > total / 64) return false;
    }
    return true;
}

// The kernel of one combination that serves them all, if there is one. `candidates`: a member of KernelsOfFormat.
template <Rule rule, class Candidates>
auto* kernel_of_all(Candidates KernelsOfFormat<rule>::* candidates, const Shards& shards) {
    uint64_t total = 0;
    for (const Shard& s : shards) total += s.numel;
    for (const auto* of_format : own_kernels<rule>()) {
        for (auto* kernel : of_format->*candidates) {
            if (serves(*kernel, shards, total)) return kernel;
        }
    }
    return static_cast<typename Candidates::value_type>(nullptr);
}

// The kernel of a shard's combination; of combinations that have none, the one for all of them.
template <Rule rule>
Kernel<BasicTable<rule>>& kernel_of(const Shard& shard) {
    for (const auto* of_format : own_kernels<rule>()) {
        for (auto* kernel : of_format->plain) {
            if (kernel->is_combination_of(shard)) return *kernel;
        }
    }
    return kernel_of_any_combination<rule>();
}

bool reads_device(const Hyper& h) {
    return h.lr_pointer || h.grad_scale || h.grad_factor || h.found_inf || h.step_pointer;
}

// Writes the scalars of all groups to device memory.
template <Rule rule>
void launch_scalars(const std::vector<Hyper>& groups, Scalars<rule>* scalars, int device, cudaStream_t stream) {
    for (size_t first = 0; first < groups.size(); first += kHypersPerLaunch) {
        HyperTable<rule> table{};
        table.count = static_cast<uint32_t>(std::min<size_t>(groups.size() - first, kHypersPerLaunch));
        std::copy_n(groups.begin() + static_cast<int64_t>(first), table.count, table.groups);
        table.scalars = scalars + first;
        multi_tensor_update_scalars<rule><<<1, kHypersPerLaunch, 0, stream>>>(table);
        check_cuda(cudaGetLastError(), "multi_tensor_update_scalars", device);
    }
}

// Launches over some of a step's shards.
template <Rule rule>
struct Launcher {
    const std::vector<Hyper>& groups;
    const Scalars<rule>* device_scalars;  // null: they are derived here
    int device;
    cudaStream_t stream;

    template <class Table>
    void operator()(Kernel<Table>& kernel, const Shards& shards) const {
        TableBuilder<Kernel<Table>> builder(kernel);
        size_t first_group = 0;
        auto flush = [&](size_t next_group) {
            const Table& table = builder.finish(device, device_scalars ? device_scalars + first_group : nullptr);
            if (uint32_t chunks = table.first_chunk[table.shard_count]) {
                kernel.function<<<chunks, kThreads, kernel.shared_bytes, stream>>>(table);
                check_cuda(cudaGetLastError(), kName, device);
            }
            builder.reset();
            first_group = next_group;
        };
        size_t next = 0;
        for (size_t g = 0; g < groups.size(); ++g) {
            const Scalars<rule> scalars = device_scalars ? Scalars<rule>{} : derive<rule>(groups[g]);
            if (!builder.add_group(scalars)) {
                flush(g);
                builder.add_group(scalars);
            }
            for (; next < shards.size() && shards[next].group == g; ++next) {
                if (builder.add_shard(shards[next])) continue;
                flush(g);
                builder.add_group(scalars);
                builder.add_shard(shards[next]);
            }
        }
        flush(groups.size());
    }
};

bool is_quantized(const Shard& s) { return s.quantized; }

// One launch if one kernel serves all, else one per combination: each at the speed of its own kernel.
template <Rule rule>
void launch_plain(const Launcher<rule>& launch, const Shards& shards) {
    if (auto* kernel = kernel_of_all(&KernelsOfFormat<rule>::plain, shards)) return launch(*kernel, shards);
    std::map<Kernel<BasicTable<rule>>*, Shards> by_kernel;
    for (const Shard& shard : shards) by_kernel[&kernel_of<rule>(shard)].push_back(shard);
    for (const auto& [kernel, own] : by_kernel) launch(*kernel, own);
}

// The same of shards of which some have quantized weights, whose kernels are others.
template <Rule rule>
void launch_with_weights(const Launcher<rule>& launch, const Shards& shards) {
    if (auto* kernel = kernel_of_all(&KernelsOfFormat<rule>::with_weights, shards)) return launch(*kernel, shards);
    for (const auto* of_format : own_kernels<rule>()) {
        for (auto* kernel : of_format->with_weights) {
            Shards own;
            std::copy_if(shards.begin(), shards.end(), std::back_inserter(own),
                         [&](const Shard& s) { return s.quantized && kernel->is_combination_of(s); });
            if (!own.empty()) launch(*kernel, own);
        }
    }
    Shards others;
    std::remove_copy_if(shards.begin(), shards.end(), std::back_inserter(others), is_quantized);
    if (!others.empty()) launch_plain(launch, others);
}

template <Rule rule>
void launch_rule(const Step& step, int device, cudaStream_t stream, uint64_t workspace) {
    const bool on_device = std::any_of(step.groups.begin(), step.groups.end(), reads_device);
    auto* const device_scalars = on_device ? reinterpret_cast<Scalars<rule>*>(workspace) : nullptr;
    if (on_device) {
        if (workspace == 0) throw std::invalid_argument("fused_optim: hyperparameters on the device need a workspace");
        launch_scalars(step.groups, device_scalars, device, stream);
    }
    const Launcher<rule> launch{step.groups, device_scalars, device, stream};
    const bool has_weights = std::any_of(step.shards.begin(), step.shards.end(), is_quantized);
    has_weights ? launch_with_weights(launch, step.shards) : launch_plain(launch, step.shards);
}

template <Rule rule>
void load_kernels_of_rule(int device) {
    load_kernel(multi_tensor_update_scalars<rule>, kName, device);
    for (const auto* of_format : own_kernels<rule>()) {
        for (const auto* kernel : of_format->plain) load_kernel(kernel->function, kName, device);
        for (const auto* kernel : of_format->with_weights) load_kernel(kernel->function, kName, device);
    }
    load_kernel(kernel_of_any_combination<rule>().function, kName, device);
}

}  // namespace

void load_update_kernels(Rule rule, int device) {
    CudaDeviceGuard guard(kName, device);
    dispatch_rule(rule, [&](auto known) { load_kernels_of_rule<decltype(known)::value>(device); });
}

size_t workspace_bytes(const Step& step) {
    return dispatch_rule(step.rule,
                         [&](auto rule) { return step.groups.size() * sizeof(Scalars<decltype(rule)::value>); });
}

bool writes_weights_cuda(Rule rule, const State* states) {
    return dispatch_rule(rule, [&](auto known) {
        const auto& of_formats = own_kernels<decltype(known)::value>();
        return std::any_of(of_formats.begin(), of_formats.end(), [&](const auto* of_format) {
            const auto& kernels = of_format->with_weights;
            return !kernels.empty() && kernels.front()->is_of_format(states);
        });
    });
}

void launch_cuda(const Step& step, int device, uint64_t stream, uint64_t workspace) {
    CudaDeviceGuard guard(kName, device);
    dispatch_rule(step.rule, [&](auto rule) {
        launch_rule<decltype(rule)::value>(step, device, reinterpret_cast<cudaStream_t>(stream), workspace);
    });
}

}  // namespace fused_optim
