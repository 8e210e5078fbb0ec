// Prints which blocks of which results clusters make: batch, rows, columns, symmetric, clusters ->
// a line per block: cluster, matrix, row, column, whether it is made by half. Compiled by test_product_blocks.py.
#include "cuda/product_blocks.h"

#include <cstdio>
#include <cstdlib>

int main(int, char** arguments) {
    const auto given = [&](int i) { return static_cast<uint32_t>(std::atoi(arguments[i])); };
    const auto blocks = fused_optim::share_blocks(given(1), given(2), given(3), given(4) != 0, given(5));
    for (uint32_t cluster = 0; cluster < blocks.clusters; ++cluster) {
        for (uint32_t i = 0; blocks.number(cluster, i) != fused_optim::kNoBlock; ++i) {
            const fused_optim::Place place = blocks.place(blocks.number(cluster, i));
            std::printf("%u %u %u %u %d\n", cluster, place.matrix, place.row, place.column, place.is_halved);
        }
    }
}
