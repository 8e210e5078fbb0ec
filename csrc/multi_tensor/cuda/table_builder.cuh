// How the host fills the table of shards.
#pragma once

#include <algorithm>
#include <iterator>

#include "cuda/table.cuh"

namespace fused_optim {
namespace {

bool is_aligned(uint64_t address, int bytes_per_element) { return address % (bytes_per_element == 1 ? 8 : 16) == 0; }

bool is_aligned(const Shard& s) {
    return is_aligned(s.grad, element_bytes(s.grad_type)) &&
           is_aligned(s.param, s.quantized ? 1 : element_bytes(s.param_type)) &&
           std::all_of(std::begin(s.states), std::end(s.states),
                       [](const State& state) { return is_aligned(state.address, format_bytes(state.format)); }) &&
           (s.master_kind == Master::kParameter || is_aligned(s.master, master_bytes(s.master_kind)));
}

// A thread's elements are an aligned group of 8 consecutive global elements.
bool has_groups8(const Shard& s) {
    const bool whole_rows = s.geometry.inner_local % kVector == 0 && s.geometry.inner_global % kVector == 0;
    return s.offset % kVector == 0 && (s.is_consecutive() || whole_rows);
}

// Whether anything rotates.
bool rounds(Rule rule, const Shard& s) {
    bool found = master_rotates(s.master_kind, s.param_type);
    for (int i = 0; i < state_count(rule); ++i) found = found || s.states[i].format != Format::kFloat32;
    return found;
}

// Fills a table until one of its limits is reached.
template <class Kernel>
class TableBuilder {
public:
    using Table = typename Kernel::Table;

    explicit TableBuilder(Kernel& kernel) : kernel_(kernel) { reset(); }

    bool add_group(const Scalars<Table::rule>& scalars) {
        if (table_.group_count == kMaxGroups) return false;
        table_.scalars[table_.group_count++] = scalars;
        return true;
    }

    bool add_shard(const Shard& s) {
        int geometry = find_geometry(s);
        if (table_.shard_count == Table::kShards || geometry < 0) return false;
        int i = static_cast<int>(table_.shard_count++);
        table_.grad[i] = s.grad;
        table_.param[i] = s.param;
        table_.master[i] = s.master;
        for (int k = 0; k < Table::kColumns; ++k) table_.states[k][i] = s.states[k].address;
        table_.scales[i] = s.scales;
        table_.numel[i] = s.numel;
        table_.offset[i] = s.offset;
        table_.key[i] = s.key;
        if constexpr (kHasWeights<Table>) {
            table_.weight_scales[i] = s.weight_scales;
            table_.absmax[i] = s.absmax;
        }
        ShardInfo<Table::kColumns> info{};
        info.master_low = static_cast<uint32_t>(s.master_kind) & 3u;
        info.master_high = static_cast<uint32_t>(s.master_kind) >> 2;
        for (int k = 0; k < Table::kColumns; ++k) info.set_state_format(k, s.states[k].format);
        info.grad_type = static_cast<uint32_t>(s.grad_type);
        info.param_type = static_cast<uint32_t>(s.param_type);
        info.block_log2 = s.block_log2;
        info.quantized = s.quantized;
        info.round_up = s.round_up;
        info.weight_format = static_cast<uint32_t>(s.weight_format);
        info.vectors = is_aligned(s) && (has_groups8(s) || !rounds(Table::rule, s)) && kernel_.has_vector_loop_for(s);
        info.group = table_.group_count - 1;
        info.geometry = static_cast<uint32_t>(geometry);
        table_.info[i] = info;
        return true;
    }

    // Cuts the shards into chunks and returns the table.
    const Table& finish(int device, const Scalars<Table::rule>* device_scalars) {
        uint64_t total = 0;
        for (uint32_t i = 0; i < table_.shard_count; ++i) total += table_.numel[i];
        const uint64_t wanted = static_cast<uint64_t>(kTile) * kernel_.resident_blocks(device) * kChunksPerBlock;
        const uint64_t tiles = std::min<uint64_t>(total / wanted, kernel_.tiles_per_chunk);
        table_.chunk = static_cast<uint32_t>(kTile * std::max<uint64_t>(tiles, 1));
        table_.first_chunk[0] = 0;
        for (uint32_t i = 0; i < table_.shard_count; ++i) {
            uint64_t chunks = (table_.numel[i] + table_.chunk - 1) / table_.chunk;
            table_.first_chunk[i + 1] = table_.first_chunk[i] + static_cast<uint32_t>(chunks);
        }
        fill_buckets();
        table_.device_scalars = device_scalars;
        return table_;
    }

    void reset() {
        table_.shard_count = table_.group_count = 0;
        table_.geometry_count = 1;  // 0 stands for consecutive elements
    }

private:
    void fill_buckets() {
        const uint32_t chunks = table_.first_chunk[table_.shard_count];
        table_.bucket_log2 = 0;
        while (chunks >> table_.bucket_log2 >= kBuckets) ++table_.bucket_log2;
        uint16_t shard = 0;
        for (uint32_t bucket = 0; bucket << table_.bucket_log2 < chunks; ++bucket) {
            while (bucket << table_.bucket_log2 >= table_.first_chunk[shard + 1]) ++shard;
            table_.bucket_shard[bucket] = shard;
        }
    }

    int find_geometry(const Shard& s) {
        if (s.is_consecutive()) return 0;
        for (uint32_t i = 1; i < table_.geometry_count; ++i) {
            const Geometry& known = table_.geometries[i];
            if (known.inner_local == s.geometry.inner_local && known.inner_global == s.geometry.inner_global) {
                return static_cast<int>(i);
            }
        }
        if (table_.geometry_count == kMaxGeometries) return -1;
        table_.geometries[table_.geometry_count] = s.geometry;
        return static_cast<int>(table_.geometry_count++);
    }

    Kernel& kernel_;
    Table table_;
};

}  // namespace
}  // namespace fused_optim
