// CRC-32 of bytes, as zlib computes it: of checkpoints' files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fused_optim {

// Whether this processor multiplies polynomials. If not, zlib is as fast.
bool can_fold_crc32();

// Of `size` bytes after others, whose CRC-32 is `crc`; 0 if there are none. Requires can_fold_crc32().
uint32_t crc32_cpu(const uint8_t* bytes, size_t size, uint32_t crc);

}  // namespace fused_optim
