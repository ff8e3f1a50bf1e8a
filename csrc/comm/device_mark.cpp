#include "comm/device_mark.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/backends.h"

namespace lockstep {

void DeviceMark::set(at::Device device, uint32_t step) {
  const std::lock_guard lock(mutex_);
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!event_) event_.emplace(device.type());
  event_->record(guard.getStream(device));
  awaited_ = true;
  set_ = Clock::now();
  step_ = step;
}

DeviceMark::Sight DeviceMark::look() {
  const std::lock_guard lock(mutex_);
  if (!awaited_) return {};
  Sight sight{.state = Sight::State::kAhead,
              .age = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - set_),
              .step = step_};
  look_on_during_captures();
  try {
    awaited_ = !event_->query();
    if (!awaited_) sight.state = Sight::State::kReached;
  } catch (const c10::Error& error) {
    sight.state = Sight::State::kDeviceFailed;
    sight.error = error.what_without_backtrace();
  }
  return sight;
}

}  // namespace lockstep
