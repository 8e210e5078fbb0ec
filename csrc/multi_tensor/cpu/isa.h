// The instruction set that the CPU engine's inner parts run with.
#pragma once

namespace fused_optim {

enum class Isa { kBaseline, kAVX2, kAVX512 };

inline Isa best_isa() {
#if defined(FUSED_OPTIM_X86_ISAS)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        return Isa::kAVX512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma")) {
        return Isa::kAVX2;
    }
#endif
    return Isa::kBaseline;
}

}  // namespace fused_optim
