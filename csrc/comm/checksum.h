// One number for the bits of a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep {

/// Depends on every bit, on the order of the elements (not on how they lie in memory), and on shape and dtype. The same
/// on CPU and GPU, whatever the number of threads: integer arithmetic modulo 2^64. On a device the host waits. Reads
/// the tensor once; needs up to 24 MB beside it.
[[nodiscard]] int64_t checksum(const at::Tensor& tensor);

/// Combines two checksums; the order matters.
[[nodiscard]] constexpr int64_t combined(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(b) + 1);
}

}  // namespace lockstep
