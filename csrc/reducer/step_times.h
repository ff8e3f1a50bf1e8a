// When the parts of one step began and ended, by the host's clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep {

/// Time stamps in nanoseconds of a monotonic clock; 0 means that it did not happen.
struct StepTimes {
  int64_t forward_start = 0;
  int64_t backward_compute_start = 0;
  int64_t backward_compute_end = 0;
  int64_t communication_start = 0;
  int64_t communication_end = 0;

  [[nodiscard]] static int64_t now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  }
};

}  // namespace lockstep
