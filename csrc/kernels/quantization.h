// What quantizing means on every device. Standard C++: device code includes it too.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LOCKSTEP_ANY_DEVICE __host__ __device__
#else
#define LOCKSTEP_ANY_DEVICE
#endif

namespace lockstep {

/// Elements that share a scale.
inline constexpr int64_t kQuantizationBlock = 256;

/// Looks random, and is a function of `word` alone: MurmurHash3's 32-bit finalizer.
[[nodiscard]] LOCKSTEP_ANY_DEVICE constexpr uint32_t mixed(uint32_t word) {
  word ^= word >> 16;
  word *= 0x85ebca6bU;
  word ^= word >> 13;
  word *= 0xc2b2ae35U;
  return word ^ (word >> 16);
}

/// From 0 to less than 1: 24 bits of a random word, so that the largest one is below 1 as a float.
[[nodiscard]] LOCKSTEP_ANY_DEVICE constexpr float chance_of(uint32_t word) {
  return static_cast<float>(word >> 8) * (1.0F / (1 << 24));
}

}  // namespace lockstep
