// Eight elements of a thread as they lie in memory, and how they come and go: 16 bytes at an access, whole sectors of
// 32 bytes between neighbours.
#pragma once

#include <cstdint>

namespace fused_optim {
namespace {

constexpr int kVector = 8;  // elements per thread

// Eight elements of kBytes each, as they lie in memory.
template <int kBytes>
struct Packet {
    static constexpr bool kExchanged = true;  // what load<4>() brings
    uint32_t words[2 * kBytes];
};

template <int kBytes>
__device__ __forceinline__ uint32_t get(const uint32_t* words, int i) {
    if constexpr (kBytes == 4) return words[i];
    constexpr uint32_t mask = kBytes == 1 ? 0xFFu : 0xFFFFu;
    return (words[i * kBytes / 4] >> (8 * (i * kBytes % 4))) & mask;
}

// Byte `first` of each of four values as one word; what else they hold does not matter.
template <int first>
__device__ __forceinline__ uint32_t pack_bytes(const uint32_t* values) {
    constexpr uint32_t pair = (4 + first) << 4 | first;
    return __byte_perm(__byte_perm(values[0], values[1], pair), __byte_perm(values[2], values[3], pair), 0x5410);
}

// The upper or lower halves of two values as one word.
__device__ __forceinline__ uint32_t pack_high(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
__device__ __forceinline__ uint32_t pack_low(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }

// Eight FP32 elements are two accesses of 16 bytes. Were each thread to make both on its own elements, every access of
// the warp would touch halves of 32-byte sectors; so two neighbours access whole sectors and exchange what is the
// other's.
// From what a thread accesses first and second (four words each) to its own elements, and back: its own inverse.
__device__ __forceinline__ void exchange(uint32_t* words) {
    const uint32_t pair = 3u << (threadIdx.x & 30);
    const bool odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t others = __shfl_xor_sync(pair, odd ? words[i] : words[i + 4], 1);
        words[i] = odd ? others : words[i];
        words[i + 4] = odd ? words[i + 4] : others;
    }
}

// Where a thread's first access lies: at its elements if it is even, beside its neighbour's access if it is odd.
__device__ __forceinline__ uint64_t first_access(uint64_t address, uint32_t element) {
    return address + static_cast<uint64_t>(element) * 4 - (threadIdx.x & 1) * 16;
}

template <int kBytes>
__device__ __forceinline__ void load(uint32_t* words, uint64_t address, uint32_t element) {
    if constexpr (kBytes == 4) {  // exchange() follows when the values are wanted
        const uint4* source = reinterpret_cast<const uint4*>(first_access(address, element));
        uint4 first = __ldcs(source), second = __ldcs(source + 2);
        words[0] = first.x, words[1] = first.y, words[2] = first.z, words[3] = first.w;
        words[4] = second.x, words[5] = second.y, words[6] = second.z, words[7] = second.w;
        return;
    }
    address += static_cast<uint64_t>(element) * kBytes;
    if constexpr (kBytes == 2) {
        uint4 raw = __ldcs(reinterpret_cast<const uint4*>(address));
        words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
    } else if constexpr (kBytes == 1) {
        uint2 raw = __ldcs(reinterpret_cast<const uint2*>(address));
        words[0] = raw.x, words[1] = raw.y;
    }
}

template <int kBytes>
__device__ __forceinline__ void store(const uint32_t* words, uint64_t address, uint32_t element) {
    if constexpr (kBytes == 4) {  // after exchange()
        uint4* target = reinterpret_cast<uint4*>(first_access(address, element));
        __stcs(target, make_uint4(words[0], words[1], words[2], words[3]));
        __stcs(target + 2, make_uint4(words[4], words[5], words[6], words[7]));
        return;
    }
    address += static_cast<uint64_t>(element) * kBytes;
    if constexpr (kBytes == 2) {
        __stcs(reinterpret_cast<uint4*>(address), make_uint4(words[0], words[1], words[2], words[3]));
    } else if constexpr (kBytes == 1) {
        __stcs(reinterpret_cast<uint2*>(address), make_uint2(words[0], words[1]));
    }
}

}  // namespace
}  // namespace fused_optim
