#include "comm/moment.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/clock.h"

namespace lockstep {
namespace {

/// Events that nobody holds, by device: one that was recorded belongs to its device for good.
class SpareEvents {
 public:
  [[nodiscard]] std::unique_ptr<c10::Event> take(at::Device device) {
    const std::lock_guard lock(mutex_);
    auto& spare = spare_[device.index()];
    if (spare.empty()) return std::make_unique<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    std::unique_ptr<c10::Event> event = std::move(spare.back());
    spare.pop_back();
    return event;
  }

  void give_back(std::unique_ptr<c10::Event> event, at::Device device) {
    const std::lock_guard lock(mutex_);
    spare_[device.index()].push_back(std::move(event));
  }

 private:
  std::mutex mutex_;
  std::map<c10::DeviceIndex, std::vector<std::unique_ptr<c10::Event>>> spare_;
};

/// Lives to the end of the process and beyond: no event may be destroyed after its device.
SpareEvents& spare_events() {
  static auto* const events = new SpareEvents;
  return *events;
}

}  // namespace

std::shared_ptr<c10::Event> timed_event(const c10::Stream& stream) {
  std::unique_ptr<c10::Event> event = spare_events().take(stream.device());
  event->record(stream);
  return {event.release(), [device = stream.device()](c10::Event* released) {
            spare_events().give_back(std::unique_ptr<c10::Event>(released), device);
          }};
}

Moment Moment::here(at::Device device) {
  Moment moment{.host = steady_ns(), .event = nullptr};
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    moment.event = timed_event(guard.getStream(device));
  }
  return moment;
}

double Moment::seconds_to(const Moment& later) const {
  if (event && later.event) return event->elapsedTime(*later.event) / 1e3;
  return static_cast<double>(later.host - host) / 1e9;
}

}  // namespace lockstep
