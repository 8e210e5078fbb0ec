// Times the CPU engine's inner part as several revisions have it, turn by turn in one process; cpu_update.py compiles
// it. Arguments: elements, repeats, then LIBRARY:ISA each. Prints a row for each mix: its name, its bytes per element,
// and nanoseconds per element, the least of all repeats, for each library.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "adam.h"

using namespace fused_optim;

namespace {

using UpdateRange = uint32_t(const Shard&, const Scalars&, uint64_t, uint64_t);

struct Case {
    const char* name;
    Element param;
    Master master;
    Format moments;
};

constexpr Case kCases[] = {
    {"FP32", Element::kFloat32, Master::kParameter, Format::kFloat32},
    {"FP32 master, FP32 states", Element::kBFloat16, Master::kFloat32, Format::kFloat32},
    {"FP32 master, BF16 states", Element::kBFloat16, Master::kFloat32, Format::kBFloat16},
    {"FP32 master, FP16 states", Element::kBFloat16, Master::kFloat32, Format::kFloat16},
    {"FP32 master, FP8 states", Element::kBFloat16, Master::kFloat32, Format::kFloat8},
    {"FP32 master, int8 states", Element::kBFloat16, Master::kFloat32, Format::kInt8},
    {"16-bit remainder, BF16 states", Element::kBFloat16, Master::kRemainder16, Format::kBFloat16},
    {"16-bit remainder, int8 states", Element::kBFloat16, Master::kRemainder16, Format::kInt8},
    {"8-bit remainder, FP8 states", Element::kBFloat16, Master::kRemainder8, Format::kFloat8},
    {"8-bit remainder, int8 states", Element::kBFloat16, Master::kRemainder8, Format::kInt8},
    {"no master, BF16 states", Element::kBFloat16, Master::kParameter, Format::kBFloat16},
    {"no master, FP8 states", Element::kBFloat16, Master::kParameter, Format::kFloat8},
    {"no master, int8 states", Element::kBFloat16, Master::kParameter, Format::kInt8},
};

// The engine's functions are C++: this is how GCC and Clang name them.
UpdateRange* find(const std::string& library, const std::string& isa) {
    void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    const std::string name = "update_range_" + isa;
    const std::string symbol =
        "_ZN11fused_optim" + std::to_string(name.size()) + name + "ERKNS_5ShardERKNS_7ScalarsEmm";
    void* const found = handle ? dlsym(handle, symbol.c_str()) : nullptr;
    if (!found) {
        std::fprintf(stderr, "%s\n", dlerror());
        std::exit(1);
    }
    return reinterpret_cast<UpdateRange*>(found);
}

// Aligned as torch aligns tensors.
struct alignas(64) Line {
    float values[16];
};
using Memory = std::vector<Line>;

Memory zeros(size_t count) { return Memory(count / 16 + 1); }

// Normal numbers, as elements of a type, in as much memory as FP32's take.
Memory numbers(Element type, size_t count, float size) {
    Memory memory = zeros(count);
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < count; ++i) {
        const float x = size * normal(generator);
        if (type == Element::kFloat32) {
            memory[i / 16].values[i % 16] = x;
        } else {
            reinterpret_cast<uint16_t*>(memory.data())[i] = bfloat16_nearest_even(x);
        }
    }
    return memory;
}

int moved(const Case& c) {
    const int master = 2 * master_bytes(c.master) +
                       (c.master == Master::kParameter || is_remainder(c.master) ? 2 : 1) * element_bytes(c.param);
    return element_bytes(c.param) + master + 4 * format_bytes(c.moments);
}

void measure(const Case& c, size_t count, int repeats, const std::vector<UpdateRange*>& updates) {
    Memory grad = numbers(c.param, count, 1e-3f), param = numbers(c.param, count, 0.02f);
    Memory master = c.master == Master::kFloat32 ? numbers(Element::kFloat32, count, 0.02f) : zeros(count);
    Memory m = zeros(count), v = zeros(count), scales = zeros(3 * (count / 128 + 1));
    const auto address = [](Memory& memory) { return reinterpret_cast<uint64_t>(memory.data()); };
    Shard shard{};
    shard.grad = address(grad);
    shard.param = address(param);
    shard.master = address(master);
    shard.exp_avg = address(m);
    shard.exp_avg_sq = address(v);
    shard.scales = address(scales);
    shard.numel = count;
    shard.geometry = {count, count};
    shard.grad_type = shard.param_type = c.param;
    shard.master_kind = c.master;
    shard.exp_avg_format = shard.exp_avg_sq_format = c.moments;
    shard.block_log2 = 7;
    Hyper hyper{1e-3, 0.9, 0.95, 1e-8, 0.1, 0, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 1, 0, 1};
    std::vector<double> least(updates.size(), 1e9);
    for (int repeat = 0; repeat < repeats + 2; ++repeat) {
        for (size_t i = 0; i < updates.size(); ++i) {
            ++hyper.step;
            const Scalars scalars = derive(hyper);
            const auto start = std::chrono::steady_clock::now();
            updates[i](shard, scalars, 0, count);
            const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
            if (repeat >= 2) least[i] = std::min(least[i], time.count() / static_cast<double>(count));
        }
    }
    std::printf("%s\t%d", c.name, moved(c));
    for (double time : least) std::printf("\t%.4f", time);
    std::printf("\n");
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) return 1;
    std::vector<UpdateRange*> updates;
    for (int i = 3; i < argc; ++i) {
        const std::string argument = argv[i];
        const size_t colon = argument.rfind(':');
        updates.push_back(find(argument.substr(0, colon), argument.substr(colon + 1)));
    }
    for (const Case& c : kCases) measure(c, std::strtoul(argv[1], nullptr, 10), std::atoi(argv[2]), updates);
}
