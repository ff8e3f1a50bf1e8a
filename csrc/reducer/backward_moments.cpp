#include "reducer/backward_moments.h"

#include <utility>

namespace lockstep {

std::vector<BackwardMoments::Pass> BackwardMoments::take() {
  const std::lock_guard lock(mutex_);
  running_.reset();
  return std::exchange(ended_, {});
}

// `now_` may wait for the GIL in tests, and so is never called under the lock.

void BackwardMoments::on_output_reached() {
  {
    const std::lock_guard lock(mutex_);
    if (running_) return;
    running_.emplace();
  }
  Moment begin = now_();
  {
    const std::lock_guard lock(mutex_);
    if (running_) running_->begin = std::move(begin);
  }
  at_end_of_backward([self = shared_from_this()] { self->on_gradients(); });
}

void BackwardMoments::on_gradients() {
  Moment gradients = now_();
  {
    const std::lock_guard lock(mutex_);
    if (!running_) return;
    running_->gradients = std::move(gradients);
  }
  // Callbacks run in the order of their registration: the engine's, which waits for the means, comes in between.
  at_end_of_backward([self = shared_from_this()] { self->on_means(); });
}

void BackwardMoments::on_means() {
  Moment means = now_();
  const std::lock_guard lock(mutex_);
  if (!running_) return;
  running_->means = std::move(means);
  ended_.push_back(*std::exchange(running_, std::nullopt));
}

}  // namespace lockstep
