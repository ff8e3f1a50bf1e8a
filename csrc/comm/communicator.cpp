// What a communicator gets for free; a backend that knows better overrides it.
#include "comm/communicator.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "core/error.h"

namespace lockstep {
namespace {

/// Several transfers as one. Each is awaited once, in order.
class Transfers final : public Transfer {
 public:
  explicit Transfers(std::vector<TransferPtr> parts) : parts_(std::move(parts)) {}

  void wait() override {
    for (; next_ < parts_.size(); ++next_) parts_[next_]->wait();
  }
  bool wait_for(std::chrono::milliseconds patience) override {
    while (next_ < parts_.size() && parts_[next_]->wait_for(patience)) ++next_;
    return next_ == parts_.size();
  }

 private:
  std::vector<TransferPtr> parts_;
  size_t next_ = 0;
};

}  // namespace

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

TransferPtr Communicator::average_all(std::span<const at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) tensor.div_(size());
  return sum_all(tensors);
}

TransferPtr Communicator::sum_all(std::span<const at::Tensor> tensors) {
  std::vector<TransferPtr> parts;
  parts.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) parts.push_back(sum(tensor));
  return std::make_unique<Transfers>(std::move(parts));
}

}  // namespace lockstep
