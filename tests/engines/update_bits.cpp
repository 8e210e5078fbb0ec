// What the CPU engine's updates store, for every combination of formats: a line for each tensor, with a hash of its
// bits. Programs for different processors print the same, for NaNs are hashed as one NaN.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "launch.h"
#include "quantize.h"

namespace fused_optim {
namespace {

constexpr uint64_t kBlocks = 9, kBlockSize = 128;
constexpr uint64_t kNumel = kBlocks * kBlockSize + 37;  // two tiles and a part of one, a short last block
constexpr int kSteps = 3;

struct Random {
    uint32_t seed;
    uint32_t at(uint64_t i) const { return finalize(finalize(seed) + static_cast<uint32_t>(i) * kGoldenRatio); }
};

// Magnitudes from 2^(first - 127) on, for `count` powers of two; first = 0: denormals.
struct Range {
    uint32_t first, count;
};
constexpr Range kRanges[] = {{107, 24}, {127, 1}, {67, 20}, {52, 14}, {0, 1}, {1, 3}, {0, 60}, {186, 6}, {0, 130}};

// Ordinary, tiny, denormal and large values, some zeros; `special`: infinities and NaNs of several payloads as well.
float value(const Random& random, uint64_t i, bool special) {
    const uint32_t bits = random.at(i), choice = random.at(i + kNumel), sign = choice & 0x80000000u;
    if (special && choice % 97 < 2) return bits_float(sign | kInfinity);
    if (special && choice % 97 == 2) return bits_float(sign | kInfinity | (bits & 0x7FFFFFu) | 1u);
    if (choice % 31 == 0) return bits_float(sign);
    const Range range = kRanges[i / kBlockSize % kBlocks];
    return bits_float(sign | (range.first + bits / 0x1000000u % range.count) << 23 | (bits & 0x7FFFFFu));
}

using Bytes = std::vector<uint8_t>;

uint64_t address(Bytes& bytes) { return bytes.empty() ? 0 : reinterpret_cast<uint64_t>(bytes.data()); }

Bytes elements(Element type, const Random& random, bool special) {
    Bytes bytes(kNumel * element_bytes(type));
    dispatch_element(type, [&](auto codec) {
        for (uint64_t i = 0; i < kNumel; ++i) {
            const auto bits = codec.encode(value(random, i, special));
            std::memcpy(&bytes[i * sizeof bits], &bits, sizeof bits);
        }
    });
    return bytes;
}

// `not_a_number`: from where on magnitudes are NaNs; more than `sign` holds: nowhere.
template <class Bits>
uint64_t hash(const Bytes& bytes, uint32_t not_a_number, uint32_t sign) {
    uint64_t result = 0xCBF29CE484222325u;  // FNV-1a
    for (size_t i = 0; i < bytes.size(); i += sizeof(Bits)) {
        Bits bits;
        std::memcpy(&bits, &bytes[i], sizeof bits);
        if ((bits & (sign - 1)) >= not_a_number) bits = static_cast<Bits>(not_a_number);
        result = (result ^ bits) * 0x100000001B3u;
    }
    return result;
}

uint64_t hash_codes(const Bytes& bytes) { return hash<uint8_t>(bytes, 0x100u, 0x100u); }
uint64_t hash_float8(const Bytes& bytes) { return hash<uint8_t>(bytes, 0x7Fu, 0x80u); }
uint64_t hash_elements(Element type, const Bytes& bytes) {
    switch (type) {
        case Element::kFloat32: return hash<uint32_t>(bytes, kInfinity + 1, 0x80000000u);
        case Element::kBFloat16: return hash<uint16_t>(bytes, 0x7F81u, 0x8000u);
        default: return hash<uint16_t>(bytes, 0x7C01u, 0x8000u);
    }
}

// What is combined. `quantized`: the parameter is a weight of format `weight`, and `param` says nothing.
struct Kinds {
    Rule rule;
    Element grad, param;
    bool quantized;
    WeightFormat weight;
    Master master;
    Format states[kMaxStates];
    int block_log2;
    int options;
    bool special;
};

Hyper hyper_of(Rule rule, int options, int step, const float (&scaling)[2]) {
    Hyper hyper{};
    hyper.lr = 0.01;
    const double eps = options == 1 ? 0.0 : 1e-8;
    const double usual[] = {0.9, 0.99, eps, options != 2 ? 1.0 : 0.0};  // of which Lion and Muon take two
    const double slow[] = {0.9, 0.99, 0.999, 5.0, eps, 2.0, 10.0, -0.10536, -0.0010005};
    if (rule == Rule::kAdemamix) {
        std::copy(std::begin(slow), std::end(slow), hyper.values);
    } else {
        std::copy(std::begin(usual), std::end(usual), hyper.values);
    }
    hyper.weight_decay = 0.1;
    hyper.step = step;
    hyper.decoupled = options != 1;
    hyper.maximize = options == 1;
    hyper.stochastic_rounding = options != 1;
    if (options == 1) hyper.grad_scale = &scaling[0];
    if (options == 2) hyper.grad_factor = &scaling[1];
    return hyper;
}

void print(const Kinds& k, const char* tensor, uint64_t hash) {
    const auto name = [](auto kind) { return EnumNames<decltype(kind)>::all[static_cast<int>(kind)]; };
    std::printf("%s grad=%s param=%s master=%s states=%s,%s block=%d options=%d %s %s %016llx\n", name(k.rule),
                name(k.grad), k.quantized ? name(k.weight) : name(k.param), name(k.master), name(k.states[0]),
                name(k.states[1]), 1 << k.block_log2, k.options, k.special ? "special" : "finite", tensor,
                static_cast<unsigned long long>(hash));
}

void update(const Kinds& k) {
    const int states = state_count(k.rule);
    const uint64_t numel = k.quantized ? kBlocks * kBlockSize : kNumel;
    Bytes param = k.quantized ? Bytes(numel) : elements(k.param, {1}, k.special);
    Bytes master(kNumel * master_bytes(k.master));
    if (k.master == Master::kFloat32) master = elements(Element::kFloat32, {1}, k.special);
    for (size_t i = 0; is_remainder(k.master) && i < master.size(); ++i) master[i] = Random{2}.at(i) & 0xFFu;
    Bytes state_bytes[kMaxStates];
    for (int i = 0; i < states; ++i) state_bytes[i].resize(kNumel * format_bytes(k.states[i]));
    Bytes scales(4 * (kMaxStates + 1) * (kNumel / 32 + 1)), weight_scales;
    if (k.quantized) {
        weight_scales.resize(numel);
        const float whole = 0.001f;
        std::memcpy(weight_scales.data(), &whole, sizeof whole);
    }

    const float scaling[2] = {1024.0f, 0.37f};
    Bytes grad;
    float absmax = 0.0f;
    for (int step = 1; step <= kSteps; ++step) {
        grad = elements(k.grad, {10u + static_cast<uint32_t>(step)}, k.special);
        Shard shard{};
        shard.grad = address(grad);
        shard.param = address(param);
        shard.master = address(master);
        for (int i = 0; i < states; ++i) shard.states[i] = {address(state_bytes[i]), k.states[i]};
        shard.scales = address(scales);
        shard.weight_scales = address(weight_scales);
        shard.absmax = k.quantized ? reinterpret_cast<uint64_t>(&absmax) : 0;
        shard.numel = numel;
        shard.geometry = {numel, numel};
        shard.key = 0x12345678u;
        shard.grad_type = k.grad;
        shard.param_type = k.param;
        shard.master_kind = k.master;
        shard.block_log2 = static_cast<uint8_t>(k.block_log2);
        shard.quantized = k.quantized;
        shard.weight_format = k.weight;
        launch_cpu({k.rule, {shard}, {hyper_of(k.rule, k.options, step, scaling)}}, 1);
    }

    print(k, "grad", hash_elements(k.grad, grad));
    print(k, "param", k.quantized ? hash_float8(param) : hash_elements(k.param, param));
    print(k, "master", k.master == Master::kFloat32 ? hash_elements(Element::kFloat32, master) : hash_codes(master));
    for (int i = 0; i < states; ++i) {
        const bool codes = is_scaled(k.states[i]);
        print(k, ("state" + std::to_string(i)).c_str(),
              codes ? hash_codes(state_bytes[i]) : hash_elements(unscaled_type(k.states[i]), state_bytes[i]));
    }
    print(k, "scales", hash_elements(Element::kFloat32, scales));
    if (k.quantized) {
        const bool floats = k.weight != WeightFormat::kMXFloat8;
        print(k, "weight_scales", floats ? hash_elements(Element::kFloat32, weight_scales) : hash_codes(weight_scales));
        print(k, "absmax", float_bits(absmax));
    }
}

template <class Enum, class Visit>
void each(const Visit& visit) {
    for (int i = 0; i < kCount<Enum>; ++i) visit(static_cast<Enum>(i));
}

// Gradients, sizes of blocks, hyperparameters, with and without infinities and NaNs.
void update_in_all_ways(Kinds k) {
    each<Element>([&](Element grad) {
        for (int way = 0; way < 18; ++way) {
            k.grad = grad;
            k.block_log2 = 5 + way % 3;
            k.options = way / 3 % 3;
            k.special = way >= 9;
            update(k);
        }
    });
}

void each_parameter(Kinds k) {
    each<Master>([&](Master master) {
        k.master = master;
        k.quantized = false;
        each<Element>([&](Element param) {
            k.param = param;
            const bool split = is_remainder(master) && param != Element::kBFloat16;
            const bool twice = master == Master::kFloat32 && param == Element::kFloat32;
            if (!split && !twice) update_in_all_ways(k);
        });
        k.param = Element::kBFloat16;
        k.quantized = true;
        each<WeightFormat>([&](WeightFormat weight) {
            k.weight = weight;
            const bool whole_master = master == Master::kFloat32 || master == Master::kFloat16;
            if (whole_master && traits_of(weight).written_by_update) update_in_all_ways(k);
        });
    });
}

void each_combination() {
    each<Rule>([&](Rule rule) {
        each<Format>([&](Format first) {
            each<Format>([&](Format second) {
                Kinds k{};
                k.rule = rule;
                k.states[0] = first;
                std::fill(k.states + 1, k.states + kMaxStates, second);
                const int states = state_count(rule);
                if ((states > 0 || first == Format{}) && (states > 1 || second == Format{})) each_parameter(k);
            });
        });
    });
}

}  // namespace
}  // namespace fused_optim

int main() { fused_optim::each_combination(); }
