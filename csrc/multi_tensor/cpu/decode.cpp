// The CPU engine's decoding for checkpoints.
#include "decode.h"

#include <algorithm>

#include "formats.h"

namespace fused_optim {
namespace {

template <class Codec>
void decode(const StoredState& state, float* values) {
    const auto* bits = reinterpret_cast<const typename Codec::Bits*>(state.bits);
    const auto* scale = reinterpret_cast<const float*>(state.scale);
    for (uint64_t first = 0; first < state.numel; first += state.block, ++scale) {
        const float factor = *scale;
        const uint64_t last = std::min(first + state.block, state.numel);
        for (uint64_t i = first; i < last; ++i) values[i] = Codec::decode(bits[i], factor);
    }
}

void decode_bfloat16(const StoredState& state, float* values) {
    const auto* bits = reinterpret_cast<const uint16_t*>(state.bits);
    for (uint64_t i = 0; i < state.numel; ++i) values[i] = bfloat16_decode(bits[i]);
}

template <Format format>
void decode_format(const StoredState& state, float* values) {
    if constexpr (!is_scaled(format)) {
        if (format == Format::kBFloat16) decode_bfloat16(state, values);
    } else if (state.kind == StateKind::kSquare) {
        decode<SquareCodec<format>>(state, values);
    } else {
        decode<SignedCodec<format>>(state, values);
    }
}

}  // namespace

void decode_state_cpu(const StoredState& state, float* values) {
#define FUSED_OPTIM_DECODE(format, ...) \
    case Format::format: return decode_format<Format::format>(state, values);
    switch (state.format) { FUSED_OPTIM_FORMATS(FUSED_OPTIM_DECODE) }
#undef FUSED_OPTIM_DECODE
}

void join_remainder_cpu(const uint16_t* high, const int16_t* low, uint64_t numel, float* values) {
    for (uint64_t i = 0; i < numel; ++i) values[i] = join_remainder16(high[i], low[i]);
}

void join_remainder_cpu(const uint16_t* high, const int8_t* low, uint64_t numel, float* values) {
    for (uint64_t i = 0; i < numel; ++i) values[i] = join_remainder8(high[i], low[i]);
}

}  // namespace fused_optim
