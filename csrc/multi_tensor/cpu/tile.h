// What the CPU engine's inner parts share. They are compiled once per instruction set: everything here is internal to
// each object, and no templates of the standard library may be used, because an inline function compiled for AVX-512
// could replace the baseline's copy at link time.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if !defined(FUSED_OPTIM_ISA)
#define FUSED_OPTIM_ISA baseline
#endif
#define FUSED_OPTIM_JOIN_(a, b) a##b
#define FUSED_OPTIM_JOIN(a, b) FUSED_OPTIM_JOIN_(a, b)

namespace fused_optim {
namespace {

constexpr int kStripSize = 128;  // of a quantized weight

// Elements that an update works on at a time: whole blocks of every size, several of the largest, so that their scales
// are divided for together. Tiles start at multiples of it.
constexpr int kTile = 512;

// Denormals count (they are codes of small values), whatever torch.set_flush_denormal says on this thread.
class DenormalsOn {
#if defined(__x86_64__)
public:
    DenormalsOn() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
    ~DenormalsOn() { _mm_setcsr(saved_); }

private:
    unsigned saved_;
#else
public:
    ~DenormalsOn() {}
#endif
};

template <class T>
T* pointer(uint64_t address, uint64_t element) {
    return reinterpret_cast<T*>(address) + element;
}

// Fills what is beyond `count` with zeros.
template <int size = kTile, class T>
void copy_in(T* tile, uint64_t address, uint64_t element, int count) {
    if (count < size) std::memset(tile, 0, sizeof(T) * size);
    std::memcpy(tile, pointer<T>(address, element), sizeof(T) * count);
}

template <class T>
void copy_out(const T* tile, uint64_t address, uint64_t element, int count) {
    std::memcpy(pointer<T>(address, element), tile, sizeof(T) * count);
}

}  // namespace
}  // namespace fused_optim
