// When the parts of one step began and ended, by the host's clock.
#pragma once

#include <cstdint>

namespace lockstep {

/// Time stamps by `steady_ns`; 0 means that it did not happen.
struct StepTimes {
  int64_t forward_start = 0;
  int64_t backward_compute_start = 0;
  int64_t backward_compute_end = 0;
  int64_t communication_start = 0;
  int64_t communication_end = 0;
};

}  // namespace lockstep
