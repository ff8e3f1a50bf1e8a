#include "core/backward_tracker.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace lockstep {

std::vector<BucketId> BucketRange::ids() const {
  std::vector<BucketId> ids;
  ids.reserve(last - first);
  for (size_t i = first; i < last; ++i) ids.push_back(bucket_id(i));
  return ids;
}

BackwardTracker::BackwardTracker(const BucketPlan& plan)
    : plan_(&plan), remaining_(plan.num_params(), 0), waiting_for_(plan.num_buckets(), 0) {}

BucketRange BackwardTracker::begin(std::span<const uint32_t> firings) {
  if (firings.size() != remaining_.size()) {
    throw std::invalid_argument(
        fmt::format("begin got {} firing counts for {} parameters", firings.size(), remaining_.size()));
  }
  next_ = 0;
  std::ranges::fill(waiting_for_, 0U);
  for (size_t i = 0; i < firings.size(); ++i) {
    const Slot& slot = plan_->slot(param_id(i));
    remaining_[i] = slot.numel == 0 && !slot.in_place ? 0 : firings[i];
    if (remaining_[i] > 0) ++waiting_for_[index(slot.bucket)];
  }
  return leave();
}

BucketRange BackwardTracker::mark_ready(ParamId id) {
  uint32_t& remaining = remaining_[index(id)];
  if (remaining == 0 || --remaining > 0) return {next_, next_};
  --waiting_for_[index(plan_->slot(id).bucket)];
  return leave();
}

BucketRange BackwardTracker::finish() {
  const size_t first = std::exchange(next_, waiting_for_.size());
  return {first, next_};
}

std::vector<ParamId> BackwardTracker::missing() const {
  std::vector<ParamId> ids;
  for (size_t i = 0; i < remaining_.size(); ++i) {
    if (remaining_[i] > 0) ids.push_back(param_id(i));
  }
  return ids;
}

BucketRange BackwardTracker::leave() {
  const size_t first = next_;
  while (next_ < waiting_for_.size() && waiting_for_[next_] == 0) ++next_;
  return {first, next_};
}

}  // namespace lockstep
