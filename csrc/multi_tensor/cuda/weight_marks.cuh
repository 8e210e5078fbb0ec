// Marks which codes and scales of quantized weights an encoder changes. `Marker<false>` does nothing, in kernels that
// mark nothing.
#pragma once

#include "cuda/warp.cuh"
#include "cuda/weight_group8.cuh"
#include "quantize.h"

namespace fused_optim {
namespace {

template <bool tracked>
struct Marker {
    WeightMarks marks;

    // Sets up to eight bits from `first` on, whose words other threads have bits in.
    __device__ __forceinline__ static void set(uint64_t bits, uint64_t first, uint32_t changed) {
        if (!changed) return;
        uint32_t* const words = reinterpret_cast<uint32_t*>(bits) + first / 32;
        const uint64_t shifted = uint64_t{changed} << first % 32;
        if (static_cast<uint32_t>(shifted)) atomicOr(words, static_cast<uint32_t>(shifted));
        if (shifted >> 32) atomicOr(words + 1, static_cast<uint32_t>(shifted >> 32));
    }

    template <class Codec>
    __device__ __forceinline__ void scale(const Weight& w, uint64_t index, uint32_t fresh) const {
        if constexpr (tracked && !std::is_void_v<typename Codec::Scale>) {
            if (marks.scales && load_scale<Codec>(w, index) != fresh) set(marks.scales, index, 1);
        }
    }

    // The first `count` of up to four bytes of codes, which are not stored yet.
    __device__ __forceinline__ void bytes(const Weight& w, uint64_t first, uint32_t fresh, int count) const {
        if constexpr (tracked) {
            if (!marks.codes) return;
            const uint8_t* const stored = reinterpret_cast<const uint8_t*>(w.data) + first;
            uint32_t changed = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i < count && stored[i] != (fresh >> 8 * i & 0xFFu)) changed |= 1u << i;
            }
            set(marks.codes, first, changed);
        }
    }

    // Of eight rows of 128 bytes each, four to a lane. The warp has every `stride`-th row of `columns` bytes; the first
    // warp's begins at `corner`, a multiple of 32 as columns are. `changed`: four bits of each row. All lanes call.
    __device__ __forceinline__ void rows(uint64_t corner, uint64_t columns, uint32_t stride, uint32_t changed) const {
        if constexpr (tracked) {
            const uint32_t lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp + lane % 8 * stride;
            if (const uint32_t word = transposed_nibbles(changed)) {
                const uint64_t first = corner + row * columns + lane / 8 * 32;
                atomicOr(reinterpret_cast<uint32_t*>(marks.codes) + first / 32, word);
            }
        }
    }

private:
    // Of eight lanes: the i-th one's nibble k becomes nibble i of the k-th one.
    __device__ __forceinline__ static uint32_t transposed_nibbles(uint32_t word) {
#pragma unroll
        for (uint32_t step = 1; step < 8; step *= 2) {
            const uint32_t low = step == 1 ? 0x0F0F0F0Fu : step == 2 ? 0x00FF00FFu : 0x0000FFFFu, shift = 4 * step;
            const uint32_t other = __shfl_xor_sync(kAllLanes, word, step);
            word = threadIdx.x & step ? (word & ~low) | (other & ~low) >> shift : (word & low) | (other & low) << shift;
        }
        return word;
    }
};

// The words of codes that `encode_group8` replaces: eight bytes, or four where a byte has two codes.
template <class Codec, bool tracked>
struct StoredGroup8 {
    static constexpr int kWords = kGroup8Words<Codec>;
    uint32_t words[kWords];

    __device__ __forceinline__ void load(const Weight& w, uint64_t group8) {
        if constexpr (tracked && kWords == 2) {
            const uint2 stored = reinterpret_cast<const uint2*>(w.data)[group8];
            words[0] = stored.x;
            words[1] = stored.y;
        } else if constexpr (tracked) {
            words[0] = reinterpret_cast<const uint32_t*>(w.data)[group8];
        }
    }

    // A group of eight bytes has a byte of bits to itself.
    __device__ __forceinline__ void mark(const Marker<tracked>& marker, uint64_t group8, const uint32_t* fresh) const {
        if constexpr (tracked) {
            if (!marker.marks.codes) return;
            const uint32_t low = differing_bytes(words[0], fresh[0]);
            if constexpr (kWords == 2) {
                const uint32_t changed = low | differing_bytes(words[1], fresh[1]) << 4;
                uint8_t* const bits = reinterpret_cast<uint8_t*>(marker.marks.codes) + group8;
                if (changed) *bits |= static_cast<uint8_t>(changed);
            } else {
                marker.set(marker.marks.codes, 4 * group8, low);
            }
        }
    }
};

}  // namespace
}  // namespace fused_optim
