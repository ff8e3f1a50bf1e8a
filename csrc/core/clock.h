// The clock of all time stamps.
#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep {

/// Now, in nanoseconds of the steady clock of this host.
[[nodiscard]] inline int64_t steady_ns() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

}  // namespace lockstep
