// The kernel of the update, whose table of shards travels as its parameter: one thread block per chunk of a shard. Two
// walks share the element math:
//   * vector walk: a thread updates 8 consecutive elements at a time. It issues the loads of all streams, then decodes,
//     updates, finds the block's absmax by warp shuffles, encodes and stores.
//   * general walk: shard ends and shards whose addresses or offsets are not aligned, one element per thread.
#pragma once

#include "cuda/general_walk.cuh"
#include "cuda/kernels.h"
#include "cuda/table.cuh"
#include "cuda/vector_walk.cuh"
#include "rules.h"

namespace fused_optim {
namespace {

// The hardware hands the chunks out in order, which evens out that some multiprocessors reach memory faster than
// others, and keeps the addresses in use close together.
template <class Walks>
__global__ void __launch_bounds__(kThreads, Walks::kBlocksPerMultiprocessor)
    multi_tensor_update(const __grid_constant__ typename Walks::Table table) {
    if (threadIdx.x == 0) block->prepare(table, blockIdx.x);
    __syncthreads();
    if (block->scalars.skipped) return;
    if (block->view.vector_count > 0) Walks::vectors();
    if (block->view.vector_count < block->view.count) Walks::others();
    if constexpr (kHasWeights<typename Walks::Table>) {
        if (!block->view.absmax) return;
        __syncthreads();
        if (threadIdx.x == 0) atomicMax(reinterpret_cast<uint32_t*>(block->view.absmax), block->weight_absmax);
    }
}

template <class Walks>
constexpr size_t kSharedBytes = kBlockBytes<Walks::kScaledMasters> + Walks::kRingBytes;

}  // namespace
}  // namespace fused_optim
