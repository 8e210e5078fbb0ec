// The CPU engine's outer part for diagnostics: chooses the instruction set and spreads chunks over threads.
#include <algorithm>
#include <vector>

#include "cpu/isa.h"
#include "cpu/threads.h"
#include "diagnose.h"
#include "rules.h"

namespace fused_optim {

using DiagnoseRange = void(Rule, const Shard&, const Scalars&, uint64_t, uint64_t, uint64_t, double*);
FUSED_OPTIM_PER_ISA(DiagnoseRange, diagnose_range)

namespace {

constexpr uint64_t kChunk = 16384;              // elements; a multiple of every block
constexpr uint64_t kElementsPerThread = 16384;  // below this a thread costs more than it saves

std::vector<float> copied_scales(Rule rule, const Shard& shard) {
    size_t scaled = is_scaled(shard.master_kind) ? 1 : 0;
    for (int i = 0; i < state_count(rule); ++i) scaled += is_scaled(shard.states[i].format) ? 1 : 0;
    const auto* scales = reinterpret_cast<const float*>(shard.scales);
    return {scales, scales + scaled * (scaled ? block_count(shard) : 0)};
}

}  // namespace

void diagnose_cpu(Rule rule, const Shard& shard, const Hyper& hyper, double* row, int threads) {
    static DiagnoseRange* const diagnose_range = best_diagnose_range();
    Scalars scalars = derive(rule, hyper);
    scalars.writes_gradient = false;
    scalars.unchanged_gradient = scalars.grad_factor == 1.0f && scalars.l2_penalty == 0.0f;
    std::vector<float> scales = copied_scales(rule, shard);
    const int width = diagnosis_width(rule), sums = diagnosis_sums(rule);
    const size_t chunks = (shard.numel + kChunk - 1) / kChunk;
    std::vector<double> rows(chunks * width);
    const uint64_t useful = std::min<uint64_t>(shard.numel / kElementsPerThread, std::max(threads, 1));
    for_each_index(chunks, useful, [&](size_t i) {
        const uint64_t begin = i * kChunk;
        diagnose_range(rule, shard, scalars, reinterpret_cast<uint64_t>(scales.data()), begin,
                       std::min(begin + kChunk, shard.numel), rows.data() + i * width);
    });
    std::fill(row, row + sums, 0.0);
    std::fill(row + sums, row + width, kNoBound);
    for (size_t i = 0; i < chunks; ++i) {
        const double* const found = rows.data() + i * width;
        for (int k = 0; k < sums; ++k) row[k] += found[k];
        for (int k = sums; k < width; ++k) row[k] = std::max(row[k], found[k]);
    }
}

}  // namespace fused_optim
