// Numbers as 8-bit integers with one scale per block.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "kernels/quantization.h"

namespace lockstep {

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

/// How a bucket is cut: blocks, and records of as many for each rank.
struct BlockLayout {
  at::Tensor filled;  ///< kInt, [ranks * blocks_per_rank], on the bucket's device: elements that are gradients. They
                      ///< come first, what follows is a gap, or behind the end of the bucket.
  at::Tensor ids;     ///< kInt, the same size: of the first element, modulo 2**32. Undefined: rounds to nearest.
  int64_t blocks_per_rank = 0;
  int64_t ranks = 1;
};

// On a device each of these is one launch. A record is a row of kChar: the codes of blocks_per_rank blocks, then their
// scales as bytes. `key` is that of the random numbers of one round on one rank. `error` is what rounding has left out
// of earlier steps, nothing where that is not a number: kFloat, [bucket]; or undefined.

/// The records of the sum of bucket and error: [ranks, record]. The error becomes what rounding leaves out.
/// @param bucket  1-D, contiguous, a floating type.
[[nodiscard]] at::Tensor quantize_bucket(const at::Tensor& bucket, const BlockLayout& layout, const at::Tensor& error,
                                         uint32_t key);

/// The record of the sum of the records received from every rank: [1, record]. What rounding leaves out is added to the
/// error, where those blocks are.
/// @param rank  whose blocks they are.
[[nodiscard]] at::Tensor sum_records(const at::Tensor& received, const BlockLayout& layout, int64_t rank,
                                     const at::Tensor& error, uint32_t key);

/// bucket = the values in the records of all ranks.
void dequantize_bucket(const at::Tensor& records, const BlockLayout& layout, const at::Tensor& bucket);

namespace cuda {  // the same
[[nodiscard]] at::Tensor quantize_bucket(const at::Tensor& bucket, const BlockLayout& layout, const at::Tensor& error,
                                         uint32_t key);
[[nodiscard]] at::Tensor sum_records(const at::Tensor& received, const BlockLayout& layout, int64_t rank,
                                     const at::Tensor& error, uint32_t key);
void dequantize_bucket(const at::Tensor& records, const BlockLayout& layout, const at::Tensor& bucket);
}  // namespace cuda

}  // namespace lockstep
