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

/// Limits for a model on a device, where the user gave none.
///
/// Every bucket costs the host a collective, and backward is often bound by the host: 100 MiB beat 25 MiB by up to 4
/// points of a step, and 300 MiB beat 100 on 4.5 GiB of gradients by 2 to 8 (csrc/README.md). But a model needs some
/// buckets for reduction and backward to overlap. So: a quarter of the model, between 25 and 100 MiB; of large models a
/// sixteenth, up to 400 MiB; up to 100 MiB of gradients torch's limits (1 MiB first, then 25).
/// @param total_bytes  of all gradients.
[[nodiscard]] BucketLimits chosen_limits(int64_t total_bytes);

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

/// Lets most of the last bucket leave earlier, because nothing is left of backward that could hide its reduction.
///
/// From 8 MiB on, those of its gradients that arrive last and make up a quarter of it get a bucket of their own; unless
/// that leaves less than an eighth, as before one large gradient.
///
/// @param params  one per parameter, indexed by ParamId.
/// @param groups  in the order of sending, members in the order of arrival.
[[nodiscard]] std::vector<BucketGroup> with_short_tail(std::span<const ParamSpec> params,
                                                       std::vector<BucketGroup> groups);

}  // namespace lockstep
