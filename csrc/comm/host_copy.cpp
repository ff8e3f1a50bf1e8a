#include "comm/host_copy.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

namespace lockstep {

at::Tensor staging(int64_t numel, at::ScalarType dtype, at::Device target) {
  return at::empty({numel}, at::dtype(dtype).pinned_memory(!target.is_cpu()));
}

at::Tensor sent_to(const at::Tensor& staged, at::Device target) { return staged.to(target, /*non_blocking=*/true); }

HostCopy::HostCopy(const at::Tensor& source) {
  if (source.is_cpu()) {
    copy_ = source;
    return;
  }
  copy_ = staging(source.numel(), source.scalar_type(), source.device());
  copy_.copy_(source, /*non_blocking=*/true);
  const c10::impl::VirtualGuardImpl device(source.device().type());
  made_.emplace(source.device().type());
  made_->record(device.getStream(source.device()));
}

const at::Tensor& HostCopy::await(Communicator& comm) {
  if (made_ && !made_->query()) {
    comm.outwait([this](std::chrono::milliseconds patience) { return wait_for(patience); });
  }
  made_.reset();
  return copy_;
}

/// An event knows no waiting with a limit; it is asked again and again instead.
bool HostCopy::wait_for(std::chrono::milliseconds patience) {
  constexpr std::chrono::microseconds kBetween{50};
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!made_->query()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kBetween);
  }
  return true;
}

}  // namespace lockstep
