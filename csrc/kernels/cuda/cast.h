// Packing and unpacking with a cast on a CUDA device: raw pointers and a stream, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/cuda/pack.h"
#include "kernels/segment.h"

namespace lockstep::cuda {

/// bucket[offset + k] = cast(grad[k] * scale) for every segment; the rules are those of `lockstep::pack_cast`, and
/// those of `launch_pack` on tables, launches and streams. A segment counts once per 2**30 elements.
///
/// @param wire   of the bucket.
/// @param grads  of the gradients.
[[nodiscard]] Launched launch_pack_cast(void* bucket, std::span<const Segment> segments, Element wire, Element grads,
                                        double scale, cudaStream_t stream);

/// grad[k] = cast(bucket[offset + k]) for every segment that has a gradient. Same rules.
[[nodiscard]] Launched launch_unpack_cast(const void* bucket, std::span<const Segment> segments, Element wire,
                                          Element grads, cudaStream_t stream);

}  // namespace lockstep::cuda
