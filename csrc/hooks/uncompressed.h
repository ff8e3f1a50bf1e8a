// The mean of a bucket as it is: what compressing hooks do with what they do not compress.
#pragma once

#include <memory>

#include "hooks/comm_hook.h"

namespace lockstep {

/// Sums the bucket's memory over ranks, in place.
std::unique_ptr<PendingMean> sum_in_place(const GradBucket& bucket, Communicator& comm);

/// Divides the bucket's memory by the number of ranks and sums it, in place: torch's `allreduce_hook`, bit for bit.
std::unique_ptr<PendingMean> average_in_place(const GradBucket& bucket, Communicator& comm);

}  // namespace lockstep
