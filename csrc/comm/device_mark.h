// How far a device has come, for a thread that looks on.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace lockstep {

/// A place in the work of a device. Thread-safe; costs an event record for each mark.
class DeviceMark {
 public:
  struct Sight {
    enum class State { kReached, kAhead, kDeviceFailed };
    State state = State::kReached;
    std::chrono::milliseconds age{0};  ///< Since the mark was set.
    uint32_t step = 0;                 ///< For which it was set.
    std::string error{};               ///< CUDA's, if the device has failed.
  };

  /// Marks what `device`'s current stream has been given so far, in place of the mark before. Not while the calling
  /// thread captures a graph.
  void set(at::Device device, uint32_t step);

  /// Without a mark, it is reached. May be called while another thread captures a graph.
  [[nodiscard]] Sight look();

 private:
  using Clock = std::chrono::steady_clock;

  std::mutex mutex_;
  std::optional<c10::Event> event_;
  bool awaited_ = false;
  Clock::time_point set_{};
  uint32_t step_ = 0;
};

}  // namespace lockstep
