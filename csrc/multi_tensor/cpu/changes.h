// Which elements of a tile's parameter an update changes: what was stored is compared with what is. Under the same
// rules as tile.h.
#pragma once

#include "cpu/tile.h"
#include "quantize.h"

namespace fused_optim {
namespace {

template <class Bits>
void mark(uint64_t bits, uint64_t element, const uint8_t* before, const uint8_t* now, int count) {
    uint8_t* const target = reinterpret_cast<uint8_t*>(bits);
    for (int first = 0; first < count; first += 8) {
        uint32_t changed = 0;
        for (int i = first; i < first + 8 && i < count; ++i) {
            Bits was, is;
            std::memcpy(&was, before + i * sizeof(Bits), sizeof(Bits));
            std::memcpy(&is, now + i * sizeof(Bits), sizeof(Bits));
            changed |= static_cast<uint32_t>(was != is) << (i - first);
        }
        if (!changed) continue;
        // Scales of a tile may begin within a byte, which belongs to the same thread's chunk.
        changed <<= (element + first) % 8;
        target[(element + first) / 8] |= static_cast<uint8_t>(changed);
        if (changed >> 8) target[(element + first) / 8 + 1] |= static_cast<uint8_t>(changed >> 8);
    }
}

void mark(uint64_t bits, uint64_t element, int bytes, const uint8_t* before, uint64_t address, int count) {
    const uint8_t* const now = reinterpret_cast<const uint8_t*>(address) + element * bytes;
    if (bytes == 1) return mark<uint8_t>(bits, element, before, now, count);
    if (bytes == 2) return mark<uint16_t>(bits, element, before, now, count);
    mark<uint32_t>(bits, element, before, now, count);
}

// The stored parameter of a tile, taken before the update.
class StoredTile {
public:
    StoredTile(const Shard& shard, uint64_t element, int count)
        : shard_(shard),
          element_(element),
          count_(count),
          bytes_(shard.quantized ? 1 : element_bytes(shard.param_type)) {
        copy(values_, shard.param, element, bytes_, count);
        if (!shard.scale_changes) return;
        dispatch_weight(shard.weight_format, [&](auto codec) {
            using Scale = typename decltype(codec)::Scale;
            if constexpr (!std::is_void_v<Scale>) {
                constexpr int block = static_cast<int>(decltype(codec)::kBlock);
                scale_bytes_ = sizeof(Scale);
                first_scale_ = element / block;
                scale_count_ = (count + block - 1) / block;
            }
        });
        copy(scales_, shard.weight_scales, first_scale_, scale_bytes_, scale_count_);
    }

    // After it.
    void mark_changes() const {
        mark(shard_.changes, element_, bytes_, values_, shard_.param, count_);
        if (scale_count_) {
            mark(shard_.scale_changes, first_scale_, scale_bytes_, scales_, shard_.weight_scales, scale_count_);
        }
    }

private:
    static void copy(uint8_t* target, uint64_t address, uint64_t element, int bytes, int count) {
        std::memcpy(target, reinterpret_cast<const uint8_t*>(address) + element * bytes,
                    static_cast<size_t>(bytes) * count);
    }

    const Shard& shard_;
    uint64_t element_;
    int count_, bytes_;
    uint64_t first_scale_ = 0;
    int scale_bytes_ = 0, scale_count_ = 0;
    alignas(64) uint8_t values_[4 * kTile];
    uint8_t scales_[4 * kTile / 32];
};

}  // namespace
}  // namespace fused_optim
