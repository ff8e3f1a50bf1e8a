// Packing and unpacking on a CUDA device: raw pointers and a stream, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/segment.h"

namespace lockstep::cuda {

/// What a bucket is made of.
enum class Element { kFloat, kDouble, kHalf, kBFloat16 };

/// How a call ended: `launches` kernels are on the stream, and `status` is not success when the next one was refused.
struct Launched {
  cudaError_t status = cudaSuccess;
  int launches = 0;
};

/// bucket[offset + k] = grad[k] * scale for every segment; the rules are those of `lockstep::pack`.
///
/// One launch for up to 1600 segments of any mix of sizes (a segment counts once per 2 GB), none when there is nothing
/// to do. The table of pointers travels in the kernel's parameters, so `segments` may go when the call returns.
/// Accesses are 16 bytes wide where a gradient and its slot lie equally modulo 16 bytes, else as wide as they can be.
///
/// @param bucket  device memory of the current device, aligned to its element.
/// @param scale   multiplied in fp32 (fp64 for kDouble); with 1 the bits are copied.
/// @param stream  of the current device; nothing waits.
[[nodiscard]] Launched launch_pack(void* bucket, std::span<const Segment> segments, Element element, double scale,
                                   cudaStream_t stream);

/// grad[k] = bucket[offset + k] for every segment that has its gradient elsewhere. Same rules.
[[nodiscard]] Launched launch_unpack(const void* bucket, std::span<const Segment> segments, Element element,
                                     cudaStream_t stream);

}  // namespace lockstep::cuda
