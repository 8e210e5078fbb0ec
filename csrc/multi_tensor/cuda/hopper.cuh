// What only Hopper GPUs have (sm_90a), as functions: the bulk copy engine, its barriers, clusters, products of tiles.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fused_optim::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- barriers in shared memory, by address ---------------------------------------------------------------------------

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// On the barrier at the same place of a thread block of the cluster. For what only the copy engine and products have
// read and will write: a release to the whole cluster would wait for all memory, and take a third of a product's time.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t block) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra end;\n"
        "bra again;\n"
        "end:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t block_in_cluster() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A kernel may be started while the one before it in the stream is not done, where its thread blocks have left room.
// The next one may start; until the one before is done and what it has written can be read.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Of the threads of a warpgroup; 0 is taken by __syncthreads.
__device__ __forceinline__ void sync_warpgroup(uint32_t number) {
    asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

// --- the bulk copy engine --------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap* map, uint32_t barrier, int32_t x,
                                         int32_t y, int32_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// Into both thread blocks of the cluster, whose barriers at the same place it completes.
__device__ __forceinline__ void load_box_for_both(uint32_t target, const CUtensorMap* map, uint32_t barrier, int32_t x,
                                                  int32_t y, int32_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(static_cast<uint16_t>(3))
        : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t source, int32_t x, int32_t y, int32_t z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(source), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory may be written again, but for what the last `pending` groups of stores read; until all is done.
template <int pending>
__device__ __forceinline__ void wait_for_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
__device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What threads have written to shared memory, before the copy engine reads it.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- tiles in shared memory: rows of 128 bytes, whose units of 16 bytes are permuted within every 8 rows -------------

constexpr uint32_t kAtomBytes = 1024;  // 8 rows

__device__ __forceinline__ uint32_t swizzled(uint32_t tile, uint32_t row, uint32_t unit) {
    return tile + row * 128 + ((unit ^ (row & 7)) << 4);
}

// `block_bytes`: from 64 rows (or columns) of the result to the next 64, where they are what is contiguous.
__device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t block_bytes) {
    return static_cast<uint64_t>(address >> 4 & 0x3FFF) | static_cast<uint64_t>(block_bytes >> 4) << 16 |
           static_cast<uint64_t>(kAtomBytes >> 4) << 32 | 1ull << 62;
}

// Four 8 x 8 matrices, as the sums lie in registers; `address`: of a row, by thread.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&values)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values[0]),
                 "r"(values[1]), "r"(values[2]), "r"(values[3])
                 : "memory");
}

__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t (&values)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
                 : "memory");
}

// The other way round, of what the copy engine has written.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t* values) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(address)
                 : "memory");
}

// --- products --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// clang-format off
#define FUSED_OPTIM_SUMS_8(i) \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), \
    "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define FUSED_OPTIM_SUMS_32(i) \
    FUSED_OPTIM_SUMS_8(i), FUSED_OPTIM_SUMS_8(i + 8), FUSED_OPTIM_SUMS_8(i + 16), FUSED_OPTIM_SUMS_8(i + 24)
#define FUSED_OPTIM_NAMES_0 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FUSED_OPTIM_NAMES_1 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FUSED_OPTIM_NAMES_2 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FUSED_OPTIM_NAMES_3 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// Their names, then those of the other operands, which follow them.
#define FUSED_OPTIM_MULTIPLY(columns, names, left_name, right_name, left_form, right_form, ...) \
    asm volatile("{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\n"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.f16.f16 {" names "}, "                  \
                 left_name ", " right_name ", adds, 1, 1, " left_form ", " right_form ";\n}"                  \
                 : __VA_ARGS__                                                                                \
                 : "l"(left), "l"(right), "n"(left_across), "n"(right_across))
// clang-format on

// sums (64 x 64 * boxes) += left (64 x 16) * right (16 x 64 * boxes), FP16. A thread has 32 of each
// 64 x 64: of 8 columns, four. The other sums are left alone.
// `left_across`, `right_across`: rows of the left factor, columns of the right one are what is contiguous.
template <int boxes, bool left_across, bool right_across>
__device__ __forceinline__ void multiply(float (&sums)[128], uint64_t left, uint64_t right) {
    static_assert(boxes >= 1 && boxes <= 4);
    if constexpr (boxes == 1)
        FUSED_OPTIM_MULTIPLY("64", FUSED_OPTIM_NAMES_0, "%32", "%33", "%34", "%35", FUSED_OPTIM_SUMS_32(0));
    if constexpr (boxes == 2)
        FUSED_OPTIM_MULTIPLY("128", FUSED_OPTIM_NAMES_0 FUSED_OPTIM_NAMES_1, "%64", "%65", "%66", "%67",
                             FUSED_OPTIM_SUMS_32(0), FUSED_OPTIM_SUMS_32(32));
    if constexpr (boxes == 3)
        FUSED_OPTIM_MULTIPLY("192", FUSED_OPTIM_NAMES_0 FUSED_OPTIM_NAMES_1 FUSED_OPTIM_NAMES_2, "%96", "%97", "%98",
                             "%99", FUSED_OPTIM_SUMS_32(0), FUSED_OPTIM_SUMS_32(32), FUSED_OPTIM_SUMS_32(64));
    if constexpr (boxes == 4)
        FUSED_OPTIM_MULTIPLY("256", FUSED_OPTIM_NAMES_0 FUSED_OPTIM_NAMES_1 FUSED_OPTIM_NAMES_2 FUSED_OPTIM_NAMES_3,
                             "%128", "%129", "%130", "%131", FUSED_OPTIM_SUMS_32(0), FUSED_OPTIM_SUMS_32(32),
                             FUSED_OPTIM_SUMS_32(64), FUSED_OPTIM_SUMS_32(96));
}

#undef FUSED_OPTIM_MULTIPLY
#undef FUSED_OPTIM_NAMES_3
#undef FUSED_OPTIM_NAMES_2
#undef FUSED_OPTIM_NAMES_1
#undef FUSED_OPTIM_NAMES_0
#undef FUSED_OPTIM_SUMS_32
#undef FUSED_OPTIM_SUMS_8

}  // namespace fused_optim::hopper
