// The CUDA engine's gradient norm and scaling: one launch over all gradients, whose table travels as a kernel
// parameter. Chunks are assigned to thread blocks by number alone, and every sum has a fixed order: the same table
// gives the same bits each time.
#include <algorithm>

#include "cuda/device.h"
#include "cuda/warp.cuh"
#include "norm.h"

namespace fused_optim {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kLoads = 4;           // of 16 bytes, that a thread has in flight
constexpr int kSmallestChunk = 12;  // log2 of elements
constexpr int kLargestChunk = 16;   // log2 of elements
constexpr int kChunksPerBlock = 8;  // wanted at least, to balance the load
constexpr int kMaxGradients = 2032;

struct Chunks {
    Gradient gradients[kMaxGradients];
    uint32_t count;
    uint32_t chunk_log2;  // elements
};

struct NormArguments {
    Chunks chunks;
    NormRequest request;
    double* partials;    // [group][thread block]
    uint32_t* arrivals;  // 0 between launches
    bool accumulate;     // onto the sums of the launch before
};

struct ScaleArguments {
    Chunks chunks;
    const float* factor;
};
static_assert(sizeof(NormArguments) <= kParameterLimit && sizeof(ScaleArguments) <= kParameterLimit,
              "the table must fit into the kernel's parameters");

// Calls visit(gradient, begin, end) for this thread block's chunks.
template <class Visit>
__device__ __forceinline__ void for_each_part(const Chunks& chunks, const Visit& visit) {
    const uint64_t size = uint64_t{1} << chunks.chunk_log2;
    uint64_t chunk = blockIdx.x;
    uint64_t first = 0;  // the gradient's first chunk
    for (uint32_t i = 0; i < chunks.count; ++i) {
        const uint64_t numel = chunks.gradients[i].numel();
        const uint64_t next = first + ((numel + size - 1) >> chunks.chunk_log2);
        for (; chunk < next; chunk += gridDim.x) {
            const uint64_t begin = (chunk - first) << chunks.chunk_log2;
            visit(chunks.gradients[i], begin, min(begin + size, numel));
        }
        first = next;
    }
}

// A range of a gradient: whole vectors of 16 aligned bytes, and the elements before and after them.
template <class Codec>
struct Range {
    using Bits = typename Codec::Bits;
    static constexpr uint32_t kPerVector = 16 / sizeof(Bits);
    Bits* values;
    uint32_t count;
    uint32_t head;
    uint32_t vectors;

    __device__ __forceinline__ Range(const Gradient& gradient, uint64_t begin, uint64_t end)
        : values(reinterpret_cast<Bits*>(gradient.address) + begin), count(static_cast<uint32_t>(end - begin)) {
        const uint32_t beyond = static_cast<uint32_t>(reinterpret_cast<uint64_t>(values)) & 15u;
        head = min(count, (16u - beyond) % 16u / static_cast<uint32_t>(sizeof(Bits)));
        vectors = (count - head) / kPerVector;
    }
    __device__ __forceinline__ uint4* vector(uint32_t i) const { return reinterpret_cast<uint4*>(values + head) + i; }

    // Calls visit(element) for this thread's elements outside of the vectors: at most one at either end.
    template <class Visit>
    __device__ __forceinline__ void visit_ends(const Visit& visit) const {
        if (threadIdx.x < head) visit(values[threadIdx.x]);
        const uint32_t last = head + vectors * kPerVector + threadIdx.x;
        if (last < count) visit(values[last]);
    }
};

template <class Codec>
__device__ __forceinline__ float get(const uint4& raw, int i) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    if constexpr (sizeof(typename Codec::Bits) == 4) {
        return Codec::decode(words[i]);
    } else {
        return Codec::decode(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))));
    }
}

template <class Codec>
__device__ __forceinline__ uint4 scaled(const uint4& raw, float factor) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if constexpr (sizeof(typename Codec::Bits) == 4) {
            words[k] = Codec::encode(get<Codec>(raw, k) * factor);
        } else {
            const uint32_t low = Codec::encode(get<Codec>(raw, 2 * k) * factor);
            const uint32_t high = Codec::encode(get<Codec>(raw, 2 * k + 1) * factor);
            words[k] = low | high << 16;
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Accumulator, class Codec>
__device__ __forceinline__ void add(Accumulator& sum, const uint4& raw) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(Range<Codec>::kPerVector); ++i) sum.add(get<Codec>(raw, i));
}

template <class Accumulator, class Codec>
__device__ __forceinline__ void add(Accumulator& sum, const Range<Codec>& range) {
    uint32_t i = threadIdx.x;
    for (; i + (kLoads - 1) * kThreads < range.vectors; i += kLoads * kThreads) {
        uint4 raw[kLoads];
#pragma unroll
        for (int k = 0; k < kLoads; ++k) raw[k] = __ldg(range.vector(i + k * kThreads));
#pragma unroll
        for (int k = 0; k < kLoads; ++k) add<Accumulator, Codec>(sum, raw[k]);
    }
    for (; i < range.vectors; i += kThreads) add<Accumulator, Codec>(sum, __ldg(range.vector(i)));
    range.visit_ends([&](const typename Codec::Bits& bits) { sum.add(Codec::decode(bits)); });
}

template <class Codec>
__device__ __forceinline__ void scale(const Range<Codec>& range, float factor) {
    uint32_t i = threadIdx.x;
    for (; i + (kLoads - 1) * kThreads < range.vectors; i += kLoads * kThreads) {
        uint4 raw[kLoads];
#pragma unroll
        for (int k = 0; k < kLoads; ++k) raw[k] = *range.vector(i + k * kThreads);
#pragma unroll
        for (int k = 0; k < kLoads; ++k) *range.vector(i + k * kThreads) = scaled<Codec>(raw[k], factor);
    }
    for (; i < range.vectors; i += kThreads) *range.vector(i) = scaled<Codec>(*range.vector(i), factor);
    range.visit_ends([&](typename Codec::Bits& bits) { bits = Codec::encode(Codec::decode(bits) * factor); });
}

// The visitors are structs because device lambdas need a compiler flag where they are generic.
template <class Accumulator>
struct AddChunk {
    Accumulator& sum;
    const Gradient& gradient;
    uint64_t begin;
    uint64_t end;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        add(sum, Range<Codec>(gradient, begin, end));
    }
};

struct ScaleChunk {
    float factor;
    const Gradient& gradient;
    uint64_t begin;
    uint64_t end;

    template <class Codec>
    __device__ __forceinline__ void operator()(Codec) const {
        scale(Range<Codec>(gradient, begin, end), factor);
    }
};

// The thread block's values combined, on thread 0. Every thread calls it.
template <class Accumulator>
__device__ double combine_block(double value) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ double warps[kWarps];
    value = combine_lanes<kWarp>(value, Accumulator::combine);
    __syncthreads();  // the values of the call before have been read
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < kWarps; ++warp) value = Accumulator::combine(value, warps[warp]);
    }
    return value;
}

// Writes this thread block's partial sums, on thread 0. True on every thread of the block that comes last: it sees all.
__device__ bool publish(const NormArguments& arguments, const double* totals) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        for (uint32_t g = 0; g < arguments.request.group_count; ++g) {
            arguments.partials[g * gridDim.x + blockIdx.x] = totals[g];
        }
        __threadfence();
        last = atomicAdd(arguments.arrivals, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Combines the partial sums of all thread blocks.
template <class Accumulator>
__device__ void finish(const NormArguments& arguments) {
    const NormRequest& request = arguments.request;
    double total = 0.0;
    for (uint32_t g = 0; g < request.group_count; ++g) {
        double sum = 0.0;
        for (uint32_t block = threadIdx.x; block < gridDim.x; block += kThreads) {
            sum = Accumulator::combine(sum, __ldcg(arguments.partials + g * gridDim.x + block));
        }
        sum = combine_block<Accumulator>(sum);
        if (threadIdx.x == 0) {
            if (arguments.accumulate) sum = Accumulator::combine(request.sums[g], sum);
            request.sums[g] = sum;
            total = Accumulator::combine(total, sum);
        }
    }
    if (threadIdx.x == 0) {
        write_result<Accumulator>(request, total);
        *arguments.arrivals = 0;
    }
}

template <class Accumulator>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    gradient_norm(const __grid_constant__ NormArguments arguments) {
    __shared__ double totals[kMaxNormGroups];  // thread 0's
    if (threadIdx.x == 0) {
        for (int g = 0; g < kMaxNormGroups; ++g) totals[g] = 0.0;
    }
    Accumulator sum;
    uint32_t group = 0;
    auto close_group = [&]() {
        const double value = combine_block<Accumulator>(sum.result());
        if (threadIdx.x == 0) totals[group] = Accumulator::combine(totals[group], value);
        sum = Accumulator{};
    };
    for_each_part(arguments.chunks, [&](const Gradient& gradient, uint64_t begin, uint64_t end) {
        if (gradient.group() != group) {
            close_group();
            group = gradient.group();
        }
        dispatch_element(gradient.type(), AddChunk<Accumulator>{sum, gradient, begin, end});
    });
    close_group();
    if (publish(arguments, totals)) finish<Accumulator>(arguments);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    gradient_scale(const __grid_constant__ ScaleArguments arguments) {
    const float factor = *arguments.factor;
    if (factor == 1.0f) return;
    for_each_part(arguments.chunks, [&](const Gradient& gradient, uint64_t begin, uint64_t end) {
        dispatch_element(gradient.type(), ScaleChunk{factor, gradient, begin, end});
    });
}

// The fixed size of the grid.
uint32_t resident_blocks(const char* kernel, int device) {
    int multiprocessors = 0;
    check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kernel, device);
    return static_cast<uint32_t>(multiprocessors * kBlocksPerMultiprocessor);
}

// Takes the gradients from `first` on that fit, and returns the size of the grid: at least one thread block.
uint32_t fill(Chunks& chunks, const std::vector<Gradient>& gradients, size_t first, uint32_t resident) {
    chunks.count = static_cast<uint32_t>(std::min<size_t>(gradients.size() - first, kMaxGradients));
    std::copy_n(gradients.begin() + first, chunks.count, chunks.gradients);
    uint64_t elements = 0;
    for (uint32_t i = 0; i < chunks.count; ++i) elements += chunks.gradients[i].numel();
    chunks.chunk_log2 = kSmallestChunk;
    while (chunks.chunk_log2 < kLargestChunk &&
           elements >> chunks.chunk_log2 >= uint64_t{2} * resident * kChunksPerBlock) {
        ++chunks.chunk_log2;
    }
    uint64_t total = 0;
    const uint64_t size = uint64_t{1} << chunks.chunk_log2;
    for (uint32_t i = 0; i < chunks.count; ++i) total += (chunks.gradients[i].numel() + size - 1) >> chunks.chunk_log2;
    return static_cast<uint32_t>(std::min<uint64_t>(std::max<uint64_t>(total, 1), resident));
}

constexpr uint64_t kArrivalsBytes = 16;  // keeps the partial sums behind it aligned

}  // namespace

void load_norm_kernels(int device) {
    CudaDeviceGuard guard("gradient_norm", device);
    load_kernel(gradient_norm<SumOfSquares>, "gradient_norm", device);
    load_kernel(gradient_norm<LargestMagnitude>, "gradient_norm", device);
    load_kernel(gradient_scale, "gradient_scale", device);
}

uint64_t norm_workspace_bytes(int device) {
    return kArrivalsBytes + uint64_t{kMaxNormGroups} * resident_blocks("gradient_norm", device) * sizeof(double);
}

void norm_cuda(const std::vector<Gradient>& gradients, const NormRequest& request, int device, uint64_t stream,
               uint64_t workspace) {
    constexpr const char* kernel = "gradient_norm";
    CudaDeviceGuard guard(kernel, device);
    const uint32_t resident = resident_blocks(kernel, device);
    NormArguments arguments{};
    arguments.request = request;
    arguments.arrivals = reinterpret_cast<uint32_t*>(workspace);
    arguments.partials = reinterpret_cast<double*>(workspace + kArrivalsBytes);
    size_t first = 0;
    do {  // also without any gradient: the sums are to be written
        const uint32_t grid = fill(arguments.chunks, gradients, first, resident);
        arguments.accumulate = first > 0;
        auto* function = request.norm == Norm::kTwo ? gradient_norm<SumOfSquares> : gradient_norm<LargestMagnitude>;
        function<<<grid, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
        check_cuda(cudaGetLastError(), kernel, device);
        first += arguments.chunks.count;
    } while (first < gradients.size());
}

void scale_cuda(const std::vector<Gradient>& gradients, const float* factor, int device, uint64_t stream) {
    constexpr const char* kernel = "gradient_scale";
    CudaDeviceGuard guard(kernel, device);
    const uint32_t resident = resident_blocks(kernel, device);
    ScaleArguments arguments{};
    arguments.factor = factor;
    for (size_t first = 0; first < gradients.size(); first += arguments.chunks.count) {
        const uint32_t grid = fill(arguments.chunks, gradients, first, resident);
        gradient_scale<<<grid, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
        check_cuda(cudaGetLastError(), kernel, device);
    }
}

}  // namespace fused_optim
