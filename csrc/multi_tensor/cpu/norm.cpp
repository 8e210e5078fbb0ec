// The CPU engine's gradient norm and scaling.
#include "norm.h"

#include <algorithm>

#include "cpu/threads.h"

namespace fused_optim {
namespace {

constexpr uint64_t kChunk = 32768;        // elements; fixed, so that the sum does not depend on the threads
constexpr uint64_t kChunksPerThread = 4;  // below this a thread costs more than it saves
constexpr int kLanes = 16;                // independent sums, which the compiler keeps in vector registers

struct Chunk {
    const Gradient* gradient;
    uint64_t begin;
    uint64_t end;
};

std::vector<Chunk> cut(const std::vector<Gradient>& gradients) {
    std::vector<Chunk> chunks;
    for (const Gradient& gradient : gradients) {
        const uint64_t numel = gradient.numel();
        for (uint64_t begin = 0; begin < numel; begin += kChunk) {
            chunks.push_back({&gradient, begin, std::min(begin + kChunk, numel)});
        }
    }
    return chunks;
}

size_t useful_threads(size_t count, int threads) {
    return std::min<size_t>(std::max(threads, 1), count / kChunksPerThread);
}

template <class Accumulator, class Codec>
double accumulate(const typename Codec::Bits* values, uint64_t count) {
    Accumulator lanes[kLanes];
    uint64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane].add(Codec::decode(values[i + lane]));
    }
    for (int lane = 0; i < count; ++i, ++lane) lanes[lane].add(Codec::decode(values[i]));
    double total = lanes[0].result();
    for (int lane = 1; lane < kLanes; ++lane) total = Accumulator::combine(total, lanes[lane].result());
    return total;
}

template <class Bits>
Bits* address_of(const Chunk& chunk) {
    return reinterpret_cast<Bits*>(chunk.gradient->address) + chunk.begin;
}

template <class Accumulator>
void compute_norm(const std::vector<Gradient>& gradients, const NormRequest& request, int threads) {
    const std::vector<Chunk> chunks = cut(gradients);
    std::vector<double> partials(chunks.size());
    for_each_index(chunks.size(), useful_threads(chunks.size(), threads), [&](size_t i) {
        const Chunk& chunk = chunks[i];
        dispatch_element(chunk.gradient->type(), [&](auto codec) {
            using Codec = decltype(codec);
            const auto* values = address_of<const typename Codec::Bits>(chunk);
            partials[i] = accumulate<Accumulator, Codec>(values, chunk.end - chunk.begin);
        });
    });
    std::fill_n(request.sums, request.group_count, 0.0);
    for (size_t i = 0; i < chunks.size(); ++i) {
        double& sum = request.sums[chunks[i].gradient->group()];
        sum = Accumulator::combine(sum, partials[i]);
    }
    double total = 0.0;
    for (uint32_t g = 0; g < request.group_count; ++g) total = Accumulator::combine(total, request.sums[g]);
    write_result<Accumulator>(request, total);
}

}  // namespace

void norm_cpu(const std::vector<Gradient>& gradients, const NormRequest& request, int threads) {
    if (request.norm == Norm::kTwo) {
        compute_norm<SumOfSquares>(gradients, request, threads);
    } else {
        compute_norm<LargestMagnitude>(gradients, request, threads);
    }
}

void scale_cpu(const std::vector<Gradient>& gradients, const float* factor, int threads) {
    const float by = *factor;
    if (by == 1.0f) return;
    const std::vector<Chunk> chunks = cut(gradients);
    for_each_index(chunks.size(), useful_threads(chunks.size(), threads), [&](size_t i) {
        const Chunk& chunk = chunks[i];
        dispatch_element(chunk.gradient->type(), [&](auto codec) {
            using Codec = decltype(codec);
            auto* values = address_of<typename Codec::Bits>(chunk);
            const uint64_t count = chunk.end - chunk.begin;
            for (uint64_t k = 0; k < count; ++k) values[k] = Codec::encode(Codec::decode(values[k]) * by);
        });
    });
}

}  // namespace fused_optim
