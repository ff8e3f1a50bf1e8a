#include "hooks/uncompressed.h"

#include <ATen/ATen.h>

namespace lockstep {
namespace {

class SummedInPlace final : public PendingMean {
 public:
  SummedInPlace(TransferPtr transfer, at::Tensor data) : transfer_(std::move(transfer)), data_(std::move(data)) {}

  at::Tensor wait() override {
    transfer_->wait();
    return std::move(data_);
  }

 private:
  TransferPtr transfer_;
  at::Tensor data_;
};

}  // namespace

std::unique_ptr<PendingMean> sum_in_place(const GradBucket& bucket, Communicator& comm) {
  return std::make_unique<SummedInPlace>(comm.sum(bucket.memory), bucket.memory);
}

std::unique_ptr<PendingMean> average_in_place(const GradBucket& bucket, Communicator& comm) {
  const at::NoGradGuard no_grad;
  at::Tensor memory = bucket.memory;
  memory.div_(comm.size());
  return sum_in_place(bucket, comm);
}

}  // namespace lockstep
