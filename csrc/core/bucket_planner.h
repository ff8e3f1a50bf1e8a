// Decides which gradients travel together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/bucket_plan.h"

namespace lockstep {

/// Limits in bytes for the first, second, ... bucket of each kind; the last one repeats.
/// The parameter that reaches the limit is still taken in and closes its bucket.
using BucketLimits = std::vector<int64_t>;

/// Groups parameters before the order of gradients is known: fills in registration order and sends the buckets in
/// reverse, because backward reaches the last registered layers first.
///
/// Equal arguments give equal groups on every rank; nothing depends on hashes or addresses.
///
/// @param params  one per parameter, indexed by ParamId.
/// @param limits  in bytes, each positive.
/// @throws std::invalid_argument  `limits` is empty or one of them is not positive.
/// Source: Li et al., VLDB 2020 (arXiv:2006.15704), on gradient bucketing.
[[nodiscard]] std::vector<BucketGroup> group_by_registration(std::span<const ParamSpec> params,
                                                             const BucketLimits& limits);

/// Groups parameters greedily in the order in which their gradients arrive.
///
/// Buckets are numbered by the place in `arrival` of their last member: the moment they can be sent.
/// Buckets without any element come first, so that the last bucket is one that is really sent.
///
/// @param params   one per parameter, indexed by ParamId.
/// @param arrival  expected order of gradients: a permutation of all ParamIds.
/// @param limits   in bytes, each positive.
/// @throws std::invalid_argument  `arrival` is no permutation, or see above.
[[nodiscard]] std::vector<BucketGroup> group_by_arrival(std::span<const ParamSpec> params,
                                                        std::span<const ParamId> arrival, const BucketLimits& limits);

}  // namespace lockstep
