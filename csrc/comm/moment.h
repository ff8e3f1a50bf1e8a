// A moment on the host and on its device, to be read later.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>

namespace lockstep {

/// When the host was there and, with a device, an event where the device will be. Copies share the event.
struct Moment {
  int64_t host = 0;                   ///< By `steady_ns`; 0: it never came.
  std::shared_ptr<c10::Event> event;  ///< With timing; null on the host.

  /// Here: by the clock, and for a device by an event on its current stream. Waits for nothing.
  [[nodiscard]] static Moment here(at::Device device);
  /// The device has been there, as far as there is one.
  [[nodiscard]] bool has_passed() const { return !event || event->query(); }
  /// From here to a later moment: as the device sees it, where both have one. Both must have passed.
  [[nodiscard]] double seconds_to(const Moment& later) const;
};

/// An event that can be timed, recorded on `stream`. Events that nobody holds any more are used again: to create one
/// costs more than to record it. Thread-safe.
[[nodiscard]] std::shared_ptr<c10::Event> timed_event(const c10::Stream& stream);

}  // namespace lockstep
