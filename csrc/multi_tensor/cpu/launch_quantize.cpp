// The CPU engine's outer part for quantized weights: chooses the instruction set and spreads ranges over threads.
#include <algorithm>

#include "cpu/isa.h"
#include "cpu/threads.h"
#include "quantize.h"

namespace fused_optim {

using AbsmaxRange = uint32_t(const float*, uint64_t);
using EncodeRange = void(const Weight&, const WeightKind&, uint64_t, uint64_t);
using DecodeRange = void(const Weight&, WeightFormat, Element, uint64_t, uint64_t);
FUSED_OPTIM_PER_ISA(AbsmaxRange, absmax_range)
FUSED_OPTIM_PER_ISA(EncodeRange, encode_range)
FUSED_OPTIM_PER_ISA(DecodeRange, decode_range)

namespace {

constexpr uint64_t kChunk = 16384;              // elements: a tile, or as many strips
constexpr uint64_t kElementsPerThread = 65536;  // below this a thread costs more than it saves

struct Inner {
    AbsmaxRange* absmax;
    EncodeRange* encode;
    DecodeRange* decode;
};

const Inner& inner() {
    static const Inner chosen{best_absmax_range(), best_encode_range(), best_decode_range()};
    return chosen;
}

struct Range {
    size_t tensor;
    uint64_t begin;
    uint64_t end;
};

// Cuts tensors of counts[i] units of `unit` elements into ranges, and calls work(range) for each.
template <class Work>
void for_each_range(const std::vector<uint64_t>& counts, uint64_t unit, int threads, const Work& work) {
    const uint64_t size = kChunk / unit;
    std::vector<Range> ranges;
    uint64_t units = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        for (uint64_t begin = 0; begin < counts[i]; begin += size) {
            ranges.push_back({i, begin, std::min(begin + size, counts[i])});
        }
        units += counts[i];
    }
    const uint64_t useful = std::min<uint64_t>(units * unit / kElementsPerThread, std::max(threads, 1));
    for_each_index(ranges.size(), useful, [&](size_t i) { work(ranges[i]); });
}

}  // namespace

void absmax_cpu(const std::vector<Values>& tensors, float* absmax, int threads) {
    std::vector<uint64_t> counts;
    for (const Values& tensor : tensors) counts.push_back(tensor.numel);
    std::vector<std::atomic<uint32_t>> largest(tensors.size());
    for (auto& bits : largest) bits = 0;
    for_each_range(counts, 1, threads, [&](const Range& range) {
        const auto* values = reinterpret_cast<const float*>(tensors[range.tensor].address) + range.begin;
        const uint32_t found = inner().absmax(values, range.end - range.begin);
        uint32_t known = largest[range.tensor];
        while (known < found && !largest[range.tensor].compare_exchange_weak(known, found)) {
        }
    });
    for (size_t i = 0; i < tensors.size(); ++i) absmax[i] = bits_float(largest[i]);
}

void rescale_cpu(const std::vector<TensorScale>& scales, const ScaleRule& rule, int) {
    for (const TensorScale& scale : scales) rescale(scale, rule);
}

void encode_cpu(const std::vector<Weight>& weights, const WeightKind& kind, int threads) {
    const WeightTraits traits = traits_of(kind.format);
    std::vector<Weight> flat;
    std::vector<uint64_t> counts;
    for (const Weight& weight : weights) {
        flat.push_back(flattened(weight, traits));
        counts.push_back(traits.tiled ? tile_count(flat.back()) : strip_count(flat.back()));
    }
    for_each_range(counts, traits.tiled ? kChunk : kStrip, threads,
                   [&](const Range& range) { inner().encode(flat[range.tensor], kind, range.begin, range.end); });
}

void decode_cpu(const Weight& weight, WeightFormat format, Element type, int threads) {
    const Weight flat = flattened(weight, traits_of(format));
    for_each_range({strip_count(flat)}, kStrip, threads,
                   [&](const Range& range) { inner().decode(flat, format, type, range.begin, range.end); });
}

}  // namespace fused_optim
