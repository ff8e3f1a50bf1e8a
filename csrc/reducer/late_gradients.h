// Mends the mean of parameters whose gradient came after their bucket had left.
#pragma once

#include <ATen/core/Tensor.h>

#include "buckets/grad_buffers.h"
#include "comm/communicator.h"
#include "reducer/usage.h"

namespace lockstep {

/// Adds what late comers did not get into bucket `id` to its mean. Collective when a parameter of the bucket was late
/// on any rank, which `usage` knows after its exchange; else does nothing. One all-reduce over these parameters.
///
/// @param mean   the bucket's mean without the late gradients; changed in place.
/// @param scale  1 / number of ranks.
void add_late_gradients(const GradBuffers& buffers, BucketId id, const ParamList& params, const UsageTracker& usage,
                        double scale, Communicator& comm, const at::Tensor& mean);

}  // namespace lockstep
