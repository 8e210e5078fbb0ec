// The kernels for diagnostics, as their launch sees them: made by diagnose.cu, compiled once per update rule.
#pragma once

#include "cuda/kernels.h"
#include "diagnose.h"

namespace fused_optim {

// Thread block b looks at `chunks_per_block` chunks from the b-th on, one after the other, and leaves a row of numbers
// for each shard that it meets. Of shard s it is row b + s of the partial results: from one row to the next either the
// block goes on to another shard or a shard to another block, so no two have the same, and those of a shard are
// neighbours.
struct DiagnosisTable : KernelTable<kDiagnosedShards> {
    uint64_t row[kShards];  // where the results go
    Hyper hypers[kMaxGroups];
    double* partials;
    uint32_t chunks_per_block;

    __device__ __forceinline__ double* partial(uint32_t block, uint32_t shard, int width) const {
        return partials + (uint64_t{block} + shard) * width;
    }
};
static_assert(sizeof(DiagnosisTable) <= kParameterLimit, "the table must fit into the kernel's parameters");

constexpr const char* kDiagnosisName = "multi_tensor_diagnosis";  // in errors

// Of the rules of elements: Muon's matrices are looked at as such.
FUSED_OPTIM_HD constexpr bool is_diagnosed(Rule rule) { return rule == Rule::kAdam || rule == Rule::kLion; }

template <Rule rule>
Kernel<DiagnosisTable>& diagnosis_kernel();

#if defined(__CUDACC__)
namespace {

// Numbers of a row combined: sums and maxima.
struct Combine {
    bool is_sum;

    __device__ __forceinline__ double operator()(double a, double b) const { return is_sum ? a + b : fmax(a, b); }
    __device__ __forceinline__ double none() const { return is_sum ? 0.0 : -INFINITY; }
};

// The thread block's values combined, in a fixed order, on thread 0. Every thread calls it.
__device__ __forceinline__ double combine_block(double value, const Combine& combine) {
    __shared__ double warps[kThreads / kWarp];
    value = combine_lanes<kWarp>(value, combine);
    __syncthreads();  // the values of the call before have been read
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
    __syncthreads();
    for (uint32_t warp = 1; warp < kThreads / kWarp && threadIdx.x == 0; ++warp) value = combine(value, warps[warp]);
    return value;
}

}  // namespace
#endif

}  // namespace fused_optim
