#include "comm/host_copy.h"

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

namespace lockstep {

namespace {

/// Torch's allocator raises where the device has failed, and a destructor that raises ends the process.
void free_quietly(c10::DataPtr& memory) {
  const c10::DeleterFnPtr free = memory.get_deleter();
  void* context = memory.release_context();
  try {
    free(context);
  } catch (const c10::Error&) {  // the error has been or will be reported where somebody listens
  }
}

}  // namespace

at::Tensor staging(int64_t numel, at::ScalarType dtype, at::Device target) {
  const auto options = at::dtype(dtype);
  if (target.is_cpu()) return at::empty({numel}, options);
  const auto bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  auto memory = std::make_shared<c10::DataPtr>(at::getHostAllocator(target.type())->allocate(bytes));
  void* begin = memory->get();
  return at::from_blob(
      begin, {numel}, [memory = std::move(memory)](void*) { free_quietly(*memory); }, options);
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
  if (!wait_for(std::chrono::milliseconds::zero())) {
    comm.outwait([this](std::chrono::milliseconds patience) { return wait_for(patience); });
  }
  made_.reset();
  return copy_;
}

/// An event knows no waiting with a limit; it is asked again and again instead.
bool HostCopy::wait_for(std::chrono::milliseconds patience) {
  constexpr std::chrono::microseconds kBetween{50};
  if (!made_) return true;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!made_->query()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kBetween);
  }
  return true;
}

}  // namespace lockstep
