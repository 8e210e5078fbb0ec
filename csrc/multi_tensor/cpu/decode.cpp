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

template <Format format>
void decode_kind(const StoredState& state, float* values) {
    if (state.kind == StateKind::kSquare) {
        decode<SquareCodec<format>>(state, values);
    } else {
        decode<SignedCodec<format>>(state, values);
    }
}

void decode_bfloat16(const StoredState& state, float* values) {
    const auto* bits = reinterpret_cast<const uint16_t*>(state.bits);
    for (uint64_t i = 0; i < state.numel; ++i) values[i] = bfloat16_decode(bits[i]);
}

}  // namespace

void decode_state_cpu(const StoredState& state, float* values) {
    switch (state.format) {
        case Format::kFloat16: return decode_kind<Format::kFloat16>(state, values);
        case Format::kFloat8: return decode_kind<Format::kFloat8>(state, values);
        case Format::kInt8: return decode_kind<Format::kInt8>(state, values);
        case Format::kBFloat16: return decode_bfloat16(state, values);
        case Format::kFloat32: return;  // as it is
    }
}

void join_remainder_cpu(const uint16_t* high, const int16_t* low, uint64_t numel, float* values) {
    for (uint64_t i = 0; i < numel; ++i) values[i] = join_remainder16(high[i], low[i]);
}

void join_remainder_cpu(const uint16_t* high, const int8_t* low, uint64_t numel, float* values) {
    for (uint64_t i = 0; i < numel; ++i) values[i] = join_remainder8(high[i], low[i]);
}

}  // namespace fused_optim
