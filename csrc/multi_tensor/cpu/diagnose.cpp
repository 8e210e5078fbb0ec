// The CPU engine's inner part for diagnostics: of elements [begin, end) of one shard, tile by tile. A tile is updated
// twice, in copies: all in FP32, which gives the values before they are rounded, and as it is stored. Compiled once per
// instruction set, under the same rules as apply.cpp.
#include "diagnose.h"

#include "cpu/tile.h"
#include "dispatch.h"
#include "rules.h"

namespace fused_optim {

uint32_t FUSED_OPTIM_JOIN(update_range_, FUSED_OPTIM_ISA)(Rule rule, const Shard& shard, const Scalars& scalars,
                                                          uint64_t begin, uint64_t end);

namespace {

constexpr int kLanes = 8;  // of sums, in a fixed order

template <class Term>
double sum(int count, const Term& term) {
    double lanes[kLanes] = {}, total = 0.0;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (int k = 0; k < kLanes; ++k) lanes[k] += term(i + k);
    }
    for (; i < count; ++i) lanes[i % kLanes] += term(i);
    for (const double lane : lanes) total += lane;
    return total;
}

double sum_of_squares(const float* values, int count) {
    return sum(count, [=](int i) { return static_cast<double>(values[i]) * static_cast<double>(values[i]); });
}

double sum_of_changes(const float* before, const float* after, int count) {
    return sum(count, [=](int i) {
        const double change = static_cast<double>(after[i]) - static_cast<double>(before[i]);
        return change * change;
    });
}

template <class Condition>
uint32_t number_of(int count, const Condition& condition) {
    uint32_t found = 0;
    for (int i = 0; i < count; ++i) found += condition(i) ? 1u : 0u;
    return found;
}

void load(float* values, Element type, uint64_t address, uint64_t first, int count) {
    const auto* raw = pointer<uint16_t>(address, first);
    if (type == Element::kFloat32) {
        std::memcpy(values, pointer<float>(address, first), sizeof(float) * count);
    } else if (type == Element::kBFloat16) {
        for (int i = 0; i < count; ++i) values[i] = bfloat16_decode(raw[i]);
    } else {
        for (int i = 0; i < count; ++i) values[i] = float16_decode(raw[i]);
    }
}

// `scales`: of the whole shard.
struct Decode {
    float* values;
    State state;
    uint64_t first;
    int count;
    const float* scales;
    int block_log2;

    void operator()(Unscaled) const { load(values, unscaled_type(state.format), state.address, first, count); }
    template <class Codec>
    void operator()(Codec) const {
        const auto* bits = pointer<typename Codec::Bits>(state.address, first);
        const int block = 1 << block_log2;
        for (int begin = 0; begin < count; begin += block) {
            const float scale = scales[(first + begin) >> block_log2];
            const int end = begin + block < count ? begin + block : count;
            for (int i = begin; i < end; ++i) values[i] = Codec::decode(bits[i], scale);
        }
    }
};

// The scales of a state, or of the master.
const float* scales_of(const Shard& shard, int state) {
    const auto* scales = reinterpret_cast<const float*>(shard.scales);
    for (int i = 0; i < state && i < kMaxStates; ++i) {
        if (is_scaled(shard.states[i].format)) scales += block_count(shard);
    }
    return scales;
}

void decode_master(float* values, const Shard& shard, uint64_t first, int count) {
    const auto* high = pointer<uint16_t>(shard.param, first);
    const auto* low = pointer<int16_t>(shard.master, first);
    const auto* low8 = pointer<int8_t>(shard.master, first);
    switch (shard.master_kind) {
        case Master::kParameter: return load(values, shard.param_type, shard.param, first, count);
        case Master::kFloat32: return load(values, Element::kFloat32, shard.master, first, count);
        case Master::kRemainder16:
            for (int i = 0; i < count; ++i) values[i] = join_remainder16(high[i], low[i]);
            return;
        case Master::kRemainder8:
            for (int i = 0; i < count; ++i) values[i] = join_remainder8(high[i], low8[i]);
            return;
        case Master::kFloat16:
            const State master{shard.master, Format::kFloat16};
            Decode{values, master, first, count, scales_of(shard, kMaxStates), shard.block_log2}(Float16Master{});
            return;
    }
}

// A copy of a shard's elements from `first` on; the address that it gives is that of element 0.
struct Copied {
    alignas(64) unsigned char bytes[sizeof(float) * kTile];

    uint64_t take(uint64_t address, uint64_t first, int count, int size) {
        std::memcpy(bytes, pointer<unsigned char>(address, first * size), static_cast<size_t>(count) * size);
        return reinterpret_cast<uint64_t>(bytes) - first * size;
    }
};

uint64_t address_of_first(const float* tile, uint64_t first) {
    return reinterpret_cast<uint64_t>(tile) - first * sizeof(float);
}

// What storing makes of `exact`: of a state with blocks. `state` and `scales`: as it would be stored.
struct CountCodes {
    StateDiagnosis& found;
    const float* exact;
    const float* kept;
    uint64_t first;
    int count;
    const float* scales;
    int block_log2;

    void operator()(Unscaled) const {}
    template <class Codec>
    void operator()(Codec) const {
        const int block = 1 << block_log2;
        for (int begin = 0; begin < count; begin += block) {
            const float scale = scales[(first + begin) >> block_log2];
            count_block(begin, begin + block < count ? block : count - begin, fabsf(Codec::decode(1u, scale)));
            found.widen(scale);
        }
    }
    void count_block(int begin, int size, float smallest) const {
        const float* const values = exact + begin;
        const float* const stored = kept + begin;
        float largest = 0.0f;
        for (int i = 0; i < size; ++i) largest = larger(fabsf(stored[i]), largest);
        found.coded += number_of(size, [=](int i) { return values[i] != 0.0f; });
        found.top += number_of(size, [=](int i) { return stored[i] != 0.0f && fabsf(stored[i]) == largest; });
        found.low += number_of(size, [=](int i) { return values[i] != 0.0f && fabsf(stored[i]) <= smallest; });
    }
};

template <Rule rule>
struct Tile {
    static constexpr int kStates = state_places(rule);
    alignas(64) float gradient[kTile];
    alignas(64) float before[kTile];
    alignas(64) float after[kTile];
    alignas(64) float rounded[kTile];
    alignas(64) float exact[kStates][kTile];
    alignas(64) float kept[kStates][kTile];
    Copied param, master, states[kStates];

    static void decode_states(float (&tile)[kStates][kTile], const Shard& shard, uint64_t first, int count) {
        each_state<rule>([&](auto state) {
            constexpr int i = decltype(state)::value;
            dispatch_codec<state_kind(rule, i)>(shard.states[i].format, Decode{tile[i], shard.states[i], first, count,
                                                                               scales_of(shard, i), shard.block_log2});
        });
    }

    // `after` and `exact`: of the step, before rounding.
    void update_values(const Shard& shard, const Scalars& scalars, uint64_t first, int count) {
        decode_master(before, shard, first, count);
        std::memcpy(after, before, sizeof before);
        decode_states(exact, shard, first, count);
        Shard values = shard;
        values.param = address_of_first(after, first);
        values.param_type = Element::kFloat32;
        values.master_kind = Master::kParameter;
        for (int i = 0; i < state_count(rule); ++i) {
            values.states[i] = {address_of_first(exact[i], first), Format::kFloat32};
        }
        update(values, scalars, first, count);
    }

    // `rounded` and `kept`: what it stores. `scales`: a copy.
    Shard update_copy(const Shard& shard, const Scalars& scalars, uint64_t scales, uint64_t first, int count) {
        Shard copy = shard;
        copy.param = param.take(shard.param, first, count, element_bytes(shard.param_type));
        if (shard.master) copy.master = master.take(shard.master, first, count, master_bytes(shard.master_kind));
        for (int i = 0; i < state_count(rule); ++i) {
            const State& state = shard.states[i];
            copy.states[i].address = states[i].take(state.address, first, count, format_bytes(state.format));
        }
        copy.scales = scales;
        update(copy, scalars, first, count);
        decode_master(rounded, copy, first, count);
        decode_states(kept, copy, first, count);
        return copy;
    }

    static void update(const Shard& shard, const Scalars& scalars, uint64_t first, int count) {
        FUSED_OPTIM_JOIN(update_range_, FUSED_OPTIM_ISA)(rule, shard, scalars, first, first + count);
    }

    void add(Diagnosis& found, const Shard& shard, const Scalars& s, uint64_t scales, uint64_t first, int count) {
        load(gradient, shard.grad_type, shard.grad, first, count);
        for (int i = 0; i < count; ++i) gradient[i] = scaled_gradient(gradient[i], s);
        update_values(shard, s, first, count);
        const Shard copy = update_copy(shard, s, scales, first, count);
        found.elements += static_cast<uint32_t>(count);
        found.update += sum_of_changes(before, after, count);
        found.weight += sum_of_squares(before, count);
        found.gradient += sum_of_squares(gradient, count);
        if (s.step_size != 0.0f) count_moves(found, s.decay != 1.0f, count);
        each_state<rule>([&](auto state) {
            constexpr int i = decltype(state)::value;
            found.states[i].value += sum_of_squares(exact[i], count);
            found.states[i].error += sum_of_changes(exact[i], kept[i], count);
            dispatch_codec<state_kind(rule, i)>(
                copy.states[i].format,
                CountCodes{found.states[i], exact[i], kept[i], first, count, scales_of(copy, i), shard.block_log2});
        });
    }

    void count_moves(Diagnosis& found, bool decays, int count) const {
        const auto moves = [&](int i) { return exact[0][i] != 0.0f || (decays && before[i] != 0.0f); };
        found.moved += number_of(count, moves);
        found.lost += number_of(count, [&](int i) { return moves(i) && rounded[i] == before[i]; });
    }
};

template <Rule rule>
void diagnose_range(const Shard& shard, const Scalars& scalars, uint64_t scales, uint64_t begin, uint64_t end,
                    double* row) {
    Diagnosis found = Diagnosis::empty();
    Tile<rule> tile;
    for (uint64_t first = begin; first < end; first += kTile) {
        tile.add(found, shard, scalars, scales, first, static_cast<int>(end - first < kTile ? end - first : kTile));
    }
    write_row<rule>(found, row);
}

}  // namespace

// `begin` is a multiple of kTile, `end` too unless it is the shard's end. `scales`: of a copy of the shard's.
void FUSED_OPTIM_JOIN(diagnose_range_, FUSED_OPTIM_ISA)(Rule rule, const Shard& shard, const Scalars& scalars,
                                                        uint64_t scales, uint64_t begin, uint64_t end, double* row) {
    DenormalsOn guard;
    dispatch_rule(rule,
                  [&](auto known) { diagnose_range<decltype(known)::value>(shard, scalars, scales, begin, end, row); });
}

}  // namespace fused_optim
