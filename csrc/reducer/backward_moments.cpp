#include "reducer/backward_moments.h"

#include <utility>

namespace lockstep {

std::vector<BackwardMoments::Pass> BackwardMoments::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(ended_, {});
}

// `now_` may wait for the GIL in tests, and so is never called under the lock.

void BackwardMoments::on_output_reached() {
  const int backward = current_backward();
  {
    const std::lock_guard lock(mutex_);
    if (running_ && backward_ == backward) return;
    running_.emplace();  // in place of one that threw
    backward_ = backward;
  }
  Moment begin = now_();
  {
    const std::lock_guard lock(mutex_);
    if (running_ && backward_ == backward) running_->begin = std::move(begin);
  }
  at_end_of_backward([self = shared_from_this(), backward] { self->on_gradients(backward); });
}

void BackwardMoments::on_gradients(int backward) {
  Moment gradients = now_();
  {
    const std::lock_guard lock(mutex_);
    if (!running_ || backward_ != backward) return;
    running_->gradients = std::move(gradients);
  }
  // Callbacks run in the order of their registration: the engine's, which waits for the means, comes in between.
  at_end_of_backward([self = shared_from_this(), backward] { self->on_means(backward); });
}

void BackwardMoments::on_means(int backward) {
  Moment means = now_();
  const std::lock_guard lock(mutex_);
  if (!running_ || backward_ != backward) return;
  running_->means = std::move(means);
  ended_.push_back(*std::exchange(running_, std::nullopt));
}

}  // namespace lockstep
