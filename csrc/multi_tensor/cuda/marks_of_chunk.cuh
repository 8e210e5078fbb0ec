// The marks of a chunk whose tiles are staged: read and written at once.
#pragma once

#include "cuda/changes.cuh"
#include "cuda/ring.cuh"
#include "cuda/table.cuh"

namespace fused_optim {
namespace {

// The bits of a thread's elements in all tiles of a chunk: a byte of each tile. They are written at once, a warp's 32
// of a tile side by side. Those that are set already come through the ring, as a tile behind the last one.
template <int tiles>
struct MarksOfChunk {
    static_assert(tiles % 4 == 0 && tiles <= 16, "whole words; a lane for each half of a tile's");
    uint32_t words[tiles / 4]{};

    // The turn of a tile to be copied; `memory` is the warp's alone.
    __device__ __forceinline__ static void fetch(const View& view, uint32_t tile, char* memory) {
        if (tile != tiles || !in_rows(view) || !keeps_marks() || row() >= kRows) return;
        copy_async<sizeof(uint4)>(memory + row() * sizeof(uint4), row_address());
    }

    // What the update has found in the next tile.
    __device__ __forceinline__ void put(uint32_t changed) {
#pragma unroll
        for (int i = 0; i < tiles / 4; ++i) {
            words[i] = __funnelshift_r(words[i], i + 1 < tiles / 4 ? words[i + 1] : changed, 8);
        }
    }

    // After the last tile. `earlier`: what fetch() has brought; `memory`: more that is the warp's alone.
    template <bool has_weights>
    __device__ __forceinline__ void write(const View& view, const char* earlier, char* memory) {
        if (!marks_elements<has_weights>(view)) return;
        in_rows(view) ? write_rows(earlier, memory) : write_bytes(view);
    }

private:
    static constexpr uint32_t kRowsPerTile = kWarp / sizeof(uint4), kRows = tiles * kRowsPerTile;

    // Whether the chunk does not end early.
    __device__ __forceinline__ static bool in_rows(const View& view) { return view.vector_count == tiles * kTile; }
    __device__ __forceinline__ static uint32_t row() { return threadIdx.x % kWarp; }
    __device__ __forceinline__ static uint64_t row_address() {
        return changes_of_chunk.elements + (threadIdx.x - row()) + row() / kRowsPerTile * (kTile / kVector) +
               row() % kRowsPerTile * sizeof(uint4);
    }
    __device__ __forceinline__ static uint32_t element_of(int tile) { return threadIdx.x * kVector + tile * kTile; }
    __device__ __forceinline__ uint8_t of_tile(int tile) const {
        return static_cast<uint8_t>(words[tile / 4] >> 8 * (tile % 4));
    }

    __device__ __forceinline__ void write_rows(const char* earlier, char* memory) const {
#pragma unroll
        for (int k = 0; k < tiles; ++k) memory[k * kWarp + threadIdx.x % kWarp] = static_cast<char>(of_tile(k));
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
        if (row() >= kRows) return;
        uint4 found = reinterpret_cast<const uint4*>(memory)[row()];
        if (!changes_of_chunk.overwrites) {
            const uint4 marked = reinterpret_cast<const uint4*>(earlier)[row()];
            const uint32_t added =
                (found.x & ~marked.x) | (found.y & ~marked.y) | (found.z & ~marked.z) | (found.w & ~marked.w);
            if (!added) return;
            found.x |= marked.x, found.y |= marked.y, found.z |= marked.z, found.w |= marked.w;
        }
        *reinterpret_cast<uint4*>(row_address()) = found;
    }

    // Tiles that the chunk lacks turn the words as those that it has.
    __device__ __forceinline__ void write_bytes(const View& view) {
        uint32_t count = 0;
        while (count < tiles && element_of(count) < view.vector_count) ++count;
        for (uint32_t k = count; k < tiles; ++k) put(0);
#pragma unroll
        for (int k = 0; k < tiles; ++k) {
            if (k >= count) return;
            uint8_t* const target = marks_of_group8(element_of(k));
            const uint32_t marked = changes_of_chunk.overwrites ? 0u : *target;
            if (changes_of_chunk.overwrites || of_tile(k) & ~marked)
                *target = static_cast<uint8_t>(of_tile(k) | marked);
        }
    }
};

struct NoMarks {
    __device__ __forceinline__ static void fetch(const View&, uint32_t, char*) {}
    __device__ __forceinline__ void put(uint32_t) {}
    template <bool has_weights>
    __device__ __forceinline__ void write(const View&, const char*, char*) {}
};

}  // namespace
}  // namespace fused_optim
