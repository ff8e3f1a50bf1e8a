// Packing and unpacking with a cast in between: a bucket of half the bytes, in the same single pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "kernels/segment.h"

namespace lockstep {

/// bucket[offset + k] = cast(grad[k] * scale) for every segment. The product is formed in fp32 (fp64 gradients: in
/// fp64, then rounded to fp32), the cast rounds to nearest even, and what is too large becomes infinity.
///
/// A segment's gradient has dtype `grads` and must not be in the bucket. Gaps between slots are not touched. On a
/// device: one launch on the current stream, the host does not wait. From fp32: 6 bytes moved per element.
///
/// @param bucket  1-D, contiguous, kHalf or kBFloat16.
/// @param grads   kFloat, kDouble, kHalf or kBFloat16, another one than the bucket's.
void pack_cast(const at::Tensor& bucket, std::span<const Segment> segments, at::ScalarType grads, double scale);

/// grad[k] = cast(bucket[offset + k]) for every segment that has a gradient. Same rules; `bucket` may be of any of the
/// four dtypes.
void unpack_cast(const at::Tensor& bucket, std::span<const Segment> segments, at::ScalarType grads);

namespace cuda {

/// The same two for whatever is not on the CPU: from kernels/cuda, or a clear refusal in a build without CUDA.
void pack_cast(const at::Tensor& bucket, std::span<const Segment> segments, at::ScalarType grads, double scale);
void unpack_cast(const at::Tensor& bucket, std::span<const Segment> segments, at::ScalarType grads);

}  // namespace cuda
}  // namespace lockstep
