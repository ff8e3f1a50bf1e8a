// A world of one rank: every collective is the identity.
#pragma once

#include "comm/communicator.h"

namespace lockstep {

class LocalCommunicator final : public Communicator {
 public:
  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 1; }
  [[nodiscard]] std::string name() const override { return "local"; }

  TransferPtr sum(at::Tensor data) override;
  TransferPtr max(at::Tensor data) override;
  TransferPtr broadcast(at::Tensor data, int root) override;
  TransferPtr all_gather(at::Tensor output, at::Tensor input) override;
  TransferPtr all_to_all(at::Tensor output, at::Tensor input) override;
  TransferPtr reduce_scatter(at::Tensor output, at::Tensor input) override;
};

}  // namespace lockstep
