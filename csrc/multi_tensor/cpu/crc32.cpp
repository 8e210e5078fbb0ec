// Bytes are a polynomial over GF(2), the first bit its highest power; the CRC-32 is its remainder. Where P divides
// a - b, a may take b's place: so the front of the bytes, times a power of x modulo P, is added to bytes behind it, 16
// bytes at a time, by the processor's carry-less multiplication. What is left is 16 bytes long and has the same
// remainder. As in zlib, bits are reflected: the lowest bit of a register is the highest power.
#include "crc32.h"

#include <array>

#include "cpu/isa.h"

#if defined(FUSED_OPTIM_X86_ISAS)
#include <immintrin.h>
#endif

namespace fused_optim {

bool can_fold_crc32() {
#if defined(FUSED_OPTIM_X86_ISAS)
    return best_isa() != Isa::kBaseline && __builtin_cpu_supports("pclmul");
#else
    return false;
#endif
}

#if defined(FUSED_OPTIM_X86_ISAS)
namespace {

constexpr uint32_t times_x(uint32_t polynomial) {
    constexpr uint32_t kP = 0xEDB88320;
    return polynomial >> 1 ^ (polynomial & 1 ? kP : 0);
}

// x^n modulo P, as a factor of 64 bits.
constexpr uint64_t power(int n) {
    uint32_t found = uint32_t{1} << 31;  // x^0
    for (int i = 0; i < n; ++i) found = times_x(found);
    return static_cast<uint64_t>(found) << 32;
}

constexpr std::array<uint32_t, 256> make_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        table[byte] = byte;
        for (int bit = 0; bit < 8; ++bit) table[byte] = times_x(table[byte]);
    }
    return table;
}

uint32_t one_by_one(const uint8_t* bytes, size_t size, uint32_t remainder) {
    static constexpr std::array<uint32_t, 256> kTable = make_table();
    for (size_t i = 0; i < size; ++i) remainder = kTable[(remainder ^ bytes[i]) & 255] ^ remainder >> 8;
    return remainder;
}

#define FUSED_OPTIM_FOLDS __attribute__((target("sse2,pclmul"), always_inline)) inline

FUSED_OPTIM_FOLDS __m128i load(const uint8_t* bytes) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

// What moves 16 bytes so many bits ahead. A product of reflected factors has one power less than its 128 bits.
template <int kBits>
FUSED_OPTIM_FOLDS __m128i ahead(__m128i bytes) {
    const __m128i powers = _mm_set_epi64x(static_cast<int64_t>(power(kBits - 1)),  // of the last 8 bytes
                                          static_cast<int64_t>(power(kBits + 63)));
    return _mm_xor_si128(_mm_clmulepi64_si128(bytes, powers, 0x00), _mm_clmulepi64_si128(bytes, powers, 0x11));
}

constexpr size_t kBlock = 16, kLanes = 4;

// At least kLanes blocks, and nothing but blocks.
__attribute__((target("sse2,pclmul"))) uint32_t fold(const uint8_t* bytes, size_t size, uint32_t remainder) {
    __m128i lanes[kLanes];
    for (size_t k = 0; k < kLanes; ++k) lanes[k] = load(bytes + k * kBlock);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(remainder)));
    size_t done = kLanes * kBlock;
    for (; size - done >= kLanes * kBlock; done += kLanes * kBlock) {
        for (size_t k = 0; k < kLanes; ++k) {
            lanes[k] = _mm_xor_si128(ahead<8 * kLanes * kBlock>(lanes[k]), load(bytes + done + k * kBlock));
        }
    }
    __m128i all = lanes[0];
    for (size_t k = 1; k < kLanes; ++k) all = _mm_xor_si128(ahead<8 * kBlock>(all), lanes[k]);
    for (; done < size; done += kBlock) all = _mm_xor_si128(ahead<8 * kBlock>(all), load(bytes + done));
    alignas(kBlock) uint8_t left[kBlock];
    _mm_store_si128(reinterpret_cast<__m128i*>(left), all);
    return one_by_one(left, kBlock, 0);
}

}  // namespace

uint32_t crc32_cpu(const uint8_t* bytes, size_t size, uint32_t crc) {
    uint32_t remainder = ~crc;
    const size_t folded = size < kLanes * kBlock ? 0 : size / kBlock * kBlock;
    if (folded) remainder = fold(bytes, folded, remainder);
    return ~one_by_one(bytes + folded, size - folded, remainder);
}
#else
uint32_t crc32_cpu(const uint8_t*, size_t, uint32_t) { return 0; }
#endif

}  // namespace fused_optim
