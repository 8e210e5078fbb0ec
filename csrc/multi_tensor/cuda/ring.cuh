// The next tiles of a chunk on their way into shared memory, by asynchronous copies: deeper than registers would allow,
// since a load waits for thousands of cycles when memory is busy. A warp copies what its own lanes will read, so that
// nothing but the warp must wait for it.
#pragma once

#include "cuda/packets.cuh"
#include "cuda/view.cuh"
#include "cuda/warp.cuh"
#include "dispatch.h"

namespace fused_optim {
namespace {

// Eight elements of four bytes in their own order, not as exchange() leaves them.
struct OrderedPacket : Packet<4> {
    static constexpr bool kExchanged = false;
};

template <int kBytes>
__device__ __forceinline__ void copy_async(char* target, uint64_t source) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(target));
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(source) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(source) : "memory");
    }
}

// Where the elements of this thread's warp begin, of `bytes` each.
__device__ __forceinline__ char* of_warp(char* stream, uint32_t bytes) {
    return stream + threadIdx.x / kWarp * kVectorSpan * bytes;
}

// One stream of a tile: `stream` is its place in shared memory.
template <int kBytes>
__device__ __forceinline__ void fetch(char* stream, uint64_t address, uint32_t element) {
    const uint32_t lane = threadIdx.x % kWarp;
    if constexpr (kBytes == 4) {  // 16 bytes to a lane, in their order: twice
        const uint64_t source = address + static_cast<uint64_t>(element - lane * kVector) * 4 + lane * 16;
        char* target = of_warp(stream, 4) + lane * 16;
        copy_async<16>(target, source);
        copy_async<16>(target + 16 * kWarp, source + 16 * kWarp);
    } else {
        copy_async<kVector * kBytes>(of_warp(stream, kBytes) + lane * kVector * kBytes,
                                     address + static_cast<uint64_t>(element) * kBytes);
    }
}

template <int kBytes>
__device__ __forceinline__ void take(uint32_t* words, char* stream) {
    const char* own = of_warp(stream, kBytes) + threadIdx.x % kWarp * kVector * kBytes;
    if constexpr (kBytes == 1) {
        const uint2 raw = *reinterpret_cast<const uint2*>(own);
        words[0] = raw.x, words[1] = raw.y;
    } else {
#pragma unroll
        for (int i = 0; i < kBytes / 2; ++i) {
            const uint4 raw = reinterpret_cast<const uint4*>(own)[i];
            words[4 * i] = raw.x, words[4 * i + 1] = raw.y, words[4 * i + 2] = raw.z, words[4 * i + 3] = raw.w;
        }
    }
}

// Streams whose type is known only at run time: 2 or 4 bytes.
__device__ __forceinline__ void fetch(char* stream, Element type, uint64_t address, uint32_t element) {
    type == Element::kFloat32 ? fetch<4>(stream, address, element) : fetch<2>(stream, address, element);
}
__device__ __forceinline__ void take(OrderedPacket& packet, Element type, char* stream) {
    type == Element::kFloat32 ? take<4>(packet.words, stream) : take<2>(packet.words, stream);
}

// How many tiles a thread block takes, and how many are on their way to it: measured on an H200. Without scales nothing
// is gained by more than a tile. Where instructions are the bound, since there is little to read or much to do, fewer
// chunks or tiles take fewer of them.
template <class Formats>
struct Pace {
    static constexpr bool kInt8 = Formats::format == Format::kInt8;
    static constexpr bool kNoMaster = Formats::master == Master::kParameter;
    static constexpr bool kLittleToRead = kInt8 && (kNoMaster || master_bytes(Formats::master) == 1);

    static constexpr int kTilesPerChunk = !Formats::scaled     ? 1
                                          : kInt8 && kNoMaster ? kMaxTilesPerChunk
                                                               : kMaxTilesPerChunk / 2;
    static constexpr uint32_t kTilesAhead = kLittleToRead || Formats::has_weights ? 3 : 4;
};

// `usual`: see View::is_usual. What is not needs more room for a tile, and has fewer on their way.
template <class Formats, bool usual>
struct Ring {
    static constexpr Master master = Formats::master;
    static constexpr bool kReadsParam = master == Master::kParameter && reads_param(Formats::rule);
    static constexpr bool kHasParam = kReadsParam || is_remainder(master);
    static constexpr bool kHasMaster = master != Master::kParameter;
    static constexpr int kMasterBytes = kHasMaster ? master_bytes(master) : 0;
    static constexpr int kStateBytes = format_bytes(Formats::format);
    static constexpr int kStateCount = state_count(Formats::rule);
    static constexpr int kMostBytes = usual ? 2 : 4;  // of an element whose type is known at run time
    static constexpr int kParamBytes = is_remainder(master) ? 2 : kHasParam ? kMostBytes : 0;

    static constexpr uint32_t kParam = kTile * kMostBytes;  // where streams begin; gradients come first
    static constexpr uint32_t kMaster = kParam + kTile * kParamBytes;
    static constexpr uint32_t kStates = kMaster + kTile * kMasterBytes;  // one after the other
    static constexpr uint32_t kTileBytes = kStates + kStateCount * kTile * kStateBytes;
    static constexpr uint32_t kStages = usual ? Pace<Formats>::kTilesAhead : 2;
    static constexpr uint32_t kBytes = kStages * kTileBytes;

    const View& view;
    char* memory;

    // Begins the copies of a tile, if the chunk has it.
    __device__ __forceinline__ void fetch_tile(uint32_t element, uint32_t stage) const {
        char* tile = memory + stage * kTileBytes;
        if (element < view.vector_count) {
            fetch(tile, view.grad_type(), view.grad, element);
            if constexpr (kReadsParam) fetch(tile + kParam, view.param_type(), view.param, element);
            if constexpr (is_remainder(master)) fetch<2>(tile + kParam, view.param, element);
            if constexpr (kHasMaster) fetch<kMasterBytes>(tile + kMaster, view.master, element);
            each_state<Formats::rule>([&](auto state) {
                constexpr int i = decltype(state)::value;
                fetch<kStateBytes>(tile + kStates + i * kTile * kStateBytes, view.states[i], element);
            });
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    // Waits for the oldest tile. Its place is free for another one then.
    template <class Raw>
    __device__ __forceinline__ void take_tile(Raw& raw, uint32_t stage) const {
        char* tile = memory + stage * kTileBytes;
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
        __syncwarp();
        take(raw.grad, view.grad_type(), tile);
        if constexpr (kReadsParam) take(raw.param, view.param_type(), tile + kParam);
        if constexpr (is_remainder(master)) take<2>(raw.param.words, tile + kParam);
        if constexpr (kHasMaster) take<kMasterBytes>(raw.master.words, tile + kMaster);
        each_state<Formats::rule>([&](auto state) {
            constexpr int i = decltype(state)::value;
            take<kStateBytes>(raw.states[i].words, tile + kStates + i * kTile * kStateBytes);
        });
        __syncwarp();
    }
};

// Bytes that a kernel of this combination needs.
template <class Formats>
constexpr uint32_t ring_bytes() {
    if constexpr (Formats::staged) {
        constexpr uint32_t usual = Ring<Formats, true>::kBytes, any = Ring<Formats, false>::kBytes;
        return usual > any ? usual : any;
    }
    return 0;
}

}  // namespace
}  // namespace fused_optim
