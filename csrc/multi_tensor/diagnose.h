// What a step would do to a shard, as sums over its elements, for diagnostics: nothing is written but these. The
// PyTorch reference (fused_optim/step/diagnosed_pieces.py) defines them.
#pragma once

#include <vector>

#include "launch.h"

namespace fused_optim {

// Of the elements of one state. `top`: those with their block's largest code; `low`: those other than 0 with the
// smallest or none. `least` and `largest`: of scales other than 0, which widen from an empty range.
struct StateDiagnosis {
    double value;  // squares
    double error;  // squares of what storing changes
    uint32_t coded;
    uint32_t top;
    uint32_t low;
    float least;
    float largest;

    FUSED_OPTIM_HD void widen(float scale) {
        if (!(scale > 0.0f && scale <= 3.4028234663852886e38f)) return;
        least = scale < least ? scale : least;
        largest = scale > largest ? scale : largest;
    }
};

struct Diagnosis {
    double update;  // squares, before rounding
    double weight;
    double gradient;
    uint32_t elements;
    uint32_t moved;  // by the update
    uint32_t lost;   // of these, by rounding
    StateDiagnosis states[kMaxStates];

    FUSED_OPTIM_HD static Diagnosis empty() {
        Diagnosis found{};
        for (StateDiagnosis& state : found.states) state.least = 3.4028234663852886e38f;
        return found;
    }
};

// As numbers: sums, then of each state the scales' bounds, the least with its sign changed. All that follow the sums
// are combined by their maximum.
FUSED_OPTIM_HD constexpr int diagnosis_sums(Rule rule) { return 6 + 5 * state_count(rule); }
FUSED_OPTIM_HD constexpr int diagnosis_width(Rule rule) { return diagnosis_sums(rule) + 2 * state_count(rule); }
constexpr int kMaxDiagnosisWidth = 6 + 7 * kMaxStates;
constexpr double kNoBound = -__builtin_huge_val();

template <Rule rule>
FUSED_OPTIM_HD void write_row(const Diagnosis& found, double* row) {
    const double own[] = {static_cast<double>(found.elements),
                          found.update,
                          found.weight,
                          found.gradient,
                          static_cast<double>(found.moved),
                          static_cast<double>(found.lost)};
    for (const double value : own) *row++ = value;
    for (int i = 0; i < state_count(rule); ++i) {
        const StateDiagnosis& state = found.states[i];
        const double values[] = {state.value, state.error, static_cast<double>(state.coded),
                                 static_cast<double>(state.top), static_cast<double>(state.low)};
        for (const double value : values) *row++ = value;
    }
    for (int i = 0; i < state_count(rule); ++i) {
        const StateDiagnosis& state = found.states[i];
        *row++ = state.largest > 0.0f ? -static_cast<double>(state.least) : kNoBound;
        *row++ = state.largest > 0.0f ? static_cast<double>(state.largest) : kNoBound;
    }
}

// `row`: diagnosis_width() numbers. The result does not depend on `threads`.
void diagnose_cpu(Rule rule, const Shard& shard, const Hyper& hyper, double* row, int threads);

// Looks at the shards of a step, whose quantized weights are given as their values; every shard has elements. `rows`:
// of each the address of diagnosis_width() numbers. Enqueued on `stream` of `device`. `workspace`: device memory of
// kDiagnosisWorkspace bytes. Throws std::runtime_error naming the kernel and the CUDA error.
void diagnose_cuda(const Step& step, const std::vector<uint64_t>& rows, int device, uint64_t stream,
                   uint64_t workspace);
constexpr uint32_t kDiagnosisBlocks = 4224;  // thread blocks of a launch, at most: 32 for each of 132 multiprocessors
constexpr uint32_t kDiagnosedShards = 330;   // the same of shards
constexpr uint64_t kDiagnosisWorkspace = sizeof(double) * kMaxDiagnosisWidth * (kDiagnosisBlocks + kDiagnosedShards);

}  // namespace fused_optim
