// Changed bits as indices and values, on the CPU: a unit after the other.
#include "collect.h"

#include <algorithm>

#include "cpu/threads.h"

namespace fused_optim {
namespace {

struct Unit {
    const Marked& tensor;
    uint64_t number;

    template <class Visit>
    void each_word(const Visit& visit) const {
        const uint64_t first = number * kUnitWords;
        const uint64_t last = std::min(first + kUnitWords, tensor.words());
        for (uint64_t i = first; i < last; ++i) visit(i, tensor.word(i));
    }
};

template <class Work>
void for_each_unit(const std::vector<Marked>& tensors, int threads, const Work& work) {
    std::vector<Unit> units;
    for (const Marked& tensor : tensors) {
        for (uint64_t i = 0; i < tensor.units(); ++i) units.push_back({tensor, i});
    }
    const size_t useful = std::min<size_t>(std::max(threads, 1), 1 + units.size() / 4);  // threads cost time, too
    for_each_index(units.size(), useful, [&](size_t i) { work(units[i]); });
}

}  // namespace

void count_cpu(const std::vector<Marked>& tensors, int64_t* counts, int threads) {
    for_each_unit(tensors, threads, [&](const Unit& unit) {
        int64_t count = 0;
        unit.each_word([&](uint64_t, uint32_t word) { count += __builtin_popcount(word); });
        counts[unit.tensor.first_unit + unit.number] = count;
    });
}

void collect_cpu(const std::vector<Marked>& tensors, const int64_t* counts, const int64_t* ends, int threads) {
    for_each_unit(tensors, threads, [&](const Unit& unit) {
        const Marked& tensor = unit.tensor;
        dispatch_bytes(tensor.bytes, [&](auto bits) {
            uint64_t place = tensor.place(unit.number, counts, ends);
            unit.each_word([&](uint64_t i, uint32_t word) {
                for (; word; word &= word - 1) {
                    tensor.put<decltype(bits)>(place++, i * kBitsOfWord + static_cast<uint32_t>(__builtin_ctz(word)));
                }
            });
        });
    });
}

}  // namespace fused_optim
