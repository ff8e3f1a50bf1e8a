// How far a device has come, for a thread that looks on.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <mutex>
#include <optional>

namespace lockstep {

/// A place in the work of a device. Thread-safe; costs an event record for each mark.
class DeviceMark {
 public:
  /// Marks what `device`'s current stream has been given so far, in place of the mark before. Not while the calling
  /// thread captures a graph.
  void set(at::Device device);

  /// How long ago the mark was set, if that is at least `patience` and the device has not come there yet. A device that
  /// has failed counts as having come there: it will say so itself.
  [[nodiscard]] std::optional<std::chrono::milliseconds> overdue(std::chrono::milliseconds patience);

 private:
  using Clock = std::chrono::steady_clock;

  std::mutex mutex_;
  std::optional<c10::Event> event_;  // empty: nothing is awaited
  Clock::time_point set_{};
};

}  // namespace lockstep
