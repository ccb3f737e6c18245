// One block of Philox as a function to call; common/philox.h is the generator.
#pragma once

#include <cstdint>

namespace pad {

void philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

} // namespace pad
