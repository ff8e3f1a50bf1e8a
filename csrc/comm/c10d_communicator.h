// Collectives through a c10d process group: gloo, NCCL, MPI-like, or one written in Python.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/communicator.h"

namespace lockstep {

/// Uses the group's own timeout and options. On an NCCL group a list of tensors is one launch, and so is its mean.
/// Calls go through the dispatcher, so that wrappers, profilers and groups written in Python see them. A group written
/// in Python takes the GIL: callers must not hold it while waiting.
class C10dCommunicator final : public Communicator {
 public:
  /// @param device  where most tensors will be, which decides what is grouped; others may be elsewhere.
  explicit C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, at::Device device = at::kCPU);

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] std::string name() const override;

  TransferPtr sum(at::Tensor data) override;
  TransferPtr sum_all(std::span<const at::Tensor> tensors) override;
  TransferPtr average_all(std::span<const at::Tensor> tensors) override;
  [[nodiscard]] std::optional<int64_t> worth_averaging_alone() const override;
  TransferPtr max(at::Tensor data) override;
  TransferPtr broadcast(at::Tensor data, int root) override;
  TransferPtr all_gather(at::Tensor output, at::Tensor input) override;
  TransferPtr all_to_all(at::Tensor output, at::Tensor input) override;
  TransferPtr reduce_scatter(at::Tensor output, at::Tensor input) override;
  bool abort(const std::string& report) override;
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  bool groups_;  // the backend makes one launch of a list, and knows the mean
};

/// Whether the text of an error says that NCCL may have lost another rank (or that the system refused it something).
/// c10d's watchdog may end the process soon after.
[[nodiscard]] bool lost_a_connection(std::string_view text);

}  // namespace lockstep
