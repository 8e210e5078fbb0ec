// The instruction set that the CPU engine's inner parts run with.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fused_optim {

enum class Isa { kBaseline, kAVX2, kAVX512 };

inline Isa supported_isa() {
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

// What the processor has, or less if FUSED_OPTIM_CPU_ISA asks for it. Throws std::runtime_error for another name.
inline Isa best_isa() {
    const char* const wanted = std::getenv("FUSED_OPTIM_CPU_ISA");
    if (!wanted || !*wanted) return supported_isa();
    const std::string name = wanted;
    if (name == "baseline") return Isa::kBaseline;
    if (name == "avx2") return supported_isa() == Isa::kBaseline ? Isa::kBaseline : Isa::kAVX2;
    if (name == "avx512") return supported_isa();
    throw std::runtime_error("FUSED_OPTIM_CPU_ISA=" + name + ": expected baseline, avx2 or avx512");
}

// Declares an inner part's function, `name`_baseline and so on, and best_`name`(), which chooses one.
#if defined(FUSED_OPTIM_X86_ISAS)
#define FUSED_OPTIM_PER_ISA(Function, name)                       \
    Function name##_baseline, name##_avx2, name##_avx512;         \
    inline Function* best_##name() {                              \
        const Isa isa = best_isa();                               \
        if (isa == Isa::kAVX512) return name##_avx512;            \
        return isa == Isa::kAVX2 ? name##_avx2 : name##_baseline; \
    }
#else
#define FUSED_OPTIM_PER_ISA(Function, name) \
    Function name##_baseline;               \
    inline Function* best_##name() { return name##_baseline; }
#endif

}  // namespace fused_optim
