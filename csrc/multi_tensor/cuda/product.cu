// Products on Hopper GPUs. A cluster of two thread blocks makes a block of 256 x 256 of a result, each of them 128
// rows: one warp has the copy engine fetch slices of both factors ahead, the right one's for both thread blocks at
// once; two warpgroups multiply, and write what they have through shared memory. Of a symmetric result, the boxes of
// 64 x 64 on and below the diagonal are made, and those below are written transposed, too. Each block is summed up in
// the same order, wherever it is made.
#if !defined(FUSED_OPTIM_WITHOUT_HOPPER)

#include <cuda_fp16.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/device.h"
#include "cuda/hopper.cuh"
#include "cuda/product_blocks.h"
#include "product.h"

namespace fused_optim {
namespace {

constexpr const char* kName = "matrix_product";  // in errors
constexpr int kMaxDevices = 64;

constexpr int kRows = 128;        // of a thread block's part of the result
constexpr int kColumns = kBlock;  // of it, and of the cluster's
constexpr int kDepth = 64;        // of the slices: rows of 128 bytes
constexpr int kStages = 4;        // slices that are there or on their way
constexpr int kLeftBytes = kRows * kDepth * 2;
constexpr int kRightBytes = kColumns * kDepth * 2;
constexpr int kStageBytes = kLeftBytes + kRightBytes;
constexpr int kBoxBytes = 64 * 64 * 2;
constexpr int kResultBytes = 2 * 2 * kBoxBytes;  // of each warpgroup: 64 columns, and the same transposed
constexpr int kSharedBytes = kStages * kStageBytes + kResultBytes + 2 * kStages * 8 + hopper::kAtomBytes;
constexpr int kThreadsOfProduct = 3 * 128;
constexpr int kArrivals = 2 * 2 * 4;  // of the warps that multiply, in both thread blocks

struct Factors {
    CUtensorMap left;
    CUtensorMap right;
    CUtensorMap result;
    uint32_t inner;
    float alpha, beta, gamma;
    ProductBlocks blocks;
    bool to_bfloat16;
};

// Which 64 rows of a block a warpgroup of a thread block makes. Of the 4 x 4 boxes of a halved block, those of its row
// up to the diagonal: five in each thread block.
__device__ __forceinline__ uint32_t row_of_boxes(const Place& place, uint32_t block, uint32_t warpgroup) {
    return !place.is_halved ? 2 * block + warpgroup : warpgroup ? 3 - block : block;
}

// Which slice's memory is next, and how often it has been gone through.
struct Stage {
    uint32_t index = 0, parity = 0;

    __device__ void advance() {
        if (++index == kStages) {
            index = 0;
            parity ^= 1;
        }
    }
};

struct SharedMemory {
    uint32_t base;

    __device__ uint32_t left(uint32_t stage) const { return base + stage * kStageBytes; }
    __device__ uint32_t right(uint32_t stage) const { return left(stage) + kLeftBytes; }
    __device__ uint32_t result(uint32_t warpgroup) const {
        return base + kStages * kStageBytes + warpgroup * 2 * kBoxBytes;
    }
    __device__ uint32_t full(uint32_t stage) const { return base + kStages * kStageBytes + kResultBytes + 8 * stage; }
    __device__ uint32_t empty(uint32_t stage) const { return full(stage) + 8 * kStages; }
};

template <bool left_transposed, bool right_transposed>
__device__ __forceinline__ void fetch(const Factors& f, const SharedMemory& shared, uint32_t block, uint32_t cluster) {
    Stage stage;
    for (uint32_t i = 0, number; (number = f.blocks.number(cluster, i)) != kNoBlock; ++i) {
        const Place place = f.blocks.place(number);
        const int32_t z = static_cast<int32_t>(place.matrix);
        const uint32_t top = place.row * kColumns;
        const auto upper = static_cast<int32_t>(top + 64 * row_of_boxes(place, block, 0));
        const auto lower = static_cast<int32_t>(top + 64 * row_of_boxes(place, block, 1));
        const int32_t column = static_cast<int32_t>(place.column * kColumns + block * kRows);  // of half a slice
        for (int32_t k = 0; k < static_cast<int32_t>(f.inner); k += kDepth, stage.advance()) {
            hopper::wait(shared.empty(stage.index), stage.parity ^ 1);
            const uint32_t full = shared.full(stage.index);
            const uint32_t left = shared.left(stage.index);
            const uint32_t right = shared.right(stage.index) + block * (kRightBytes / 2);
            hopper::expect_bytes(full, kStageBytes);
            if constexpr (left_transposed) {
                hopper::load_box(left, &f.left, full, upper, k, z);
                hopper::load_box(left + kBoxBytes, &f.left, full, lower, k, z);
            } else {
                hopper::load_box(left, &f.left, full, k, upper, z);
                hopper::load_box(left + kBoxBytes, &f.left, full, k, lower, z);
            }
            if constexpr (right_transposed) {
                hopper::load_box_for_both(right, &f.right, full, k, column, z);
            } else {
                hopper::load_box_for_both(right, &f.right, full, column, k, z);
                hopper::load_box_for_both(right + kBoxBytes, &f.right, full, column + 64, k, z);
            }
        }
    }
}

__device__ __forceinline__ uint32_t packed(float low, float high, bool to_bfloat16) {
    uint32_t halves, bfloats;  // both, rather than a branch for each pair
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bfloats) : "f"(high), "f"(low));
    return to_bfloat16 ? bfloats : halves;
}

// The part of the result that a warpgroup makes: 64 rows, from `row` on, of so many times 64 columns.
struct Part {
    uint32_t matrix, row, column;
    uint32_t boxes, mirrored_boxes;  // the first of them
    bool on_diagonal;

    __device__ Part(const Factors& f, const Place& place, uint32_t block, uint32_t warpgroup) {
        const uint32_t boxes_above = row_of_boxes(place, block, warpgroup);
        matrix = place.matrix;
        row = place.row * kColumns + 64 * boxes_above;
        column = place.column * kColumns;
        boxes = place.is_halved ? boxes_above + 1 : kColumns / 64;
        mirrored_boxes = place.is_halved ? boxes_above : f.blocks.halved ? boxes : 0;
        on_diagonal = place.row == place.column;
    }
};

// Where a thread's row is in a box, of the two times two matrices of 8 x 8 that are a warp's 16 rows of 16 columns.
__device__ __forceinline__ uint32_t place_of_pair(uint32_t box, uint32_t warp, uint32_t lane, uint32_t pair) {
    return hopper::swizzled(box, 16 * warp + lane % 16, 2 * pair + lane / 16);
}

template <bool adds_left>
__device__ __forceinline__ void write(const Factors& f, const SharedMemory& shared, const Part& part,
                                      uint32_t warpgroup, float (&sums)[128],
                                      const uint32_t (&added)[adds_left ? 64 : 1]) {
    const uint32_t thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const bool is_symmetric = f.blocks.halved;
#pragma unroll
    for (uint32_t box = 0; box < kColumns / 64; ++box) {
        if (box == part.boxes) break;
        const bool mirrored = box < part.mirrored_boxes;
        // Where nothing is mirrored, one box is written while the copy engine reads the last one.
        const uint32_t plain = shared.result(warpgroup) + (is_symmetric ? 0 : box % 2 * kBoxBytes);
        const uint32_t transposed = shared.result(warpgroup) + kBoxBytes;
#pragma unroll
        for (uint32_t i = 32 * box; i < 32 * (box + 1); ++i) sums[i] *= f.alpha;
        if (part.on_diagonal && f.gamma != 0.0f) {
            const uint32_t row = part.row + 16 * warp + lane / 4, column = part.column + 2 * (lane % 4);
#pragma unroll
            for (uint32_t i = 32 * box; i < 32 * (box + 1); ++i) {
                if (column + 8 * (i / 4) + i % 2 == row + 8 * (i / 2 % 2)) sums[i] += f.gamma;
            }
        }
        if (thread == 0) is_symmetric ? hopper::wait_for_reads<0>() : hopper::wait_for_reads<1>();
        hopper::sync_warpgroup(1 + warpgroup);
#pragma unroll
        for (uint32_t pair = 0; pair < 4; ++pair) {  // of 8 columns
            uint32_t values[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {  // rows 0 to 7, 8 to 15; the next columns
                const uint32_t eight = 8 * box + 2 * pair + i / 2;
                float low = sums[4 * eight + 2 * (i % 2)], high = sums[4 * eight + 2 * (i % 2) + 1];
                if constexpr (adds_left) {
                    __half2 own;
                    memcpy(&own, &added[2 * eight + i % 2], 4);
                    low += f.beta * __low2float(own);
                    high += f.beta * __high2float(own);
                }
                values[i] = packed(low, high, f.to_bfloat16);
            }
            const uint32_t matrix = lane / 8, half = matrix % 2, eight = 2 * pair + matrix / 2;
            hopper::store_matrices(place_of_pair(plain, warp, lane, pair), values);
            if (mirrored) {
                hopper::store_transposed(hopper::swizzled(transposed, 8 * eight + lane % 8, 2 * warp + half), values);
            }
        }
        hopper::fence_shared();
        hopper::sync_warpgroup(1 + warpgroup);
        if (thread == 0) {
            const int32_t x = static_cast<int32_t>(part.column + 64 * box), y = static_cast<int32_t>(part.row);
            hopper::store_box(&f.result, plain, x, y, static_cast<int32_t>(part.matrix));
            if (mirrored) hopper::store_box(&f.result, transposed, y, x, static_cast<int32_t>(part.matrix));
            hopper::commit_stores();
        }
    }
}

// What a slice of the left factor holds of the addend: 64 rows and columns, as the sums lie in registers.
__device__ __forceinline__ void load_addend(uint32_t* added, uint32_t left) {
    const uint32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t pair = 0; pair < 4; ++pair)
        hopper::load_matrices(place_of_pair(left, warp, lane, pair), added + 4 * pair);
}

// Which slices a warpgroup has multiplied by and not released yet.
struct Slices {
    Stage next, used;

    __device__ void release(const SharedMemory& shared) {
        const uint32_t lane = threadIdx.x % 32;
        if (lane < 2) hopper::arrive_at(shared.empty(used.index), lane);
        used.advance();
    }
};

template <int boxes, bool left_transposed, bool right_transposed, bool adds_left>
__device__ __forceinline__ void sum_up(float (&sums)[128], uint32_t (&added)[adds_left ? 64 : 1], Slices& slices,
                                       const Factors& f, const SharedMemory& shared, uint32_t first_column,
                                       uint32_t warpgroup) {
    constexpr uint32_t kLeftStep = left_transposed ? 16 * 128 : 32;  // bytes to the next 16 of the inner dimension
    constexpr uint32_t kRightStep = right_transposed ? 32 : 16 * 128;
    for (uint32_t k = 0; k < f.inner; k += kDepth, slices.next.advance()) {
        const uint32_t stage = slices.next.index;
        hopper::wait(shared.full(stage), slices.next.parity);
        const uint32_t left = shared.left(stage) + warpgroup * kBoxBytes, right = shared.right(stage);
        hopper::begin_products();
#pragma unroll
        for (uint32_t i = 0; i < kDepth / 16; ++i) {
            hopper::multiply<boxes, left_transposed, !right_transposed>(
                sums, hopper::describe(left + i * kLeftStep, kBoxBytes),
                hopper::describe(right + i * kRightStep, kBoxBytes));
        }
        hopper::commit_products();
        if constexpr (adds_left) {
#pragma unroll
            for (uint32_t box = 0; box < boxes; ++box) {
                if (k == first_column + 64 * box) load_addend(&added[16 * box], left);
            }
        }
        if (k > 0) {
            hopper::wait_for_products<1>();
            slices.release(shared);
        }
    }
    hopper::wait_for_products<0>();
    slices.release(shared);
}

template <bool left_transposed, bool right_transposed, bool adds_left>
__device__ __forceinline__ void multiply_all(const Factors& f, const SharedMemory& shared, uint32_t block,
                                             uint32_t cluster) {
    const uint32_t warpgroup = threadIdx.x / 128 - 1;
    Slices slices;
    for (uint32_t i = 0, number; (number = f.blocks.number(cluster, i)) != kNoBlock; ++i) {
        const Part part(f, f.blocks.place(number), block, warpgroup);
        uint32_t added[adds_left ? 64 : 1] = {};
        float sums[128] = {};
        auto sum = [&](auto boxes) {
            sum_up<boxes, left_transposed, right_transposed, adds_left>(sums, added, slices, f, shared, part.column,
                                                                        warpgroup);
        };
        switch (part.boxes) {
            case 1: sum(std::integral_constant<int, 1>()); break;
            case 2: sum(std::integral_constant<int, 2>()); break;
            case 3: sum(std::integral_constant<int, 3>()); break;
            default: sum(std::integral_constant<int, 4>());
        }
        write<adds_left>(f, shared, part, warpgroup, sums, added);
    }
    if (threadIdx.x % 128 == 0) hopper::wait_for_stores();
}

template <bool left_transposed, bool right_transposed, bool adds_left>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreadsOfProduct, 1)
    matrix_product(const __grid_constant__ Factors f) {
    extern __shared__ uint8_t memory[];
    // The same in both thread blocks.
    const SharedMemory shared{(hopper::shared_address(memory) + hopper::kAtomBytes - 1) / hopper::kAtomBytes *
                              hopper::kAtomBytes};
    const uint32_t block = hopper::block_in_cluster();
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < kStages; ++stage) {
            hopper::init_barrier(shared.full(stage), 1);
            hopper::init_barrier(shared.empty(stage), kArrivals);
        }
        hopper::fence_barriers();
        for (const CUtensorMap* map : {&f.left, &f.right, &f.result}) hopper::prefetch_map(map);
    }
    hopper::sync_cluster();
    hopper::let_next_start();
    hopper::wait_for_previous();
    const uint32_t cluster = blockIdx.x / 2;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) fetch<left_transposed, right_transposed>(f, shared, block, cluster);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        multiply_all<left_transposed, right_transposed, adds_left>(f, shared, block, cluster);
    }
    __syncwarp();
    hopper::sync_cluster();  // the other thread block may write here and arrive at barriers until then
}

// --- the launch ------------------------------------------------------------------------------------------------------

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode(int device) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status),
               kName, device);
#else
    check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &status), kName, device);
#endif
    if (!found) throw std::runtime_error("fused_optim: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(found);
}

// Of matrices (batch, rows, columns), boxes of box_rows x 64.
CUtensorMap map_of(uint64_t address, uint32_t batch, uint32_t rows, uint32_t columns, uint32_t box_rows, int device) {
    static const Encode encode = find_encode(device);
    CUtensorMap map;
    const cuuint64_t sizes[] = {columns, rows, batch};
    const cuuint64_t strides[] = {uint64_t{2} * columns, uint64_t{2} * columns * rows};  // bytes
    const cuuint32_t box[] = {64, box_rows, 1}, steps[] = {1, 1, 1};
    const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, reinterpret_cast<void*>(address), sizes,
                                   strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw std::runtime_error("fused_optim: matrix_product: cuTensorMapEncodeTiled failed with error " +
                                 std::to_string(static_cast<int>(result)));
    return map;
}

// `inner_first`: (inner, size) in boxes of 64 x 64, else (size, inner).
CUtensorMap map_of_factor(uint64_t address, bool inner_first, const MatrixProduct& p, uint32_t size, uint32_t box_rows,
                          int device) {
    return inner_first ? map_of(address, p.batch, p.inner, size, 64, device)
                       : map_of(address, p.batch, size, p.inner, box_rows, device);
}

cudaLaunchConfig_t launch_config(uint32_t clusters, cudaStream_t stream) {
    cudaLaunchConfig_t config{};
    config.gridDim = 2 * clusters;
    config.blockDim = kThreadsOfProduct;
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    return config;
}

// How many clusters run at once, which results do not depend on. The kernel is loaded then.
template <bool left_transposed, bool right_transposed, bool adds_left>
uint32_t clusters_at_once(int device) {
    constexpr auto kernel = matrix_product<left_transposed, right_transposed, adds_left>;
    static std::atomic<int> known[kMaxDevices] = {};  // by device
    std::atomic<int>& clusters = known[std::min(device, kMaxDevices - 1)];
    if (int count = clusters.load(std::memory_order_relaxed)) return static_cast<uint32_t>(count);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), kName, device);
    int count = 0;
    const cudaLaunchConfig_t config = launch_config(1, nullptr);
    check_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &config), kName, device);
    count = std::max(1, count);
    clusters.store(count, std::memory_order_relaxed);
    return static_cast<uint32_t>(count);
}

template <bool left_transposed, bool right_transposed, bool adds_left>
void launch(Factors& factors, const MatrixProduct& p, int device, cudaStream_t stream) {
    factors.blocks = share_blocks(p.batch, p.rows, p.columns, p.symmetric,
                                  clusters_at_once<left_transposed, right_transposed, adds_left>(device));
    cudaLaunchConfig_t config = launch_config(factors.blocks.clusters, stream);
    cudaLaunchAttribute starts_early{};
    starts_early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    starts_early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &starts_early;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, matrix_product<left_transposed, right_transposed, adds_left>, factors),
               kName, device);
}

}  // namespace

bool has_products_cuda(int device) {
    int major = 0, minor = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), kName, device);
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), kName, device);
    return major == 9 && minor == 0;
}

void matrix_product_cuda(const MatrixProduct& p, int device, uint64_t stream_handle) {
    CudaDeviceGuard guard(kName, device);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
    Factors factors{map_of_factor(p.left, p.left_transposed, p, p.rows, 64, device),
                    map_of_factor(p.right, !p.right_transposed, p, p.columns, kRows, device),
                    map_of(p.result, p.batch, p.rows, p.columns, 64, device),
                    p.inner,
                    p.alpha,
                    p.beta,
                    p.gamma,
                    {},
                    p.result_type == Element::kBFloat16};
    if (!p.left_transposed && !p.right_transposed)
        return p.beta != 0.0f ? launch<false, false, true>(factors, p, device, stream)
                              : launch<false, false, false>(factors, p, device, stream);
    if (p.left_transposed && !p.right_transposed && p.beta == 0.0f)
        return launch<true, false, false>(factors, p, device, stream);
    if (!p.left_transposed && p.right_transposed && p.beta == 0.0f)
        return launch<false, true, false>(factors, p, device, stream);
    throw std::invalid_argument("fused_optim: matrix_product: there is no such form");
}

void load_product_kernels(int device) {
    CudaDeviceGuard guard(kName, device);
    if (!has_products_cuda(device)) return;
    clusters_at_once<true, false, false>(device);
    clusters_at_once<false, true, false>(device);
    clusters_at_once<false, false, true>(device);
    clusters_at_once<false, false, false>(device);
}

}  // namespace fused_optim

#else

#include <stdexcept>

#include "product.h"

namespace fused_optim {

bool has_products_cuda(int) { return false; }
void matrix_product_cuda(const MatrixProduct&, int, uint64_t) { throw std::logic_error("fused_optim: no products"); }
void load_product_kernels(int) {}

}  // namespace fused_optim

#endif
