// Changed bits as indices and values. A thread block takes a unit, a warp 128 words of it, of which each lane holds
// four: word by word all lanes take an element each, or, where few bits are set, each lane those of its own words.
#include "collect.h"
#include "cuda/device.h"
#include "cuda/units.cuh"
#include "cuda/warp.cuh"

namespace fused_optim {
namespace {

constexpr uint32_t kCollectThreads = 256;
constexpr uint32_t kCollectWarps = kCollectThreads / kWarp;
constexpr uint32_t kWordsPerLane = kUnitWords / kCollectThreads;
constexpr uint32_t kFew = 2 * kWarp;  // bits of a round, below which lanes go by themselves

struct CollectArguments {
    Table<Marked, 416> table;
    const int64_t* ends;
    int64_t* counts;
};
static_assert(sizeof(CollectArguments) <= kParameterLimit, "the table must fit into the kernel's parameters");

// The words of this thread: every 32nd of its warp's.
struct Words {
    uint64_t first;
    uint32_t words[kWordsPerLane];

    __device__ __forceinline__ Words(const Marked& tensor, uint32_t unit) {
        const uint32_t of_warp = threadIdx.x / kWarp * (kWarp * kWordsPerLane);
        first = uint64_t{unit} * kUnitWords + of_warp + threadIdx.x % kWarp;
#pragma unroll
        for (uint32_t k = 0; k < kWordsPerLane; ++k) words[k] = tensor.word(first + k * kWarp);
    }
    __device__ __forceinline__ uint32_t count() const {
        uint32_t sum = 0;
#pragma unroll
        for (uint32_t k = 0; k < kWordsPerLane; ++k) sum += __popc(words[k]);
        return sum;
    }
};

__device__ __forceinline__ uint32_t sum_before(uint32_t value) {  // of the lanes before
    uint32_t sum = value;
#pragma unroll
    for (uint32_t step = 1; step < kWarp; step *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
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
    const uint32_t* const counts = counts_of_warps(Words(tensor, at.unit).count());
    if (threadIdx.x != 0) return;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < kCollectWarps; ++i) sum += counts[i];
    arguments.counts[tensor.first_unit + at.unit] = sum;
}

// A lane's own word.
template <class Bits>
__device__ __forceinline__ void put_own(const Marked& tensor, uint64_t place, uint64_t first, uint32_t word) {
    for (; word; word &= word - 1) tensor.put<Bits>(place++, first + __ffs(word) - 1);
}

// The words of all lanes. `place`: of the lane's first one, `first`: the first element of lane 0's word.
template <class Bits>
__device__ __forceinline__ void put_all(const Marked& tensor, uint64_t place, uint64_t first, uint32_t word) {
    const uint32_t lane = threadIdx.x % kWarp;
    for (uint32_t left = __ballot_sync(kAllLanes, word != 0); left; left &= left - 1) {
        const uint32_t k = __ffs(left) - 1;
        const uint32_t of_lane = __shfl_sync(kAllLanes, word, k);
        const uint64_t begin = __shfl_sync(kAllLanes, place, k);
        if (of_lane >> lane & 1u) {
            const uint32_t before = __popc(of_lane & ((1u << lane) - 1));
            tensor.put<Bits>(begin + before, first + uint64_t{k} * kBitsOfWord + lane);
        }
    }
}

struct Collect {
    const Marked& tensor;
    const Words& own;
    uint64_t place;  // of the warp's first one

    template <class Bits>
    __device__ __forceinline__ void operator()(Bits) const {
        uint64_t begin = place;
#pragma unroll
        for (uint32_t k = 0; k < kWordsPerLane; ++k) {
            const uint32_t word = own.words[k], count = __popc(word);
            const uint32_t in_round = __reduce_add_sync(kAllLanes, count);
            if (in_round == 0) continue;
            const uint64_t at = begin + sum_before(count);
            const uint64_t first = (own.first + k * kWarp) * kBitsOfWord;
            if (in_round < kFew) {
                put_own<Bits>(tensor, at, first, word);
            } else {
                put_all<Bits>(tensor, at, first - threadIdx.x % kWarp * kBitsOfWord, word);
            }
            begin += in_round;
        }
    }
};

__global__ void __launch_bounds__(kCollectThreads) collect_bits(const __grid_constant__ CollectArguments arguments) {
    const auto at = arguments.table.find(blockIdx.x);
    const Marked& tensor = arguments.table.entries[at.entry];
    if (arguments.counts[tensor.first_unit + at.unit] == 0) return;
    const Words own(tensor, at.unit);
    const uint32_t* const counts = counts_of_warps(own.count());
    uint64_t place = tensor.place(at.unit, arguments.counts, arguments.ends);
    for (uint32_t i = 0; i < threadIdx.x / kWarp; ++i) place += counts[i];
    dispatch_bytes(tensor.bytes, Collect{tensor, own, place});
}

template <class Kernel>
void launch(Kernel kernel, const char* name, CollectArguments& arguments, const std::vector<Marked>& tensors,
            int device, uint64_t stream) {
    CudaDeviceGuard guard(name, device);
    const auto units = [](const Marked& tensor) { return tensor.units(); };
    for_each_table(arguments.table, tensors, units, [&](size_t, uint32_t grid) {
        kernel<<<grid, kCollectThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments);
        check_cuda(cudaGetLastError(), name, device);
    });
}

}  // namespace

void count_cuda(const std::vector<Marked>& tensors, int64_t* counts, int device, uint64_t stream) {
    CollectArguments arguments{};
    arguments.counts = counts;
    launch(count_bits, "count_bits", arguments, tensors, device, stream);
}

void collect_cuda(const std::vector<Marked>& tensors, const int64_t* counts, const int64_t* ends, int device,
                  uint64_t stream) {
    CollectArguments arguments{};
    arguments.counts = const_cast<int64_t*>(counts);  // this kernel only reads them
    arguments.ends = ends;
    launch(collect_bits, "collect_bits", arguments, tensors, device, stream);
}

}  // namespace fused_optim
