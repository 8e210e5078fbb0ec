// Which blocks of 256 x 256 of results a product makes, and which cluster of thread blocks makes which.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "table.h"

namespace fused_optim {

constexpr uint32_t kBlock = 256;
constexpr uint32_t kNoBlock = UINT32_MAX;

struct Place {
    uint32_t matrix, row, column;  // in blocks
    bool is_halved;                // on the diagonal of a symmetric result
};

// Of symmetric results, blocks on the diagonal take five eighths of the time of those below it. So clusters make
// different numbers of both, such that all are done at about the same time: first each makes `rounds` whole blocks,
// then `halving` clusters make those on diagonals, and the others the rest of the whole ones.
struct ProductBlocks {
    uint32_t down, across;   // of one result
    uint32_t whole, halved;  // how many there are in all results, and how they are numbered: whole ones first
    uint32_t whole_in_one;   // result
    uint32_t clusters, rounds, halving;

    // The i-th block of a cluster; kNoBlock: it has made all of its own.
    FUSED_OPTIM_HD uint32_t number(uint32_t cluster, uint32_t i) const {
        if (i < rounds) return i * clusters + cluster;
        const bool is_halving = cluster < halving;
        const uint32_t found = is_halving ? whole + (i - rounds) * halving + cluster
                                          : rounds * clusters + (i - rounds) * (clusters - halving) + cluster - halving;
        return found < (is_halving ? whole + halved : whole) ? found : kNoBlock;
    }

    FUSED_OPTIM_HD Place place(uint32_t number) const {
        if (number >= whole) {
            const uint32_t at = (number - whole) % down;
            return {(number - whole) / down, at, at, true};
        }
        const uint32_t matrix = number / whole_in_one, n = number % whole_in_one;
        if (!halved) return {matrix, n / across, n % across, false};
        auto row = static_cast<uint32_t>((std::sqrt(8.0f * static_cast<float>(n) + 1.0f) + 1.0f) * 0.5f);
        while (row * (row - 1) / 2 > n) --row;  // of roots that were rounded
        while (row * (row + 1) / 2 <= n) ++row;
        return {matrix, row, n - row * (row - 1) / 2, false};
    }
};

inline ProductBlocks share_blocks(uint32_t batch, uint32_t rows, uint32_t columns, bool symmetric,
                                  uint32_t most_clusters) {
    constexpr uint32_t kWholeTime = 8, kHalvedTime = 5;
    constexpr uint32_t kLastRounds = 8;  // in which halving clusters differ from the others, at most
    const auto ceil_div = [](uint32_t a, uint32_t b) { return (a + b - 1) / b; };
    ProductBlocks b{};
    b.down = ceil_div(rows, kBlock);
    b.across = ceil_div(columns, kBlock);
    b.whole_in_one = symmetric ? b.down * (b.down - 1) / 2 : b.down * b.across;
    b.whole = batch * b.whole_in_one;
    b.halved = symmetric ? batch * b.down : 0;
    b.clusters = std::min(most_clusters, b.whole + b.halved);
    b.rounds = b.whole / b.clusters;
    if (!b.halved) return b;
    uint32_t least = UINT32_MAX;
    const uint32_t most_rounds = b.rounds;
    for (uint32_t rounds = most_rounds - std::min(most_rounds, kLastRounds); rounds <= most_rounds; ++rounds) {
        const uint32_t left = b.whole - rounds * b.clusters;
        for (uint32_t halving = left ? b.clusters - 1 : b.clusters; halving > 0; --halving) {
            const uint32_t others = b.clusters - halving;
            const uint32_t time =
                std::max(kHalvedTime * ceil_div(b.halved, halving), kWholeTime * (left ? ceil_div(left, others) : 0));
            if (kWholeTime * rounds + time >= least) continue;
            least = kWholeTime * rounds + time;
            b.rounds = rounds;
            b.halving = halving;
        }
    }
    return b;
}

}  // namespace fused_optim
