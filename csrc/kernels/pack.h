// Moves a bucket's worth of gradients into flat memory, and back, in one pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "kernels/segment.h"

namespace lockstep {

/// bucket[offset + k] = grad[k] * scale for every segment, computed in fp32 for half types.
///
/// A segment whose `grad` is its own slot is scaled in place (left alone when `scale` is 1). Gaps between slots are
/// not touched. On a device: one launch on the current stream, the host does not wait.
/// Moves 2 * sizeof(element) bytes per element.
///
/// @param bucket  1-D, contiguous, a real floating-point dtype.
void pack(const at::Tensor& bucket, std::span<const Segment> segments, double scale);

/// grad[k] = bucket[offset + k] for every segment that has its gradient elsewhere. Same rules as `pack`.
void unpack(const at::Tensor& bucket, std::span<const Segment> segments);

namespace cuda {

/// The same two for whatever is not on the CPU: from kernels/cuda, or a clear refusal in a build without CUDA.
void pack(const at::Tensor& bucket, std::span<const Segment> segments, double scale);
void unpack(const at::Tensor& bucket, std::span<const Segment> segments);

}  // namespace cuda
}  // namespace lockstep
