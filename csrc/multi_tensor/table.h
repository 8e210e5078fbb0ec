// Plain structs that describe one optimizer step to an engine: addresses, sizes, formats, hyperparameters.
// No torch, no CUDA headers: both engines and the bindings share them.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FUSED_OPTIM_HD __host__ __device__ __forceinline__
#else
#define FUSED_OPTIM_HD inline __attribute__((always_inline))
#endif

namespace fused_optim {

// Element type of gradients, parameters and masters. The numbers are mirrored by fused_optim/formats.py.
enum class Element : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Where the FP32 master weights live.
enum class Master : uint8_t {
    kParameter = 0,    // the parameter is its own master
    kFloat32 = 1,      // a separate FP32 tensor
    kRemainder16 = 2,  // BF16 parameter + 16 more bits: FP32, lossless
    kRemainder8 = 3,   // BF16 parameter + 8 more bits: 24-bit master
};

// How a moment is stored.
enum class Format : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8 = 3, kInt8 = 4 };
constexpr int kFormats = 5;

// How a weight is quantized. The numbers are mirrored by fused_optim/quantized/recipes.py.
enum class WeightFormat : uint8_t {
    kFloat8 = 0,        // E4M3, one FP32 scale
    kFloat8Blocks = 1,  // E4M3, an FP32 scale per 128 elements of a row
    kFloat8Tiles = 2,   // E4M3, an FP32 scale per 128 x 128 elements
    kMXFloat8 = 3,      // E4M3, an E8M0 scale per 32 elements of a row
    kNVFloat4 = 4,      // E2M1, an E4M3 scale per 16 elements of a row, and one FP32 scale
};
constexpr int kWeightFormats = 5;

// One local shard of one parameter, with everything that the update touches.
struct Shard {
    uint64_t grad;
    uint64_t param;
    uint64_t master;
    uint64_t exp_avg;
    uint64_t exp_avg_sq;
    uint64_t scales;         // FP32: exp_avg's block scales (if it is scaled), then exp_avg_sq's
    uint64_t weight_scales;  // of a quantized parameter: those of its blocks, or the whole one's, which is read
    uint64_t absmax;         // of a quantized parameter, FP32: raised to the new values' largest finite magnitude; or 0
    uint64_t numel;
    // Global index of local element i: offset + (i / inner_local) * inner_global + i % inner_local.
    uint64_t offset;
    uint64_t inner_local;
    uint64_t inner_global;
    uint32_t key;  // rounding key of the parameter
    uint32_t group;
    Element grad_type;
    Element param_type;  // unless it is quantized
    Master master_kind;
    Format exp_avg_format;
    Format exp_avg_sq_format;
    uint8_t block_log2;  // 5, 6 or 7
    // A quantized weight beside an FP32 master, whose blocks divide its rows. `param` are its codes, or 0 if only
    // `absmax` is wanted.
    bool quantized;
    bool round_up;
    WeightFormat weight_format;
};

// Hyperparameters of one param group. A pointer that is not null overrides the value beside it; pointers lie in
// the memory of the device that runs the step and are read during the step, never by the host.
struct Hyper {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int64_t step;  // number of this step, from 1
    const float* lr_pointer;
    const float* grad_scale;   // gradients are divided by it, and written so
    const float* grad_factor;  // gradients are multiplied by it (deferred clipping)
    const float* found_inf;    // not 0: the step is skipped
    int64_t* step_pointer;     // steps done so far; advanced by the engine unless the step is skipped
    uint8_t adam_w;            // decoupled weight decay
    uint8_t bias_correction;
    uint8_t maximize;
    uint8_t stochastic_rounding;
};

FUSED_OPTIM_HD constexpr bool is_scaled(Format format) { return format >= Format::kFloat16; }

FUSED_OPTIM_HD constexpr int element_bytes(Element type) { return type == Element::kFloat32 ? 4 : 2; }

FUSED_OPTIM_HD constexpr int format_bytes(Format format) {
    return format == Format::kFloat32 ? 4 : format >= Format::kFloat8 ? 1 : 2;
}

// Bytes per element of the tensor beside the parameter; 0 where there is none.
FUSED_OPTIM_HD constexpr int master_bytes(Master master) {
    return master == Master::kFloat32 ? 4 : master == Master::kRemainder16 ? 2 : master == Master::kRemainder8 ? 1 : 0;
}

FUSED_OPTIM_HD uint64_t block_count(const Shard& shard) {
    return (shard.numel + (uint64_t{1} << shard.block_log2) - 1) >> shard.block_log2;
}

}  // namespace fused_optim
