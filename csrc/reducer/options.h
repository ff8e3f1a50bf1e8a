// What a user may choose about the reduction.
#pragma once

#include <cstdint>

#include "buckets/grad_buffers.h"
#include "core/bucket_planner.h"

namespace lockstep {

/// What the engine may assume about the parameters that a synchronised backward reaches.
enum class GraphKind {
  kComplete,  ///< Every parameter gets a gradient, in one backward or in several that belong to one forward.
  kDynamic,   ///< Any subset does, another one in every step and on every rank: `find_unused_parameters`.
  kStatic,    ///< The same subset, the same number of times in every step: `static_graph`.
};

struct ReducerOptions {
  GraphKind graph = GraphKind::kComplete;
  GradPlacement placement = GradPlacement::kOwnMemory;
  BucketLifetime lifetime = BucketLifetime::kTraining;
  /// With kDynamic: buckets of which no rank used a parameter in the last step are not sent, unless it turns out at the
  /// end of backward that one is used after all.
  bool skip_unused_buckets = false;
  /// Warnings about gradients that stayed local are errors.
  bool strict = false;
  /// Ranks may run different numbers of forwards between two reductions.
  bool uneven_forwards = false;
  /// Ranks agree in each pass on what they are about to reduce (reducer/guard.h). Equal on all ranks.
  bool guards = true;
  /// In bytes, until the order of gradients is known: by default one bucket for each dtype and device, so that no
  /// bucket can overtake a collective of the model's own backward.
  BucketLimits first_limits{INT64_MAX};
  /// In bytes, for the plan made from the order in which gradients arrived.
  BucketLimits limits{int64_t{1} << 20, int64_t{25} << 20};
};

}  // namespace lockstep
