// Changed bits as indices and values, on the CPU: a unit after the other.
#include "collect.h"

#include <algorithm>
#include <cstring>

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

    void copy() const {
        const uint64_t first = number * kUnitBits;
        const uint64_t count = std::min(kUnitBits, tensor.numel - first);
        std::memcpy(reinterpret_cast<uint8_t*>(tensor.values_out) + first * tensor.bytes,
                    reinterpret_cast<const uint8_t*>(tensor.values) + first * tensor.bytes, count * tensor.bytes);
    }

    template <class Bits>
    void collect(uint64_t place) const {
        const Bits* const values = reinterpret_cast<const Bits*>(tensor.values);
        int64_t* const indices_out = reinterpret_cast<int64_t*>(tensor.indices_out);
        Bits* const values_out = reinterpret_cast<Bits*>(tensor.values_out);
        each_word([&](uint64_t i, uint32_t word) {
            for (; word; word &= word - 1, ++place) {
                const uint64_t element = i * kBitsOfWord + static_cast<uint32_t>(__builtin_ctz(word));
                indices_out[place] = static_cast<int64_t>(tensor.first + element);
                values_out[place] = values[element];
            }
        });
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

std::vector<int64_t> count_cpu(const std::vector<Marked>& tensors, int64_t* places, int threads) {
    for_each_unit(tensors, threads, [&](const Unit& unit) {
        int64_t count = 0;
        unit.each_word([&](uint64_t, uint32_t word) { count += __builtin_popcount(word); });
        places[unit.tensor.first_unit + unit.number] = count;
    });
    std::vector<int64_t> totals;
    for (const Marked& tensor : tensors) {
        int64_t total = 0;
        for (uint64_t i = 0; i < tensor.units(); ++i) {
            const int64_t count = places[tensor.first_unit + i];
            places[tensor.first_unit + i] = total;
            total += count;
        }
        totals.push_back(total);
    }
    return totals;
}

void collect_cpu(const std::vector<Marked>& tensors, const int64_t* places, int threads) {
    for_each_unit(tensors, threads, [&](const Unit& unit) {
        const Marked& tensor = unit.tensor;
        if (!tensor.indices_out) return unit.copy();
        const uint64_t place = static_cast<uint64_t>(places[tensor.first_unit + unit.number]);
        dispatch_bytes(tensor.bytes, [&](auto bits) { unit.collect<decltype(bits)>(place); });
    });
}

}  // namespace fused_optim
