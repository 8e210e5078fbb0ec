// Gradient norms and gradient scaling: the table of gradients, what both engines compute of each element, and the
// clipping factor. Norms are accumulated in double: a float's square is exact there, cannot overflow or vanish, and the
// order of the sum, hence the sharding, hardly ever shows in the result.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "dispatch.h"

namespace fused_optim {

enum class Norm : uint8_t { kTwo = 0, kInfinity = 1 };

// Gradients are summed by group, because each group is reduced over ranks of its own.
constexpr int kMaxNormGroups = 16;
static_assert(kMaxNormGroups <= 16 && kCount<Element> <= 16, "four bits of Gradient::packed each");
constexpr uint64_t kMaxGradientNumel = uint64_t{1} << 48;

// The local shard of one gradient. Two words, so that many fit into a kernel's parameters.
struct Gradient {
    uint64_t address;
    uint64_t packed;

    static Gradient make(uint64_t address, uint64_t numel, uint32_t group, Element type) {
        return {address, numel << 8 | uint64_t{group} << 4 | static_cast<uint64_t>(type)};
    }
    FUSED_OPTIM_HD uint64_t numel() const { return packed >> 8; }
    FUSED_OPTIM_HD uint32_t group() const { return packed >> 4 & 0xF; }
    FUSED_OPTIM_HD Element type() const { return static_cast<Element>(packed & 0xF); }
};

// Where a norm goes; addresses in the memory of the device that computes it.
struct NormRequest {
    Norm norm;
    uint32_t group_count;
    float max_norm;
    double* sums;   // [group_count]: sums of squares, or largest magnitudes
    float* result;  // [2]: the norm over all groups, and the clipping factor
};

struct SumOfSquares {
    double value = 0.0;

    FUSED_OPTIM_HD void add(float x) {
        const double wide = static_cast<double>(x);
#if defined(__CUDA_ARCH__)
        value = __fma_rn(wide, wide, value);  // the square is exact, so this rounds as the host does
#else
        value += wide * wide;
#endif
    }
    FUSED_OPTIM_HD double result() const { return value; }
    FUSED_OPTIM_HD static double combine(double a, double b) { return a + b; }
    FUSED_OPTIM_HD static double norm(double total) { return sqrt(total); }
};

// Magnitudes compare as their bits do, in which NaN exceeds infinity.
struct LargestMagnitude {
    uint32_t bits = 0;

    FUSED_OPTIM_HD void add(float x) {
        const uint32_t magnitude = magnitude_bits(x);
        bits = magnitude > bits ? magnitude : bits;
    }
    FUSED_OPTIM_HD double result() const { return static_cast<double>(bits_float(bits)); }
    FUSED_OPTIM_HD static double combine(double a, double b) { return b > a || b != b ? b : a; }
    FUSED_OPTIM_HD static double norm(double total) { return total; }
};

// torch.nn.utils.clip_grad_norm_'s operations, which multiply by a reciprocal. NaN stays NaN.
FUSED_OPTIM_HD float clip_factor(float norm, float max_norm) {
    const float factor = (1.0f / (norm + 1e-6f)) * max_norm;
    return factor > 1.0f ? 1.0f : factor;
}

template <class Accumulator>
FUSED_OPTIM_HD void write_result(const NormRequest& request, double total) {
    const float norm = static_cast<float>(Accumulator::norm(total));
    request.result[0] = norm;
    request.result[1] = clip_factor(norm, request.max_norm);
}

// Gradients are ordered by group. The result does not depend on `threads`.
void norm_cpu(const std::vector<Gradient>& gradients, const NormRequest& request, int threads);

// Multiplies by `factor`, an address like the gradients'; writes nothing where it is 1.
void scale_cpu(const std::vector<Gradient>& gradients, const float* factor, int threads);

// As above, enqueued on `stream` of `device`. `workspace` is memory of norm_workspace_bytes(device) that was zero when
// it was new and serves one stream. Throw std::runtime_error naming the kernel and the CUDA error.
void norm_cuda(const std::vector<Gradient>& gradients, const NormRequest& request, int device, uint64_t stream,
               uint64_t workspace);
void scale_cuda(const std::vector<Gradient>& gradients, const float* factor, int device, uint64_t stream);
uint64_t norm_workspace_bytes(int device);
void load_norm_kernels(int device);

}  // namespace fused_optim
