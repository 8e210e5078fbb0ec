// The kernel of the update, whose table of shards travels as its parameter: one thread block per chunk of a shard. Two
// loops share the element math:
//   * vector loop: a thread updates 8 consecutive elements at a time. It issues the loads of all streams, then decodes,
//     updates, finds the block's absmax by warp shuffles, encodes and stores.
//   * general loop: shard ends and shards whose addresses or offsets are not aligned, one element per thread.
#pragma once

#include "cuda/general_loop.cuh"
#include "cuda/kernels.h"
#include "cuda/vector_loop.cuh"
#include "cuda/view.cuh"

namespace fused_optim {
namespace {

// The hardware hands the chunks out in order, which evens out that some multiprocessors reach memory faster than
// others, and keeps the addresses in use close together.
template <class Loops>
__global__ void __launch_bounds__(kThreads, Loops::kBlocksPerMultiprocessor)
    multi_tensor_update(const __grid_constant__ typename Loops::Table table) {
    if (threadIdx.x == 0) block->prepare(table, blockIdx.x);
    __syncthreads();
    if (block->scalars.skipped) return;
    if (block->view.vector_count > 0) Loops::vectors();
    if (block->view.vector_count < block->view.count) Loops::others();
    if constexpr (kHasWeights<typename Loops::Table>) {
        if (!block->view.absmax) return;
        __syncthreads();
        if (threadIdx.x == 0) atomicMax(reinterpret_cast<uint32_t*>(block->view.absmax), block->weight_absmax);
    }
}

template <class Loops>
constexpr size_t kSharedBytes = kBlockBytes<Loops::kScaledMasters> + Loops::kRingBytes;

}  // namespace
}  // namespace fused_optim
