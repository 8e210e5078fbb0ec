// The CPU engine's outer part: chooses the instruction set and spreads chunks over threads.
#include "launch.h"

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/threads.h"
#include "rules.h"

namespace fused_optim {

using UpdateRange = uint32_t(Rule, const Shard&, const void*, uint64_t, uint64_t);
FUSED_OPTIM_PER_ISA(UpdateRange, update_range)

namespace {

constexpr uint64_t kChunk = 16384;              // elements; a multiple of every block
constexpr uint64_t kElementsPerThread = 65536;  // below this a thread costs more than it saves

struct Chunk {
    const Shard* shard;
    uint64_t begin;
    uint32_t largest;  // magnitude of a quantized weight, as bits
};

void raise_absmax(const Chunk& chunk) {
    if (!chunk.shard->absmax) return;
    float* const absmax = reinterpret_cast<float*>(chunk.shard->absmax);
    *absmax = larger(bits_float(chunk.largest), *absmax);
}

template <Rule rule>
void launch(const Step& step, int threads) {
    static UpdateRange* const update_range = best_update_range();
    std::vector<Scalars<rule>> scalars;
    for (const Hyper& hyper : step.groups) scalars.push_back(derive<rule>(hyper));
    std::vector<Chunk> chunks;
    uint64_t elements = 0;
    for (const Shard& shard : step.shards) {
        if (is_skipped(step.groups[shard.group])) continue;
        for (uint64_t begin = 0; begin < shard.numel; begin += kChunk) chunks.push_back({&shard, begin, 0});
        elements += shard.numel;
    }
    const uint64_t useful = std::min<uint64_t>(elements / kElementsPerThread, std::max(threads, 1));
    for_each_index(chunks.size(), useful, [&](size_t i) {
        const Shard& shard = *chunks[i].shard;
        uint64_t end = std::min(chunks[i].begin + kChunk, shard.numel);
        chunks[i].largest = update_range(rule, shard, &scalars[shard.group], chunks[i].begin, end);
    });
    std::for_each(chunks.begin(), chunks.end(), raise_absmax);
    for (const Hyper& hyper : step.groups) {
        if (hyper.step_pointer && !is_skipped(hyper)) *hyper.step_pointer += 1;
    }
}

}  // namespace

void launch_cpu(const Step& step, int threads) {
    dispatch_rule(step.rule, [&](auto rule) { launch<decltype(rule)::value>(step, threads); });
}

}  // namespace fused_optim
