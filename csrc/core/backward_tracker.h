// Counts the gradients of one backward pass and says which buckets may leave.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/bucket_plan.h"

namespace lockstep {

/// Buckets [first, last), in the order of sending.
struct BucketRange {
  size_t first = 0;
  size_t last = 0;

  [[nodiscard]] bool empty() const { return first == last; }
  [[nodiscard]] std::vector<BucketId> ids() const;
};

/// Small state without a lock: whoever owns it serialises the calls. Costs O(1) per gradient and never allocates
/// between `begin` and the end of the pass.
///
/// Buckets leave strictly in plan order, so that every rank issues the same list of collectives whatever the order
/// of its own gradients: one that is complete before its turn is held back.
class BackwardTracker {
 public:
  /// @param plan  must outlive the tracker.
  explicit BackwardTracker(const BucketPlan& plan);

  /// Starts a pass. `firings[i]` says how often parameter i will report before its gradient is final: 1 in an
  /// ordinary graph, 0 when it is presumed unused, more when parts of the graph run several times. Parameters without
  /// elements are never waited for. Returns the buckets that wait for nothing: they may leave at once.
  BucketRange begin(std::span<const uint32_t> firings);

  /// One report of parameter `id`. Returns the buckets that may leave now.
  /// A report beyond the announced number changes nothing: ask `complete` before.
  BucketRange mark_ready(ParamId id);

  /// Stops waiting: returns all buckets that have not left yet.
  BucketRange finish();

  /// All announced reports of this parameter have come.
  [[nodiscard]] bool complete(ParamId id) const { return remaining_[index(id)] == 0; }
  /// The bucket of this parameter was handed out by `begin`, `mark_ready` or `finish`.
  [[nodiscard]] bool has_left(ParamId id) const { return index(plan_->slot(id).bucket) < next_; }
  [[nodiscard]] bool all_left() const { return next_ == waiting_for_.size(); }
  [[nodiscard]] size_t num_left() const { return next_; }

  /// Parameters with reports still to come, by ParamId.
  [[nodiscard]] std::vector<ParamId> missing() const;

 private:
  BucketRange leave();

  const BucketPlan* plan_;
  std::vector<uint32_t> remaining_;    // reports to come, indexed by ParamId
  std::vector<uint32_t> waiting_for_;  // incomplete parameters, indexed by BucketId
  size_t next_ = 0;                    // buckets [0, next_) have left
};

}  // namespace lockstep
