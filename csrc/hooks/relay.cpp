#include "hooks/relay.h"

#include <ATen/ATen.h>

#include <utility>

namespace lockstep {

void Relay::pass_on() {
  std::exception_ptr failure;
  for (TwoRounds* runner : std::exchange(runners_, {})) {
    // After a failure nothing is sent any more: the other ranks could take it for something else.
    if (!failure) {
      try {
        runner->start_second();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    runner->failure_ = failure;
  }
}

at::Tensor TwoRounds::wait() {
  const at::NoGradGuard no_grad;
  relay_->pass_on();
  if (failure_) std::rethrow_exception(failure_);
  return finish();
}

}  // namespace lockstep
