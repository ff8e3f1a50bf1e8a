#include "comm/communicator.h"

#include <ATen/ATen.h>

#include "core/error.h"

namespace lockstep {

void Communicator::outwait(const std::function<bool(std::chrono::milliseconds)>& wait_for) {
  const auto deadline = std::chrono::steady_clock::now() + timeout();
  while (!wait_for(std::chrono::milliseconds(100))) {
    if (std::chrono::steady_clock::now() < deadline) continue;
    fail(Code::kStalled, "nothing came within the process group's timeout of {} ms", timeout().count());
  }
}

TransferPtr Communicator::average(at::Tensor data) {
  data.div_(size());
  return sum(std::move(data));
}

}  // namespace lockstep
