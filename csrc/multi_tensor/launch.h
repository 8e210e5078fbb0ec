// What an engine offers to the bindings: one step over the shards of one device.
#pragma once

#include <cstddef>
#include <vector>

#include "table.h"

namespace fused_optim {

// Shards are ordered by group. Every group's step counter (Hyper::step_pointer) advances, also without any shard.
struct Step {
    Rule rule;
    std::vector<Shard> shards;
    std::vector<Hyper> groups;
};

// `threads`: upper bound for the number of CPU threads.
void launch_cpu(const Step& step, int threads);

// Enqueues on `stream` of `device`; reads nothing back. `workspace`: device memory of workspace_bytes(), which only
// steps need whose hyperparameters lie on the device. Throws std::runtime_error naming the kernel and the CUDA error.
void launch_cuda(const Step& step, int device, uint64_t stream, uint64_t workspace);
size_t workspace_bytes(const Step& step);

// Whether quantized weights whose states have these formats can be written by the update.
bool writes_weights_cuda(Rule rule, const State* states);

// Loads every kernel that a step may launch. A graph capture is no time for it.
void load_update_kernels(Rule rule, int device);

}  // namespace fused_optim
