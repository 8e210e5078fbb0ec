// The launch of the pass for diagnostics: partial results of thread blocks, then their sums in a fixed order.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "cuda/diagnosis.h"
#include "cuda/table_builder.cuh"
#include "rules.h"

namespace fused_optim {
namespace {

// A thread block for each shard.
__global__ void __launch_bounds__(kThreads)
    combine_diagnosis(const __grid_constant__ DiagnosisTable table, int width, int sums) {
    const uint32_t shard = blockIdx.x;
    const uint32_t first = table.first_chunk[shard] / table.chunks_per_block;
    const uint32_t last = (table.first_chunk[shard + 1] - 1) / table.chunks_per_block;
    for (int i = 0; i < width; ++i) {
        const Combine combine{i < sums};
        double value = combine.none();
        for (uint32_t other = first + threadIdx.x; other <= last; other += kThreads) {
            value = combine(value, table.partial(other, shard, width)[i]);
        }
        value = combine_block(value, combine);
        if (threadIdx.x == 0) reinterpret_cast<double*>(table.row[shard])[i] = value;
    }
}

struct Launcher {
    Rule rule;
    Kernel<DiagnosisTable>& kernel;
    double* partials;
    int device;
    cudaStream_t stream;

    void operator()(DiagnosisTable& table) const {
        const uint32_t chunks = table.first_chunk[table.shard_count];
        if (chunks == 0) return;
        const uint32_t blocks = std::min(chunks, kDiagnosisBlocks);
        table.chunks_per_block = (chunks + blocks - 1) / blocks;
        table.partials = partials;
        const uint32_t grid = (chunks + table.chunks_per_block - 1) / table.chunks_per_block;
        kernel.function<<<grid, kThreads, kernel.shared_bytes, stream>>>(table);
        check_cuda(cudaGetLastError(), kDiagnosisName, device);
        combine_diagnosis<<<table.shard_count, kThreads, 0, stream>>>(table, diagnosis_width(rule),
                                                                      diagnosis_sums(rule));
        check_cuda(cudaGetLastError(), kDiagnosisName, device);
    }
};

Kernel<DiagnosisTable>& kernel_of(Rule rule) {
    if (rule == Rule::kAdam) return diagnosis_kernel<Rule::kAdam>();
    if (rule == Rule::kLion) return diagnosis_kernel<Rule::kLion>();
    throw std::invalid_argument("fused_optim: this update rule has no kernel for diagnostics");
}

}  // namespace

void diagnose_cuda(const Step& step, const std::vector<uint64_t>& rows, int device, uint64_t stream,
                   uint64_t workspace) {
    CudaDeviceGuard guard(kDiagnosisName, device);
    Kernel<DiagnosisTable>& kernel = kernel_of(step.rule);
    const Launcher launch{step.rule, kernel, reinterpret_cast<double*>(workspace), device,
                          reinterpret_cast<cudaStream_t>(stream)};
    TableBuilder<Kernel<DiagnosisTable>> builder(kernel);
    std::vector<uint64_t> rows_of_table;
    std::vector<Hyper> groups_of_table;
    auto flush = [&]() {
        DiagnosisTable table = builder.finish(device, nullptr);
        std::copy(rows_of_table.begin(), rows_of_table.end(), table.row);
        std::copy(groups_of_table.begin(), groups_of_table.end(), table.hypers);
        launch(table);
        builder.reset();
        rows_of_table.clear();
        groups_of_table.clear();
    };
    size_t group = step.groups.size();  // none: the one that was added last
    auto add_group = [&](size_t number) {
        if (!builder.add_group(Scalars{})) return false;
        groups_of_table.push_back(step.groups[number]);
        group = number;
        return true;
    };
    for (size_t i = 0; i < step.shards.size(); ++i) {
        const Shard& shard = step.shards[i];
        if (shard.group != group && !add_group(shard.group)) {
            flush();
            add_group(shard.group);
        }
        if (!builder.add_shard(shard)) {
            flush();
            add_group(shard.group);
            builder.add_shard(shard);
        }
        rows_of_table.push_back(rows[i]);
    }
    flush();
}

}  // namespace fused_optim
