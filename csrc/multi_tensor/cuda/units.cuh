// Many tensors in one launch: each is cut into units, one to a thread block, and their table travels as a kernel
// parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace fused_optim {
namespace {

// Tensors that share a launch.
template <class Entry, int capacity_>
struct Table {
    static constexpr int capacity = capacity_;
    Entry entries[capacity];
    uint32_t ends[capacity];  // units of the entries up to this one
    uint32_t count;

    struct Place {
        uint32_t entry;
        uint32_t unit;
    };
    __device__ __forceinline__ Place find(uint32_t unit) const {
        uint32_t low = 0, high = count - 1;
        while (low < high) {
            const uint32_t middle = (low + high) / 2;
            if (unit < ends[middle]) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return {low, low == 0 ? unit : unit - ends[low - 1]};
    }
};

constexpr uint32_t kMostUnits = 0x7FFFFFFFu;  // thread blocks of a launch

// Calls launch(number of the first entry, units) for as many tables as it takes. `units(entry)` are at least 0.
template <class Table, class Entries, class Units, class Launch>
void for_each_table(Table& table, const Entries& entries, const Units& units, const Launch& launch) {
    for (size_t next = 0; next < entries.size();) {
        const size_t first = next;
        uint64_t total = 0;
        table.count = 0;
        for (; next < entries.size() && table.count < Table::capacity; ++next) {
            const uint64_t more = units(entries[next]);
            if (more > kMostUnits) throw std::runtime_error("fused_optim: a tensor is too large for a launch");
            if (total + more > kMostUnits) break;
            total += more;
            table.entries[table.count] = entries[next];
            table.ends[table.count++] = static_cast<uint32_t>(total);
        }
        if (total) launch(first, static_cast<uint32_t>(total));
    }
}

}  // namespace
}  // namespace fused_optim
