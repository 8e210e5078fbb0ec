// The CPU engine's casts for products: strips of 128 rows, tile by tile.
#include "cast.h"

#include <algorithm>
#include <vector>

#include "cpu/threads.h"
#include "cpu/tile.h"

namespace fused_optim {
namespace {

constexpr uint64_t kElementsPerThread = 65536;  // below this a thread costs more than it saves

// A tile of up to 128 x 128 elements. Those beyond the matrix are not there.
struct Tile {
    uint64_t row;
    uint64_t column;
    uint32_t rows;
    uint32_t columns;
};

template <class Codec>
struct Casting {
    const Cast& cast;

    float value(uint64_t row, uint64_t column) const {
        const uint16_t bits = pointer<const uint16_t>(cast.values, row * cast.columns)[column];
        return cast.half ? float16_decode(bits) : bfloat16_decode(bits);
    }
    uint8_t* codes(uint64_t row) const { return pointer<uint8_t>(cast.codes, row * cast.columns); }
    uint8_t* transposed(uint64_t column) const { return pointer<uint8_t>(cast.transposed, column * cast.rows); }

    uint32_t absmax(const Tile& tile) const {
        uint32_t largest = 0;
        for (uint64_t row = tile.row; row < tile.row + tile.rows; ++row) {
            for (uint64_t column = tile.column; column < tile.column + tile.columns; ++column) {
                largest = std::max(largest, magnitude_bits(value(row, column)));
            }
        }
        return largest;
    }
    void encode_rows(const Tile& tile, const float* inverses) const {
        for (uint32_t i = 0; i < tile.rows; ++i) {
            uint8_t* const target = codes(tile.row + i);
            for (uint64_t column = tile.column; column < tile.column + tile.columns; ++column) {
                target[column] = static_cast<uint8_t>(Codec::encode(value(tile.row + i, column) * inverses[i]));
            }
        }
    }
    void encode_columns(const Tile& tile, const float* inverses) const {
        for (uint32_t i = 0; i < tile.columns; ++i) {
            uint8_t* const target = transposed(tile.column + i);
            for (uint64_t row = tile.row; row < tile.row + tile.rows; ++row) {
                target[row] = static_cast<uint8_t>(Codec::encode(value(row, tile.column + i) * inverses[i]));
            }
        }
    }
    void encode_blocks(const Tile& tile) const {
        float inverses[kCastBlock];
        if (cast.codes) {
            float* const scales = pointer<float>(cast.scale, tile.column / kCastBlock * cast.rows + tile.row);
            for (uint32_t i = 0; i < tile.rows; ++i) {
                const Tile row{tile.row + i, tile.column, 1, tile.columns};
                scales[i] = cast_scale<Codec>(absmax(row), cast.power_of_two);
                inverses[i] = 1.0f / scales[i];
            }
            encode_rows(tile, inverses);
        }
        if (cast.transposed) {
            float* const scales =
                pointer<float>(cast.transposed_scale, tile.row / kCastBlock * cast.columns + tile.column);
            for (uint32_t i = 0; i < tile.columns; ++i) {
                const Tile column{tile.row, tile.column + i, tile.rows, 1};
                const float scale = cast_scale<Codec>(absmax(cast.tiles ? tile : column), cast.power_of_two);
                inverses[i] = 1.0f / scale;
                if (!cast.tiles) scales[i] = scale;
                if (cast.tiles) *tile_scale(tile) = scale;
            }
            encode_columns(tile, inverses);
        }
    }
    float* tile_scale(const Tile& tile) const {
        return pointer<float>(cast.transposed_scale,
                              tile.column / kCastBlock * ceil_divide(cast.rows, kCastBlock) + tile.row / kCastBlock);
    }
    void encode_delayed(const Tile& tile, float inverse) const {
        for (uint64_t row = tile.row; row < tile.row + tile.rows; ++row) {
            for (uint64_t column = tile.column; column < tile.column + tile.columns; ++column) {
                const float scaled = value(row, column) * inverse;
                const float bounded = scaled < -Codec::kLargest ? -Codec::kLargest : std::min(scaled, Codec::kLargest);
                const uint8_t code = static_cast<uint8_t>(Codec::encode(bounded));
                if (cast.codes) codes(row)[column] = code;
                if (cast.transposed) transposed(column)[row] = code;
            }
        }
    }
    // The scale of a part, `found`, and its inverse.
    float inverse_of(const Tile& part, float* found) const {
        *found = cast_scale<Codec>(absmax(part));
        return 1.0f / *found;
    }
};

// Calls work(tile) for each tile.
template <class Work>
void for_each_tile(const Cast& cast, int threads, const Work& work) {
    const uint64_t down = ceil_divide(cast.rows, kCastBlock), across = ceil_divide(cast.columns, kCastBlock);
    const uint64_t useful = cast.rows * cast.columns / kElementsPerThread;
    for_each_index(down * across, std::min<uint64_t>(useful, std::max(threads, 1)), [&](size_t i) {
        DenormalsOn guard;
        const uint64_t row = i / across * kCastBlock, column = i % across * kCastBlock;
        work(Tile{row, column, static_cast<uint32_t>(std::min<uint64_t>(cast.rows - row, kCastBlock)),
                  static_cast<uint32_t>(std::min<uint64_t>(cast.columns - column, kCastBlock))});
    });
}

template <class Codec>
uint32_t largest_of(const Casting<Codec>& casting, int threads) {
    std::atomic<uint32_t> largest{0};
    for_each_tile(casting.cast, threads, [&](const Tile& tile) {
        const uint32_t found = casting.absmax(tile);
        uint32_t known = largest;
        while (known < found && !largest.compare_exchange_weak(known, found)) {
        }
    });
    return largest;
}

template <class Work>
void with_codec(CastFormat format, const Work& work) {
    if (format == CastFormat::kE4M3) return work(CastCodec<CastFormat::kE4M3>{});
    return work(CastCodec<CastFormat::kE5M2>{});
}

}  // namespace

void cast_tensor_cpu(const Cast& cast, CastFormat format, bool measured, int threads) {
    with_codec(format, [&](auto codec) {
        using Codec = decltype(codec);
        const Casting<Codec> casting{cast};
        float* const absmax = pointer<float>(cast.absmax, 0);
        if (!measured) *absmax = bits_float(largest_of(casting, threads));
        const float scale = cast_scale<Codec>(float_bits(*absmax));
        *pointer<float>(cast.scale, 0) = scale;
        const std::vector<float> inverses(kCastBlock, 1.0f / scale);
        for_each_tile(cast, threads, [&](const Tile& tile) {
            if (cast.codes) casting.encode_rows(tile, inverses.data());
            if (cast.transposed) casting.encode_columns(tile, inverses.data());
        });
    });
}

void cast_delayed_cpu(const Cast& cast, CastFormat format, int threads) {
    with_codec(format, [&](auto codec) {
        using Codec = decltype(codec);
        const Casting<Codec> casting{cast};
        float* const history = pointer<float>(cast.history, 0);
        const float inverse = 1.0f / delayed_scale(history);
        for_each_tile(cast, threads, [&](const Tile& tile) { casting.encode_delayed(tile, inverse); });
        *pointer<float>(cast.scale, 0) = remember<Codec>(history, cast.remembered, largest_of(casting, threads));
    });
}

void cast_rows_cpu(const Cast& cast, CastFormat format, int threads) {
    with_codec(format, [&](auto codec) {
        const Casting<decltype(codec)> casting{cast};
        const uint64_t useful = cast.rows * cast.columns / kElementsPerThread;
        const uint64_t shares = std::min<uint64_t>(useful, std::max(threads, 1));
        for_each_index(cast.codes ? cast.rows : 0, shares, [&](size_t i) {
            DenormalsOn guard;
            const Tile row{i, 0, 1, static_cast<uint32_t>(cast.columns)};
            const float inverse = casting.inverse_of(row, pointer<float>(cast.scale, 0) + i);
            casting.encode_rows(row, &inverse);
        });
        for_each_index(cast.transposed ? cast.columns : 0, shares, [&](size_t i) {
            DenormalsOn guard;
            const Tile column{0, i, static_cast<uint32_t>(cast.rows), 1};
            const float inverse = casting.inverse_of(column, pointer<float>(cast.transposed_scale, 0) + i);
            casting.encode_columns(column, &inverse);
        });
    });
}

void cast_blocks_cpu(const Cast& cast, CastFormat format, int threads) {
    with_codec(format, [&](auto codec) {
        const Casting<decltype(codec)> casting{cast};
        for_each_tile(cast, threads, [&](const Tile& tile) { casting.encode_blocks(tile); });
    });
}

void transpose_cpu(const Cast& cast, int threads) {
    for_each_tile(cast, threads, [&](const Tile& tile) {
        for (uint64_t column = tile.column; column < tile.column + tile.columns; ++column) {
            uint8_t* const target = pointer<uint8_t>(cast.transposed, column * cast.rows);
            const uint8_t* const source = pointer<const uint8_t>(cast.codes, column);
            for (uint64_t row = tile.row; row < tile.row + tile.rows; ++row) target[row] = source[row * cast.columns];
        }
    });
}

}  // namespace fused_optim
