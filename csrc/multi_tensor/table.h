// Structs that describe one optimizer step to an engine: addresses, sizes, formats, hyperparameters.
// No torch, no CUDA headers: both engines and the bindings share them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rules_table.h"

#if defined(__CUDACC__)
#define FUSED_OPTIM_HD __host__ __device__ __forceinline__
#else
#define FUSED_OPTIM_HD inline __attribute__((always_inline))
#endif

namespace fused_optim {

// Enums whose numbers Python knows, each a list of rows: an enumerator, Python's name for it, and what else depends on
// it. Counts, the checks of numbers that come from Python and the tables that a test compares follow from the rows.
#define FUSED_OPTIM_ENUMERATOR(enumerator, ...) enumerator,
#define FUSED_OPTIM_NAME(enumerator, name, ...) name,
#define FUSED_OPTIM_ENUM(Enum, ROWS)                                   \
    enum class Enum : uint8_t { ROWS(FUSED_OPTIM_ENUMERATOR) };        \
    template <>                                                        \
    struct EnumNames<Enum> {                                           \
        static constexpr const char* all[] = {ROWS(FUSED_OPTIM_NAME)}; \
    }

template <class Enum>
struct EnumNames;

template <class Enum>
constexpr int kCount = sizeof(EnumNames<Enum>::all) / sizeof(const char*);

// Element types of gradients, parameters and masters: bytes.
#define FUSED_OPTIM_ELEMENTS(ROW) \
    ROW(kFloat32, "FLOAT32", 4)   \
    ROW(kBFloat16, "BFLOAT16", 2) \
    ROW(kFloat16, "FLOAT16", 2)
FUSED_OPTIM_ENUM(Element, FUSED_OPTIM_ELEMENTS);

// Where the master weights live: bytes per element of the tensor beside the parameter.
#define FUSED_OPTIM_MASTERS(ROW)                                                          \
    ROW(kParameter, "PARAMETER", 0)     /* the parameter is its own master */             \
    ROW(kFloat32, "FLOAT32", 4)         /* a separate FP32 tensor */                      \
    ROW(kRemainder16, "REMAINDER16", 2) /* BF16 parameter + 16 more bits: lossless */     \
    ROW(kRemainder8, "REMAINDER8", 1)   /* BF16 parameter + 8 more bits: 24-bit master */ \
    ROW(kFloat16, "FLOAT16", 2)         /* an FP16 tensor, scaled by blocks; the parameter is its rounded value */
FUSED_OPTIM_ENUM(Master, FUSED_OPTIM_MASTERS);

// How a state is stored: bytes per element, and whether blocks have scales; else elements are stored as they are.
#define FUSED_OPTIM_FORMATS(ROW)           \
    ROW(kFloat32, "float32", 4, false)     \
    ROW(kBFloat16, "bfloat16", 2, false)   \
    ROW(kFloat16, "float16", 2, true)      \
    ROW(kFloat8, "float8_e4m3fn", 1, true) \
    ROW(kInt8, "int8", 1, true)
FUSED_OPTIM_ENUM(Format, FUSED_OPTIM_FORMATS);

// What a state holds, which decides how it is encoded: see formats.h.
#define FUSED_OPTIM_STATE_KINDS(ROW)                                 \
    ROW(kSigned, "SIGNED") /* of either sign */                      \
    ROW(kSquare, "SQUARE") /* not negative: an average of squares */ \
    ROW(kNone, "NONE")     /* the rule has fewer states */
FUSED_OPTIM_ENUM(StateKind, FUSED_OPTIM_STATE_KINDS);

FUSED_OPTIM_ENUM(Rule, FUSED_OPTIM_RULES);  // of fused_optim/rules.toml

constexpr int kMaxStates = FUSED_OPTIM_MAX_STATES;

// How a weight is quantized.
#define FUSED_OPTIM_WEIGHT_FORMATS(ROW)                                                     \
    ROW(kFloat8, "FLOAT8")              /* E4M3, one FP32 scale */                          \
    ROW(kFloat8Blocks, "FLOAT8_BLOCKS") /* E4M3, an FP32 scale per 128 elements of a row */ \
    ROW(kFloat8Tiles, "FLOAT8_TILES")   /* E4M3, an FP32 scale per 128 x 128 elements */    \
    ROW(kMXFloat8, "MXFLOAT8")          /* E4M3, an E8M0 scale per 32 elements of a row */  \
    ROW(kNVFloat4, "NVFLOAT4")          /* E2M1, an E4M3 scale per 16 elements, one FP32 scale */
FUSED_OPTIM_ENUM(WeightFormat, FUSED_OPTIM_WEIGHT_FORMATS);

// Where local elements lie in the whole parameter: in rows of `inner_local` elements that begin `inner_global` apart.
struct Geometry {
    uint64_t inner_local;
    uint64_t inner_global;

    FUSED_OPTIM_HD bool is_consecutive(uint64_t numel) const { return inner_local >= numel; }  // all lie in one row
};

FUSED_OPTIM_HD uint64_t global_index(uint64_t element, uint64_t offset, const Geometry& geometry, bool consecutive) {
    if (consecutive) return offset + element;
    return offset + element / geometry.inner_local * geometry.inner_global + element % geometry.inner_local;
}

// A state of one shard. One that the rule does not have is all zeros: without an address, and without scales.
struct State {
    uint64_t address;
    Format format;
};

// One local shard of one parameter, with everything that the update touches.
struct Shard {
    uint64_t grad;
    uint64_t param;
    uint64_t master;
    State states[kMaxStates];
    uint64_t scales;         // FP32: block scales of the states and the master, as far as they are scaled
    uint64_t weight_scales;  // of a quantized parameter: those of its blocks, or the whole one's, which is read
    uint64_t absmax;         // of a quantized parameter, FP32: raised to the new values' largest finite magnitude; or 0
    uint64_t numel;
    uint64_t offset;  // global index of element 0
    Geometry geometry;
    uint32_t key;  // rounding key of the parameter
    uint32_t group;
    Element grad_type;
    Element param_type;  // unless it is quantized
    Master master_kind;
    uint8_t block_log2;  // 5, 6 or 7
    // A quantized weight beside a master of its own, whose blocks divide its rows. `param` are its codes, or 0 if only
    // `absmax` is wanted.
    bool quantized;
    bool round_up;
    WeightFormat weight_format;

    bool is_consecutive() const { return geometry.is_consecutive(numel); }
};

// Hyperparameters of one param group. A pointer that is not null overrides the value beside it; pointers lie in
// the memory of the device that runs the step and are read during the step, never by the host.
struct Hyper {
    double lr;
    double weight_decay;
    double values[FUSED_OPTIM_MAX_HYPERPARAMETERS];  // the rule's own: Hyperparameters<rule> in update.h
    int64_t step;                                    // number of this step, from 1
    const float* lr_pointer;
    const float* grad_scale;   // gradients are divided by it, and written so
    const float* grad_factor;  // gradients are multiplied by it (deferred clipping)
    const float* found_inf;    // not 0: the step is skipped
    int64_t* step_pointer;     // steps done so far; advanced by the engine unless the step is skipped
    uint8_t decoupled;         // weight decay: of the parameter itself, else by way of the gradient
    uint8_t maximize;
    uint8_t stochastic_rounding;
};

// A number from each row, four bits each: the device cannot index a table of the host's.
template <size_t count>
constexpr uint32_t pack_digits(const int (&rows)[count]) {
    static_assert(count <= 8, "digits of 32 bits");
    uint32_t digits = 0;
    for (size_t i = 0; i < count; ++i) digits |= static_cast<uint32_t>(rows[i]) << 4 * i;
    return digits;
}

template <class Enum>
FUSED_OPTIM_HD constexpr int digit(uint32_t digits, Enum row) {
    return static_cast<int>(digits >> 4 * static_cast<int>(row) & 0xFu);
}

#define FUSED_OPTIM_BYTES(enumerator, name, bytes, ...) bytes,
#define FUSED_OPTIM_SCALED(enumerator, name, bytes, scaled) scaled,
constexpr uint32_t kElementBytes = pack_digits({FUSED_OPTIM_ELEMENTS(FUSED_OPTIM_BYTES)});
constexpr uint32_t kMasterBytes = pack_digits({FUSED_OPTIM_MASTERS(FUSED_OPTIM_BYTES)});
constexpr uint32_t kFormatBytes = pack_digits({FUSED_OPTIM_FORMATS(FUSED_OPTIM_BYTES)});
constexpr uint32_t kScaledFormats = pack_digits({FUSED_OPTIM_FORMATS(FUSED_OPTIM_SCALED)});

// Kinds of states, four bits each. Digits beyond the last state are kNone.
template <class... Kinds>
FUSED_OPTIM_HD constexpr uint32_t pack_kinds(Kinds... kinds) {
    static_assert(sizeof...(kinds) <= 8 && static_cast<int>(StateKind::kNone) == 2, "digits of 32 bits");
    uint32_t digits = 0x22222222u;
    int shift = 0;
    ((digits = (digits & ~(0xFu << shift)) | static_cast<uint32_t>(kinds) << shift, shift += 4), ...);
    return digits;
}

FUSED_OPTIM_HD constexpr uint32_t state_kinds(Rule rule) {
#define FUSED_OPTIM_KINDS(enumerator, name, kinds, ...) \
    if (rule == Rule::enumerator) return pack_kinds kinds;
    FUSED_OPTIM_RULES(FUSED_OPTIM_KINDS)
#undef FUSED_OPTIM_KINDS
    return pack_kinds();
}

FUSED_OPTIM_HD constexpr int element_bytes(Element type) { return digit(kElementBytes, type); }
FUSED_OPTIM_HD constexpr int master_bytes(Master master) { return digit(kMasterBytes, master); }
FUSED_OPTIM_HD constexpr int format_bytes(Format format) { return digit(kFormatBytes, format); }
FUSED_OPTIM_HD constexpr bool is_scaled(Format format) { return digit(kScaledFormats, format) != 0; }

FUSED_OPTIM_HD constexpr StateKind state_kind(Rule rule, int state) {
    return static_cast<StateKind>(state_kinds(rule) >> 4 * state & 0xFu);
}
FUSED_OPTIM_HD constexpr int state_count(Rule rule) {
    int count = 0;
    while (count < kMaxStates && state_kind(rule, count) != StateKind::kNone) ++count;
    return count;
}
// The size of arrays that have an element for each state: one at least.
FUSED_OPTIM_HD constexpr int state_places(Rule rule) { return state_count(rule) > 0 ? state_count(rule) : 1; }

// Whether the update reads the parameter, which else takes what the states and the gradient alone make.
FUSED_OPTIM_HD constexpr bool reads_param(Rule rule) {
#define FUSED_OPTIM_READS(enumerator, name, kinds, hyperparameters, reads) \
    if (rule == Rule::enumerator) return reads;
    FUSED_OPTIM_RULES(FUSED_OPTIM_READS)
#undef FUSED_OPTIM_READS
    return true;
}

// Which state is a square; -1: none.
FUSED_OPTIM_HD constexpr int square_state(Rule rule) {
    for (int state = 0; state < state_count(rule); ++state) {
        if (state_kind(rule, state) == StateKind::kSquare) return state;
    }
    return -1;
}

FUSED_OPTIM_HD constexpr bool is_remainder(Master master) {
    return master == Master::kRemainder16 || master == Master::kRemainder8;
}
FUSED_OPTIM_HD constexpr bool is_scaled(Master master) { return master == Master::kFloat16; }

// Whether a master has fewer bits than FP32, and rounds in the rotating way.
FUSED_OPTIM_HD constexpr bool master_rotates(Master master, Element param) {
    return master == Master::kParameter ? param != Element::kFloat32
                                        : master == Master::kRemainder8 || master == Master::kFloat16;
}

FUSED_OPTIM_HD uint64_t block_count(const Shard& shard) {
    return (shard.numel + (uint64_t{1} << shard.block_log2) - 1) >> shard.block_log2;
}

}  // namespace fused_optim
