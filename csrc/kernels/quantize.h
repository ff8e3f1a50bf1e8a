// Numbers as 8-bit integers with one scale per block.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep {

/// Elements that share a scale.
inline constexpr int64_t kQuantizationBlock = 256;

/// x[k] is about codes[k] * scales[k / 256].
struct Quantized {
  at::Tensor codes;   ///< kChar, [blocks * 256], from -127 to 127.
  at::Tensor scales;  ///< kFloat, [blocks]: the largest absolute value of the block by 127; NaN when it is not finite.
};

/// Quantizes to the nearest code, ties to even.
/// @param data  kFloat, 1-D, contiguous, a multiple of 256 elements.
[[nodiscard]] Quantized quantize(const at::Tensor& data);

/// Quantizes to one of the two codes around each value, in such proportion that the mean is the value.
/// @param chance  kFloat, [data's], from 0 to less than 1: code = floor(value / scale + chance).
[[nodiscard]] Quantized quantize(const at::Tensor& data, const at::Tensor& chance);

/// The values that the codes stand for. codes: [..., blocks * 256]; scales: [..., blocks].
[[nodiscard]] at::Tensor dequantize(const at::Tensor& codes, const at::Tensor& scales);

/// Numbers from 0 to less than 1 that look random, each a function of `key` and of its element of `ids` alone.
/// @param ids  kLong, from 0 to 2**32 - 1.
[[nodiscard]] at::Tensor chances(const at::Tensor& ids, uint32_t key);

/// The hash behind `chances`: MurmurHash3's 32-bit finalizer.
[[nodiscard]] constexpr uint32_t mixed(uint32_t word) {
  word ^= word >> 16;
  word *= 0x85ebca6bU;
  word ^= word >> 13;
  word *= 0xc2b2ae35U;
  return word ^ (word >> 16);
}

}  // namespace lockstep
