// Buckets as 8-bit integers with one scale per block of 256 elements.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/quantization.h"

namespace lockstep {

// x[k] travels as a code, from -127 to 127: x[k] is about code[k] * scale[k / 256], where a block's scale is its
// largest absolute value by 127, or NaN when one is not finite. The code is the nearest one, ties to even, or one of
// the two around x[k] in such proportion that the mean is right: floor(x[k] / scale + chance), with chance from 0 to
// less than 1 a function of `key` and of the element's id alone.

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
