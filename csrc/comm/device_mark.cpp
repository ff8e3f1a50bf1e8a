#include "comm/device_mark.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/backends.h"

namespace lockstep {

void DeviceMark::set(at::Device device) {
  const std::lock_guard lock(mutex_);
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!event_) event_.emplace(device.type());
  event_->record(guard.getStream(device));
  set_ = Clock::now();
}

std::optional<std::chrono::milliseconds> DeviceMark::overdue(std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  if (!event_) return std::nullopt;
  const auto age = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - set_);
  if (age < patience) return std::nullopt;
  look_on_during_captures();
  try {
    if (!event_->query()) return age;
  } catch (const c10::Error&) {
  }
  event_.reset();
  return std::nullopt;
}

}  // namespace lockstep
