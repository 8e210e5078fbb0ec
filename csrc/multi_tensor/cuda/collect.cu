// Changed bits as indices and values. A thread block takes a unit, a warp 128 words of it, of which each lane holds
// four. A warp first lists its elements in shared memory, so that it then reads values many at a time, and writes
// neighbours.
#include "collect.h"
#include "cuda/device.h"
#include "cuda/units.cuh"
#include "cuda/warp.cuh"

namespace fused_optim {
namespace {

constexpr uint32_t kCollectThreads = 256;
constexpr uint32_t kCollectWarps = kCollectThreads / kWarp;
constexpr uint32_t kWordsPerLane = kUnitWords / kCollectThreads;
constexpr uint32_t kRoundBits = kWarp * kBitsOfWord;  // of a word of each lane
constexpr uint32_t kWarpBits = kWordsPerLane * kRoundBits;
constexpr uint32_t kListed = 2 * kRoundBits;  // elements that a warp lists before it writes them
constexpr uint32_t kFew = kRoundBits / 4;     // set bits of a round, below which lanes list by themselves
constexpr uint32_t kInFlight = 4;             // values that a lane reads at once
constexpr uint32_t kCollectBlocks = 5;        // of a multiprocessor at least
constexpr uint32_t kSumThreads = 1024;
constexpr uint32_t kSumWarps = kSumThreads / kWarp;

struct CollectArguments {
    Table<Marked, 480> table;
    int64_t* places;
    int64_t* totals;  // of the table's tensors
};
static_assert(sizeof(CollectArguments) <= kParameterLimit, "the table must fit into the kernel's parameters");

// The words of this thread: every 32nd of its warp's.
struct Words {
    uint32_t words[kWordsPerLane];

    __device__ __forceinline__ Words(const Marked& tensor, uint64_t first_of_warp) {
#pragma unroll
        for (uint32_t k = 0; k < kWordsPerLane; ++k) {
            words[k] = tensor.word(first_of_warp + k * kWarp + threadIdx.x % kWarp);
        }
    }
    __device__ __forceinline__ uint32_t count() const {
        uint32_t sum = 0;
#pragma unroll
        for (uint32_t k = 0; k < kWordsPerLane; ++k) sum += __popc(words[k]);
        return sum;
    }
};

// The first element of this thread's warp in a unit.
__device__ __forceinline__ uint64_t first_of_warp(uint32_t unit) {
    return uint64_t{unit} * kUnitBits + threadIdx.x / kWarp * kWarpBits;
}

template <class T>
__device__ __forceinline__ T sum_before(T value) {  // of the lanes before
    T sum = value;
#pragma unroll
    for (uint32_t step = 1; step < kWarp; step *= 2) {
        const T other = __shfl_up_sync(kAllLanes, sum, step);
        if (threadIdx.x % kWarp >= step) sum += other;
    }
    return sum - value;
}

// How many bits are set in each warp's words. Every thread calls it, once.
__device__ __forceinline__ const uint32_t* counts_of_warps(uint32_t own) {
    __shared__ uint32_t counts[kCollectWarps];
    const uint32_t of_warp = __reduce_add_sync(kAllLanes, own);
    if (threadIdx.x % kWarp == 0) counts[threadIdx.x / kWarp] = of_warp;
    __syncthreads();
    return counts;
}

__global__ void __launch_bounds__(kCollectThreads) count_bits(const __grid_constant__ CollectArguments arguments) {
    const auto at = arguments.table.find(blockIdx.x);
    const Marked& tensor = arguments.table.entries[at.entry];
    const Words own(tensor, first_of_warp(at.unit) / kBitsOfWord);
    const uint32_t* const counts = counts_of_warps(own.count());
    if (threadIdx.x != 0) return;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < kCollectWarps; ++i) sum += counts[i];
    arguments.places[tensor.first_unit + at.unit] = sum;
}

// Of a tensor's units, a thread block's: counts become sums of those before.
__global__ void __launch_bounds__(kSumThreads) sum_counts(const __grid_constant__ CollectArguments arguments) {
    __shared__ uint32_t sums[kSumWarps];
    const Marked& tensor = arguments.table.entries[blockIdx.x];
    int64_t* const places = arguments.places + tensor.first_unit;
    int64_t total = 0;
    for (uint64_t first = 0; first < tensor.units(); first += kSumThreads) {
        const uint64_t unit = first + threadIdx.x;
        const uint32_t own = unit < tensor.units() ? static_cast<uint32_t>(places[unit]) : 0u;
        const uint32_t in_warp = sum_before(own);
        if (threadIdx.x % kWarp == kWarp - 1) sums[threadIdx.x / kWarp] = in_warp + own;
        __syncthreads();
        const uint32_t of_lane = sums[threadIdx.x % kWarp];
        const uint32_t of_warps = sum_before(of_lane);
        const uint32_t before = __shfl_sync(kAllLanes, of_warps, threadIdx.x / kWarp) + in_warp;
        if (unit < tensor.units()) places[unit] = total + before;
        total += __shfl_sync(kAllLanes, of_warps + of_lane, kWarp - 1);
        __syncthreads();
    }
    if (threadIdx.x == 0) arguments.totals[blockIdx.x] = total;
}

// A lane's own word; `place`: of its first bit in the list, `first`: its first element.
__device__ __forceinline__ void list_own(uint16_t* list, uint32_t place, uint32_t first, uint32_t word) {
    for (; word; word &= word - 1) list[place++] = static_cast<uint16_t>(first + __ffs(word) - 1);
}

// The words of all lanes, one after the other. `first`: the first element of lane 0's.
__device__ __forceinline__ void list_all(uint16_t* list, uint32_t place, uint32_t first, uint32_t word) {
    const uint32_t lane = threadIdx.x % kWarp;
    for (uint32_t left = __ballot_sync(kAllLanes, word != 0); left; left &= left - 1) {
        const uint32_t k = __ffs(left) - 1;
        const uint32_t of_lane = __shfl_sync(kAllLanes, word, k);
        const uint32_t begin = __shfl_sync(kAllLanes, place, k);
        if (of_lane >> lane & 1u) {
            list[begin + __popc(of_lane & ((1u << lane) - 1))] = static_cast<uint16_t>(first + k * kBitsOfWord + lane);
        }
    }
}

// `count` elements of a warp, kInFlight of a lane at once. `element(i)`: which one the i-th is, counted from the warp's
// first; `place`: where it goes.
template <class Bits, bool indices, class Element>
__device__ __forceinline__ void write(const Marked& tensor, uint64_t first, uint64_t place, uint32_t count,
                                      const Element& element) {
    const Bits* const values = reinterpret_cast<const Bits*>(tensor.values) + first;
    Bits* const values_out = reinterpret_cast<Bits*>(tensor.values_out) + place;
    int64_t* const indices_out = reinterpret_cast<int64_t*>(tensor.indices_out) + place;
    for (uint32_t begin = threadIdx.x % kWarp; begin < count; begin += kInFlight * kWarp) {
        uint32_t elements[kInFlight];
        Bits taken[kInFlight];
#pragma unroll
        for (uint32_t k = 0; k < kInFlight; ++k) {
            const uint32_t i = begin + k * kWarp;
            elements[k] = i < count ? element(i) : 0u;
            if (i < count) taken[k] = values[elements[k]];
        }
#pragma unroll
        for (uint32_t k = 0; k < kInFlight; ++k) {
            const uint32_t i = begin + k * kWarp;
            if (i < count) values_out[i] = taken[k];
            if (indices && i < count) indices_out[i] = static_cast<int64_t>(tensor.first + first + elements[k]);
        }
    }
}

// All elements of a warp.
struct CopyWarp {
    const Marked& tensor;
    uint64_t first;

    template <class Bits>
    __device__ __forceinline__ void operator()(Bits) const {
        if (first >= tensor.numel) return;
        const uint32_t count = static_cast<uint32_t>(min(uint64_t{kWarpBits}, tensor.numel - first));
        write<Bits, false>(tensor, first, first, count, [](uint32_t i) { return i; });
    }
};

// The marked ones. `place`: of the warp's first.
struct CollectWarp {
    const Marked& tensor;
    const Words& own;
    uint16_t* list;  // of the warp
    uint64_t first;
    uint64_t place;

    template <class Bits>
    __device__ __forceinline__ void operator()(Bits) const {
        const auto listed = [&](uint32_t i) -> uint32_t { return list[i]; };
        const uint32_t first_word = threadIdx.x % kWarp * kBitsOfWord;
        uint64_t begin = place;
        uint32_t filled = 0;
        const auto flush = [&] {
            __syncwarp();
            write<Bits, true>(tensor, first, begin, filled, listed);
            __syncwarp();
            begin += filled;
            filled = 0;
        };
#pragma unroll
        for (uint32_t k = 0; k < kWordsPerLane; ++k) {
            const uint32_t word = own.words[k], count = __popc(word);
            const uint32_t in_round = __reduce_add_sync(kAllLanes, count);
            if (filled + in_round > kListed) flush();
            const uint32_t at = filled + sum_before(count);
            if (in_round < kFew) {
                list_own(list, at, k * kRoundBits + first_word, word);
            } else {
                list_all(list, at, k * kRoundBits, word);
            }
            filled += in_round;
        }
        flush();
    }
};

__global__ void __launch_bounds__(kCollectThreads, kCollectBlocks)
    collect_bits(const __grid_constant__ CollectArguments arguments) {
    __shared__ uint16_t lists[kCollectWarps][kListed];
    const auto at = arguments.table.find(blockIdx.x);
    const Marked& tensor = arguments.table.entries[at.entry];
    const uint64_t first = first_of_warp(at.unit);
    if (!tensor.indices_out) return dispatch_bytes(tensor.bytes, CopyWarp{tensor, first});
    const Words own(tensor, first / kBitsOfWord);
    const uint32_t* const counts = counts_of_warps(own.count());
    const uint32_t warp = threadIdx.x / kWarp;
    if (counts[warp] == 0) return;
    uint64_t place = static_cast<uint64_t>(arguments.places[tensor.first_unit + at.unit]);
    for (uint32_t i = 0; i < warp; ++i) place += counts[i];
    dispatch_bytes(tensor.bytes, CollectWarp{tensor, own, lists[warp], first, place});
}

}  // namespace

std::vector<int64_t> count_cuda(const std::vector<Marked>& tensors, int64_t* places, int device, uint64_t stream) {
    constexpr const char* kernel = "count_bits";
    CudaDeviceGuard guard(kernel, device);
    const auto on = reinterpret_cast<cudaStream_t>(stream);
    CollectArguments arguments{};
    arguments.places = places;
    const auto units = [](const Marked& tensor) { return tensor.units(); };
    for_each_table(arguments.table, tensors, units, [&](size_t, uint32_t grid) {
        count_bits<<<grid, kCollectThreads, 0, on>>>(arguments);
        check_cuda(cudaGetLastError(), kernel, device);
    });
    int64_t* const totals = places + (tensors.empty() ? 0 : tensors.back().first_unit + tensors.back().units());
    const auto one = [](const Marked&) { return uint64_t{1}; };
    for_each_table(arguments.table, tensors, one, [&](size_t first, uint32_t grid) {
        arguments.totals = totals + first;
        sum_counts<<<grid, kSumThreads, 0, on>>>(arguments);
        check_cuda(cudaGetLastError(), "sum_counts", device);
    });
    std::vector<int64_t> found(tensors.size());
    check_cuda(cudaMemcpyAsync(found.data(), totals, found.size() * sizeof(int64_t), cudaMemcpyDeviceToHost, on),
               kernel, device);
    check_cuda(cudaStreamSynchronize(on), kernel, device);
    return found;
}

void collect_cuda(const std::vector<Marked>& tensors, const int64_t* places, int device, uint64_t stream) {
    constexpr const char* kernel = "collect_bits";
    CudaDeviceGuard guard(kernel, device);
    CollectArguments arguments{};
    arguments.places = const_cast<int64_t*>(places);  // this kernel only reads them
    const auto units = [](const Marked& tensor) { return tensor.units(); };
    for_each_table(arguments.table, tensors, units, [&](size_t, uint32_t grid) {
        collect_bits<<<grid, kCollectThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
        check_cuda(cudaGetLastError(), kernel, device);
    });
}

}  // namespace fused_optim
