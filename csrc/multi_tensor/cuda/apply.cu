// The CUDA engine: a kernel whose table of shards travels as its parameter, one thread block per chunk of a shard. Two
// walks share the element math:
//   * vector walk, one instance per mix of formats: a thread updates 8 consecutive elements at a time. It issues the
//     loads of all streams, then decodes, updates, finds the block's absmax by warp shuffles, encodes and stores.
//   * general walk: shard ends and shards whose addresses or offsets are not aligned, one element per thread.
// Steps that consist of one mix run a kernel made for it, others one that calls the walk of each shard's mix.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "adam.h"
#include "cuda/device.h"
#include "cuda/general_walk.cuh"
#include "cuda/table.cuh"
#include "cuda/vector_walk.cuh"
#include "dispatch.h"
#include "launch.h"
#include "quantize.h"

namespace fused_optim {
namespace {

constexpr int kMaxDevices = 64;

// A kernel for steps that consist of one mix, but for few elements: norms and biases, whose states are FP32.
template <class MixType>
struct OneMix {
    // Measured on an H200. Without scales nothing is gained by more than a tile; more warps hide the loads' latency.
    // FP8 beside a master that is no tensor of its own leaves registers for more warps, too.
    static constexpr bool light = MixType::M::format == Format::kFloat8 && MixType::master != Master::kFloat32 &&
                                  MixType::master != Master::kFloat16;
    static constexpr int kBlocksPerMultiprocessor = MixType::scaled && !light ? 6 : 7;
    static constexpr int kTilesPerChunk = MixType::scaled ? kMaxTilesPerChunk : 1;
    static constexpr bool kScaledMasters = is_scaled(MixType::master);
    using Table = std::conditional_t<MixType::has_weights, WeightsTable, BasicTable>;

    __device__ __forceinline__ static void vectors() { vector_walk<MixType>(); }
    __device__ __forceinline__ static void others() {
        general_walk<OwnCodecs<typename MixType::M, typename MixType::V>, MixType::has_weights, kScaledMasters>();
    }
};

template <class MixType>
__device__ __noinline__ void called_vector_walk() {
    vector_walk<MixType>();
}

// Pairs of moment formats that have a vector walk in the kernel for all mixes: those of one scaled format beside one
// that is not. Pairs of the same format have kernels of their own; others take the general walk.
FUSED_OPTIM_HD constexpr bool has_vector_walk(Format exp_avg, Format exp_avg_sq) {
    return is_scaled(exp_avg) != is_scaled(exp_avg_sq);
}

struct CallVectorWalk {
    template <class MixType>
    __device__ __forceinline__ void operator()(MixType) const {
        if constexpr (has_vector_walk(MixType::M::format, MixType::V::format)) called_vector_walk<MixType>();
    }
};

// The kernel for all other steps. Its walks are functions that are called: inlined, they would share their registers.
struct AnyMix {
    static constexpr int kBlocksPerMultiprocessor = 4;
    static constexpr int kTilesPerChunk = kMaxTilesPerChunk;
    static constexpr bool kScaledMasters = true;
    using Table = BasicTable;

    __device__ __forceinline__ static void vectors() {
        const View& view = block->view;
        dispatch(view.master_kind(), view.exp_avg_format(), view.exp_avg_sq_format(), CallVectorWalk{});
    }
    __device__ __forceinline__ static void others() { general_walk<AllCodecs, false, kScaledMasters>(); }
};

// One thread block per chunk: the hardware hands them out in order, which evens out that some multiprocessors reach
// memory faster than others, and keeps the addresses in use close together.
template <class Walks>
__global__ void __launch_bounds__(kThreads, Walks::kBlocksPerMultiprocessor)
    multi_tensor_adam(const __grid_constant__ typename Walks::Table table) {
    if (threadIdx.x == 0) block->prepare(table, blockIdx.x);
    __syncthreads();
    if (block->scalars.skipped) return;
    if (block->view.vector_count > 0) Walks::vectors();
    if (block->view.vector_count < block->view.count) Walks::others();
    if constexpr (kHasWeights<typename Walks::Table>) {
        if (!block->view.absmax) return;
        __syncthreads();
        if (threadIdx.x == 0) atomicMax(reinterpret_cast<uint32_t*>(block->view.absmax), block->weight_absmax);
    }
}

constexpr int kHypersPerLaunch = 128;

struct HyperTable {
    Hyper groups[kHypersPerLaunch];
    uint32_t count;
    Scalars* scalars;
};
static_assert(sizeof(HyperTable) <= kParameterLimit, "the table must fit into the kernel's parameters");

// Where hyperparameters lie in device memory: derives what multi_tensor_adam reads and counts the step.
__global__ void multi_tensor_adam_scalars(const __grid_constant__ HyperTable table) {
    if (threadIdx.x >= table.count) return;
    const Hyper& hyper = table.groups[threadIdx.x];
    const Scalars scalars = derive(hyper);
    table.scalars[threadIdx.x] = scalars;
    if (hyper.step_pointer && !scalars.skipped) *hyper.step_pointer += 1;
}

constexpr const char* kName = "multi_tensor_adam";  // in errors

template <class Table_>
struct Kernel {
    using Table = Table_;
    void (*function)(Table);
    int tiles_per_chunk;
    bool scaled_masters;  // there may be some
    bool any_mix;
    Master master;  // the mix, where there is one
    Format exp_avg;
    Format exp_avg_sq;
    std::atomic<int> resident[kMaxDevices] = {};  // thread blocks that run at once, by device

    size_t shared_bytes() const { return scaled_masters ? sizeof(Block) : offsetof(Block, master_scales); }

    int resident_blocks(int device) {
        std::atomic<int>& known = resident[std::min(device, kMaxDevices - 1)];
        if (int blocks = known.load(std::memory_order_relaxed)) return blocks;
        int multiprocessors = 0, blocks = 0;
        check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kName, device);
        check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, kThreads, shared_bytes()), kName,
                   device);
        known.store(std::max(1, multiprocessors * blocks), std::memory_order_relaxed);
        return known;
    }
    bool is_of_formats(Format m, Format v) const { return codec_format(m) == exp_avg && codec_format(v) == exp_avg_sq; }
    bool is_mix_of(const Shard& s) const {
        return s.master_kind == master && is_of_formats(s.exp_avg_format, s.exp_avg_sq_format);
    }
    bool walks_vectors(const Shard& s) const {
        return any_mix ? has_vector_walk(s.exp_avg_format, s.exp_avg_sq_format) : is_mix_of(s);
    }
    // Whether the general walk can update a shard.
    bool knows(const Shard& s) const {
        if (is_scaled(s.master_kind) && !scaled_masters) return false;
        return any_mix || ((!is_scaled(s.exp_avg_format) || s.exp_avg_format == exp_avg) &&
                           (!is_scaled(s.exp_avg_sq_format) || s.exp_avg_sq_format == exp_avg_sq));
    }
};

template <Master master, class M, class V, bool has_weights>
auto make_kernel() {
    using Walks = OneMix<Mix<master, M, V, has_weights>>;
    return Kernel<typename Walks::Table>{
        multi_tensor_adam<Walks>, Walks::kTilesPerChunk, Walks::kScaledMasters, false, master, M::format, V::format};
}

// Formats that both moments may have in a mix with kernels of its own; FP32 stands for all without scales.
template <Format... formats>
struct FormatList {
    static constexpr int count = sizeof...(formats);
};
using OwnKernels = FormatList<Format::kFloat32, Format::kFloat16, Format::kFloat8, Format::kInt8>;

template <class Table>
using KernelsOfMaster = std::array<Kernel<Table>, OwnKernels::count>;

template <Master master, class Table, Format... formats>
KernelsOfMaster<Table> make_kernels(FormatList<formats...>) {
    return {make_kernel<master, CodecOf<ExpAvg, formats>, CodecOf<ExpAvgSq, formats>, kHasWeights<Table>>()...};
}

template <int... masters>
std::array<KernelsOfMaster<BasicTable>, kCount<Master>> make_kernels(std::integer_sequence<int, masters...>) {
    return {make_kernels<static_cast<Master>(masters), BasicTable>(OwnKernels{})...};
}

struct Kernels {
    std::array<KernelsOfMaster<BasicTable>, kCount<Master>> of_one_mix =
        make_kernels(std::make_integer_sequence<int, kCount<Master>>{});
    Kernel<BasicTable> of_any_mix{multi_tensor_adam<AnyMix>, AnyMix::kTilesPerChunk, AnyMix::kScaledMasters, true};
    std::array<KernelsOfMaster<WeightsTable>, 2> with_weights = {
        make_kernels<Master::kFloat32, WeightsTable>(OwnKernels{}),
        make_kernels<Master::kFloat16, WeightsTable>(OwnKernels{})};
};

Kernels& kernels() {
    static Kernels all;
    return all;
}

using Shards = std::vector<Shard>;

// The kernel made for the mix of nearly all elements, if there is one and it knows the rest.
template <class Table>
Kernel<Table>* find_kernel(KernelsOfMaster<Table>& candidates, const Shards& shards) {
    uint64_t total = 0;
    for (const Shard& s : shards) total += s.numel;
    for (Kernel<Table>& kernel : candidates) {
        uint64_t others = 0;
        bool fits = true;
        for (const Shard& s : shards) {
            if (kernel.is_mix_of(s)) continue;
            others += s.numel;
            fits = fits && kernel.knows(s);
            if (!fits || others > total / 64) break;
        }
        if (fits && others <= total / 64) return &kernel;
    }
    return nullptr;
}

// The kernel of one mix that serves them all, if there is one.
Kernel<BasicTable>* kernel_of_all(const Shards& shards) {
    for (auto& of_one_master : kernels().of_one_mix) {
        if (Kernel<BasicTable>* kernel = find_kernel(of_one_master, shards)) return kernel;
    }
    return nullptr;
}

// The kernel of a shard's mix; of mixes that have none, the one for all of them.
Kernel<BasicTable>& kernel_of(const Shard& shard) {
    for (auto& of_one_master : kernels().of_one_mix) {
        for (auto& kernel : of_one_master) {
            if (kernel.is_mix_of(shard)) return kernel;
        }
    }
    return kernels().of_any_mix;
}

bool reads_device(const Hyper& h) {
    return h.lr_pointer || h.grad_scale || h.grad_factor || h.found_inf || h.step_pointer;
}

// Writes the scalars of all groups to device memory.
void launch_scalars(const std::vector<Hyper>& groups, Scalars* scalars, int device, cudaStream_t stream) {
    for (size_t first = 0; first < groups.size(); first += kHypersPerLaunch) {
        HyperTable table{};
        table.count = static_cast<uint32_t>(std::min<size_t>(groups.size() - first, kHypersPerLaunch));
        std::copy_n(groups.begin() + static_cast<int64_t>(first), table.count, table.groups);
        table.scalars = scalars + first;
        multi_tensor_adam_scalars<<<1, kHypersPerLaunch, 0, stream>>>(table);
        check_cuda(cudaGetLastError(), "multi_tensor_adam_scalars", device);
    }
}

}  // namespace

void load_adam_kernels(int device) {
    CudaDeviceGuard guard(kName, device);
    load_kernel(multi_tensor_adam_scalars, kName, device);
    for (const auto& of_one_master : kernels().of_one_mix) {
        for (const auto& kernel : of_one_master) load_kernel(kernel.function, kName, device);
    }
    load_kernel(kernels().of_any_mix.function, kName, device);
    for (const auto& of_one_master : kernels().with_weights) {
        for (const auto& kernel : of_one_master) load_kernel(kernel.function, kName, device);
    }
}

size_t workspace_bytes(const Step& step) { return step.groups.size() * sizeof(Scalars); }

bool writes_weights_cuda(Format exp_avg, Format exp_avg_sq) {
    const auto& candidates = kernels().with_weights.front();
    return std::any_of(candidates.begin(), candidates.end(),
                       [&](const auto& kernel) { return kernel.is_of_formats(exp_avg, exp_avg_sq); });
}

namespace {

// Launches over some of a step's shards.
struct Launcher {
    const std::vector<Hyper>& groups;
    const Scalars* device_scalars;  // null: they are derived here
    int device;
    cudaStream_t stream;

    template <class Table>
    void operator()(Kernel<Table>& kernel, const Shards& shards) const {
        TableBuilder<Kernel<Table>> builder(kernel);
        size_t first_group = 0;
        auto flush = [&](size_t next_group) {
            const Table& table = builder.finish(device, device_scalars ? device_scalars + first_group : nullptr);
            if (uint32_t chunks = table.first_chunk[table.shard_count]) {
                kernel.function<<<chunks, kThreads, kernel.shared_bytes(), stream>>>(table);
                check_cuda(cudaGetLastError(), kName, device);
            }
            builder.reset();
            first_group = next_group;
        };
        size_t next = 0;
        for (size_t g = 0; g < groups.size(); ++g) {
            const Scalars scalars = device_scalars ? Scalars{} : derive(groups[g]);
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

// One launch if one kernel serves all, else one per mix: each at the speed of its own kernel.
void launch_plain(const Launcher& launch, const Shards& shards) {
    if (auto* kernel = kernel_of_all(shards)) return launch(*kernel, shards);
    std::map<Kernel<BasicTable>*, Shards> by_kernel;
    for (const Shard& shard : shards) by_kernel[&kernel_of(shard)].push_back(shard);
    for (const auto& [kernel, own] : by_kernel) launch(*kernel, own);
}

// The same of shards of which some have quantized weights, whose kernels are others.
void launch_with_weights(const Launcher& launch, const Shards& shards) {
    for (auto& of_one_master : kernels().with_weights) {
        if (auto* kernel = find_kernel(of_one_master, shards)) return launch(*kernel, shards);
    }
    for (auto& of_one_master : kernels().with_weights) {
        for (auto& kernel : of_one_master) {
            Shards own;
            std::copy_if(shards.begin(), shards.end(), std::back_inserter(own),
                         [&](const Shard& s) { return s.quantized && kernel.is_mix_of(s); });
            if (!own.empty()) launch(kernel, own);
        }
    }
    Shards others;
    std::remove_copy_if(shards.begin(), shards.end(), std::back_inserter(others), is_quantized);
    if (!others.empty()) launch_plain(launch, others);
}

}  // namespace

void launch_cuda(const Step& step, int device, uint64_t stream_handle, uint64_t workspace) {
    CudaDeviceGuard guard(kName, device);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
    const bool on_device = std::any_of(step.groups.begin(), step.groups.end(), reads_device);
    Scalars* const device_scalars = on_device ? reinterpret_cast<Scalars*>(workspace) : nullptr;
    if (on_device && workspace == 0)
        throw std::invalid_argument("fused_optim: hyperparameters on the device need a workspace");
    if (on_device) launch_scalars(step.groups, device_scalars, device, stream);
    const Launcher launch{step.groups, device_scalars, device, stream};
    if (std::any_of(step.shards.begin(), step.shards.end(), is_quantized)) {
        launch_with_weights(launch, step.shards);
    } else {
        launch_plain(launch, step.shards);
    }
}

}  // namespace fused_optim
